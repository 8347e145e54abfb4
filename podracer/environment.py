"""What an environment is, the helpers that make one short, and the check that a user can call."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from podracer.types import (
    ArraySpec,
    ConfigError,
    Continuous,
    Discrete,
    EnvironmentFault,
    EnvironmentSpec,
    EnvState,
    PodracerError,
    PyTree,
    TimeStep,
    struct,
)

T = TypeVar("T")


@runtime_checkable
class Environment(Protocol):
    """Pure functions over one instance; drivers `vmap` them. Holds no key.

    An environment restarts by itself. A true terminal (`discount` 0) restarts in the same step:
    the timestep carries the last reward and the first observation of the next episode, with
    `first` set. A time-out is shown with `last` set and `discount` 1, and the step after it
    ignores its action and restarts. `auto_reset` gives both to an environment that does neither.
    """

    @property
    def spec(self) -> EnvironmentSpec: ...

    def reset(self, key: jax.Array) -> tuple[EnvState, TimeStep]: ...

    def step(
        self, key: jax.Array, state: EnvState, action: jax.Array
    ) -> tuple[EnvState, TimeStep]: ...


class HostEnvironment(Protocol):
    """B environments of the host, stepped together by one thread; numpy in, numpy out.

    Leaves of a timestep are `[B, ...]` with the dtypes of `TimeStep`; they may be overwritten by
    the next `step`. The environments restart by themselves: a time-out or a terminal is shown with
    its final observation and `last` set (`discount` 0 for a terminal), and the step after it
    ignores that row's action and shows a fresh episode's beginning: `first` set, reward 0,
    discount 1. An end that needs no reset, such as a lost life, may be both in one timestep:
    `discount` 0, `first` set and `last` not. An adapter that loses an episode to a fault just shows
    the next one's beginning; the driver sees that no end came before it, and the broken transition
    does not train.
    """

    def reset(self, seed: int, indices: np.ndarray, start: int) -> TimeStep:
        """Begin anew. Row b's randomness depends on (`seed`, `indices[b]`, `start`) alone: the
        run's seed, the row's number among all of the run, and the steps that the run has done."""
        ...

    def step(self, action: np.ndarray) -> TimeStep:
        """One step with actions `[B]` i32, or `[B, n]` f32. Raises `EnvironmentFault` where the
        environments cannot go on."""
        ...

    def close(self) -> None:
        """Free everything: threads, processes, memory. May be called twice, and after a fault."""
        ...


@runtime_checkable
class HostEnvironments(Protocol):
    """What makes the batches: cheap to hold, a value, equal where the settings are equal."""

    @property
    def spec(self) -> EnvironmentSpec: ...

    def make(self, num_envs: int, num_threads: int) -> HostEnvironment:
        """A batch of `num_envs`, to be stepped by `num_threads` of its own threads or processes."""
        ...


def ask(who: str, question: Callable[[], T]) -> T:
    """What a batch of host environments answers; what it raises becomes `EnvironmentFault`."""
    try:
        return question()
    except (PodracerError, KeyboardInterrupt):
        raise
    except BaseException as error:  # `sys.exit(0)` in an environment must not end a run well
        raise EnvironmentFault(
            f"{who}: the environment raised {type(error).__name__}: {error}"
        ) from error


def restart(observation: PyTree) -> TimeStep:
    """The first timestep of an episode."""
    return TimeStep(
        observation=observation,
        reward=jnp.float32(0),
        discount=jnp.float32(1),
        first=jnp.bool_(True),
        last=jnp.bool_(False),
    )


def transition(
    observation: PyTree,
    reward: jax.Array | float,
    *,
    terminal: jax.Array | bool = False,
    timeout: jax.Array | bool = False,
) -> TimeStep:
    """A timestep within an episode; `terminal` wins where both ends fall together."""
    terminal = jnp.asarray(terminal, bool)
    return TimeStep(
        observation=observation,
        reward=jnp.asarray(reward, jnp.float32),
        discount=1.0 - terminal.astype(jnp.float32),
        first=jnp.bool_(False),
        last=jnp.asarray(timeout, bool) | terminal,
    )


@struct
class AutoResetState:
    """The inner environment's state, and whether it must restart before its next step."""

    inner: EnvState
    ended: jax.Array  # bool: the timestep shown last was a time-out


@dataclasses.dataclass(frozen=True)
class AutoReset:
    """An environment that only marks its ends (`last`, `discount`), made to restart by itself."""

    inner: Any
    starts: int = 0

    @property
    def spec(self) -> EnvironmentSpec:
        return self.inner.spec

    @property
    def render(self) -> Callable[[AutoResetState], np.ndarray]:
        """The inner environment's; without one there is none here either (`hasattr`)."""
        render = self.inner.render
        return lambda state: render(state.inner)

    @property
    def for_evaluation(self) -> Callable[[], AutoReset]:
        """The inner environment's, restarting by itself; without one there is none here either."""
        inner = self.inner.for_evaluation
        return lambda: dataclasses.replace(self, inner=inner())

    def reset(self, key: jax.Array) -> tuple[AutoResetState, TimeStep]:
        state, timestep = self.inner.reset(key)
        return AutoResetState(state, jnp.bool_(False)), timestep

    def step(
        self, key: jax.Array, state: AutoResetState, action: jax.Array
    ) -> tuple[AutoResetState, TimeStep]:
        inner, timestep = self.inner.step(key, state.inner, action)
        restarts = state.ended | (timestep.last & (timestep.discount == 0))
        fresh, opening = self._begin(_sibling(key), restarts)

        def choose(new: PyTree, old: PyTree) -> PyTree:
            return jax.tree.map(lambda n, o: jnp.where(restarts, n, o), new, old)

        shown = TimeStep(
            observation=choose(opening.observation, timestep.observation),
            reward=jnp.where(state.ended, 0.0, timestep.reward),
            discount=jnp.where(state.ended, 1.0, timestep.discount),
            first=restarts,
            last=timestep.last & ~restarts,
        )
        return AutoResetState(choose(fresh, inner), shown.last), shown

    def _begin(self, key: jax.Array, restarts: jax.Array) -> tuple[EnvState, TimeStep]:
        """A fresh episode, used where the environment restarts."""
        if not self.starts:
            return self.inner.reset(key)

        @jax.custom_batching.custom_vmap
        def begin(key: jax.Array, restarts: jax.Array) -> tuple[EnvState, TimeStep]:
            return self.inner.reset(key)

        @begin.def_vmap
        def _(size: int, batched: Any, keys: jax.Array, restarts: jax.Array) -> Any:
            keys, restarts = (
                x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
                for x, is_batched in zip((keys, restarts), batched, strict=True)
            )
            few = min(self.starts, size)
            made = jax.vmap(self.inner.reset)(keys[:few])
            turns = (jnp.cumsum(restarts) - 1) % few
            handed = jax.tree.map(lambda x: x[turns], made)
            return handed, jax.tree.map(lambda _: True, handed)

        return begin(key, restarts)


def _sibling(key: jax.Array) -> jax.Array:
    """Another key, as seed 1 is to seed 0. It costs nothing; a split is dearer than CartPole."""
    data = jax.random.key_data(key) ^ np.uint32(0x9E3779B9)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))


def auto_reset(environment: Any, *, starts: int = 0) -> AutoReset:
    """Give an environment that only marks its ends the restarts that drivers expect.

    Under `vmap` a restart is computed for every environment at every step. Where that is dear,
    `starts` says how many to compute for the whole batch; environments that end in one step take
    turns with them, so more than `starts` of them begin in pairs alike.
    """
    return AutoReset(environment, starts)


# --- the check -----------------------------------------------------------------------------------


def check_environment(environment: Any) -> EnvironmentSpec:
    """Reject a broken environment before anything is compiled; return its specification.

    Shapes and dtypes are found by abstract evaluation of `reset` and `step`, so nothing runs.
    Raises `ConfigError` naming the leaf, what was expected and what came.
    """
    if isinstance(environment, AutoReset):
        check_environment(environment.inner)  # whose own words are clearer
    spec = _checked_spec(environment)
    key = jax.eval_shape(lambda: jax.random.key(0))
    state, opening = _evaluate(spec.name, "reset", environment.reset, key)
    _check_timestep(spec, "reset", opening)
    _check_no_keys(spec.name, state)
    action = action_struct(spec)
    new_state, timestep = _evaluate(spec.name, "step", environment.step, key, state, action)
    _check_timestep(spec, "step", timestep)
    _check_same(spec.name, "state", state, new_state)
    return spec


def action_struct(spec: EnvironmentSpec) -> jax.ShapeDtypeStruct:
    """Shape and dtype of one action."""
    if isinstance(spec.action, Discrete):
        return jax.ShapeDtypeStruct((), jnp.int32)
    return jax.ShapeDtypeStruct((spec.action.size,), jnp.float32)


def _checked_spec(environment: Any) -> EnvironmentSpec:
    if isinstance(environment, type):
        raise ConfigError(f"{environment.__name__} is a class: pass an environment made from it.")
    spec = getattr(environment, "spec", None)
    kind = type(environment).__name__
    if not isinstance(spec, EnvironmentSpec):
        raise ConfigError(
            f"{kind}.spec must be an EnvironmentSpec, but it is {type(spec).__name__}."
        )
    for name in ("reset", "step"):
        if not callable(getattr(environment, name, None)):
            raise ConfigError(f"{spec.name}: the environment has no method `{name}`.")
    leaves = jax.tree.leaves(spec.observation)
    if not leaves or not all(isinstance(leaf, ArraySpec) for leaf in leaves):
        raise ConfigError(f"{spec.name}: spec.observation must be a tree of podracer.Array.")
    if isinstance(spec.action, Discrete):
        number = spec.action.num_actions
        if not isinstance(number, int) or number < 1:
            raise ConfigError(f"{spec.name}: Discrete needs a number of actions, not {number!r}.")
    elif isinstance(spec.action, Continuous):
        _check_bounds(spec.name, spec.action)
    else:
        raise ConfigError(
            f"{spec.name}: spec.action must be Discrete or Continuous, "
            f"but it is {type(spec.action).__name__}."
        )
    return spec


def _check_bounds(name: str, space: Continuous) -> None:
    for side, bounds in (("low", space.low), ("high", space.high)):
        if not isinstance(bounds, tuple) or not all(isinstance(x, float | int) for x in bounds):
            raise ConfigError(
                f"{name}: Continuous.{side} must be a tuple of floats, not {bounds!r}."
            )
    low, high = np.asarray(space.low, np.float64), np.asarray(space.high, np.float64)
    if low.shape != high.shape or not low.size:
        raise ConfigError(f"{name}: Continuous needs as many lower as upper bounds, at least one.")
    if not (np.isfinite(low).all() and np.isfinite(high).all() and (low < high).all()):
        raise ConfigError(
            f"{name}: Continuous needs finite bounds with low < high, "
            f"but they are {space.low} and {space.high}."
        )


def _evaluate(name: str, method: str, function: Any, *args: Any) -> tuple[Any, Any]:
    try:
        with jax.checking_leaks():  # an environment that keeps its state on itself
            result = jax.eval_shape(function, *args)
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"{name}: `{method}` cannot be traced: {type(error).__name__}: {reason}"
        ) from error
    if not (isinstance(result, tuple) and len(result) == 2):
        raise ConfigError(f"{name}: `{method}` must return the pair (state, TimeStep).")
    if not isinstance(result[1], TimeStep):
        raise ConfigError(
            f"{name}: `{method}` must return (state, TimeStep), "
            f"but the second part is {type(result[1]).__name__}."
        )
    return result


def _check_timestep(spec: EnvironmentSpec, method: str, timestep: TimeStep) -> None:
    leaf = jax.ShapeDtypeStruct
    expected = {
        "observation": jax.tree.map(lambda x: leaf(x.shape, x.dtype), spec.observation),
        "reward": leaf((), jnp.float32),
        "discount": leaf((), jnp.float32),
        "first": leaf((), jnp.bool_),
        "last": leaf((), jnp.bool_),
    }
    for field, want in expected.items():
        where = f"{method}().timestep.{field}"
        _check_same(spec.name, where, want, getattr(timestep, field))


def _check_no_keys(name: str, state: EnvState) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise ConfigError(
                f"{name}: state{jax.tree_util.keystr(path)} is a random key; "
                "an environment holds none and uses those that `reset` and `step` are given."
            )


def _check_same(name: str, where: str, expected: PyTree, got: PyTree) -> None:
    want = {jax.tree_util.keystr(p): x for p, x in jax.tree_util.tree_leaves_with_path(expected)}
    have = {jax.tree_util.keystr(p): x for p, x in jax.tree_util.tree_leaves_with_path(got)}
    for path, leaf in want.items():
        if path not in have:
            raise ConfigError(f"{name}: {where}{path} is missing; expected {_show(leaf)}.")
    for path, other in have.items():
        if path not in want:
            raise ConfigError(f"{name}: {where}{path} was not expected; got {_show(other)}.")
        leaf = want[path]
        if leaf.shape != other.shape or leaf.dtype != other.dtype:
            raise ConfigError(
                f"{name}: {where}{path} must be {_show(leaf)}, but it is {_show(other)}."
            )
        if getattr(other, "weak_type", False) != getattr(leaf, "weak_type", False):
            raise ConfigError(
                f"{name}: {where}{path} is weakly typed, a Python number somewhere: "
                f"write jnp.asarray(x, jnp.{leaf.dtype}) to make it {_show(leaf)}."
            )
    if jax.tree.structure(expected) != jax.tree.structure(got):
        raise ConfigError(
            f"{name}: {where} must have the structure {jax.tree.structure(expected)}, "
            f"but it is {jax.tree.structure(got)}."
        )


def _show(leaf: Any) -> str:
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"
