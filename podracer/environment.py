"""Environments: the protocols that drivers call, and helpers for writing a device environment."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np

from podracer.arguments import typed
from podracer.errors import ConfigError, EnvironmentFault, PodracerError
from podracer.fields import static, struct
from podracer.types import Discrete, EnvironmentSpec, EnvState, MultiDiscrete, PyTree, TimeStep

T = TypeVar("T")
_LOG = logging.getLogger("podracer")


@runtime_checkable
class Environment(Protocol):
    """A device environment: pure functions over one instance, which drivers `vmap`.

    An environment holds no random key and restarts by itself. A true terminal (`discount` 0)
    restarts in the same step: the timestep carries the last reward and the first observation of the
    next episode, with `first` set. A time-out has `last` set and `discount` 1, and the next
    step ignores its action and restarts. `auto_reset` adds both kinds of restart to an
    environment that only marks the ends of episodes. Optional methods are in `Features`.
    """

    @property
    def spec(self) -> EnvironmentSpec: ...

    def reset(self, key: jax.Array, /) -> tuple[EnvState, TimeStep]:
        """Return the state and the first timestep of an episode."""
        ...

    def step(
        self, key: jax.Array, state: EnvState, action: jax.Array, /
    ) -> tuple[EnvState, TimeStep]:
        """Return the next state and the timestep that the action leads to."""
        ...


class HostEnvironment(Protocol):
    """A batch of B host environments, stepped together by one thread; numpy in, numpy out.

    A factory with `on_device` makes batches with arrays of a device instead.

    Leaves of a timestep are `[B, ...]` with the dtypes of `TimeStep`; the next `step` may overwrite
    them. The environments restart by themselves. A time-out or a terminal is shown with its final
    observation and `last` set (`discount` 0 for a terminal). The step after it ignores that
    row's action and shows the first timestep of the next episode: `first` set, reward 0, discount
    1. An end that needs no reset, such as a lost life, may be both in one timestep: `discount` 0,
    `first` set and `last` not. An adapter that loses an episode to a fault returns the first
    timestep of the next one; the driver detects the missing end, and the broken transition does
    not train. Optional methods are in `Features`.
    """

    def reset(self, seed: int, indices: np.ndarray, start: int) -> TimeStep:
        """Start an episode in every row and return the first timestep.

        The randomness of row b depends on three numbers only: the run's seed, the row's number
        `indices[b]` among all rows of the run, and `start`, the steps that the run has done.
        """
        ...

    def step(self, action: np.ndarray) -> TimeStep:
        """Return the next timestep, given actions `[B]` i32, or `[B, n]` i32 or f32.

        Raises `EnvironmentFault` where the environments cannot continue.
        """
        ...

    def close(self) -> None:
        """Free threads, processes and memory. May be called twice, and after a fault."""
        ...


@runtime_checkable
class HostEnvironments(Protocol):
    """A factory of batches of host environments: a small hashable value, equal by settings.

    Optional methods are in `Features`.
    """

    @property
    def spec(self) -> EnvironmentSpec: ...

    def make(self, num_envs: int, num_threads: int) -> HostEnvironment:
        """Return a batch of `num_envs` that may use `num_threads` threads or processes."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Features:
    """Optional features of environments: attributes and methods of these names, see `features`.

    What an environment has not is absent or None, and has the default here. The first four are of
    device environments, the next two of both kinds, and the others of host environments: of
    factories, and the last four of batches.
    """

    render: Callable[[EnvState], np.ndarray] | None = None
    """Draw a state of one instance (numpy leaves), uint8 `[H, W, 3]`, for `podracer play`."""
    kinds: tuple[str, ...] = ()
    """Kinds of worlds (tasks), where there are many, for agents that learn across them."""
    draw: Any = None
    """`(key) -> world`: draw a tree of arrays whose attribute `kind`, i32, indexes `kinds`."""
    enter: Any = None
    """`(key, world) -> (state, timestep)`: begin an episode in a given world."""

    for_evaluation: Callable[[], Any] | None = None
    """Return the environment to evaluate in, of the same kind as this one, such as whole games and
    unclipped rewards of Atari, or a later period of prices."""
    check_agent: Callable[[Any, Any], None] | None = None
    """Raise `ConfigError` for an `Agent` that cannot learn here, in a run of the `Experiment`."""

    with_pictures: Callable[[], HostEnvironments] | None = None
    """Return the same environments with pictures besides observations, for `podracer play`.

    Observations are then dictionaries of the `observation`, as here, and a `picture`, uint8
    `[H, W, 3]`. Raises `ConfigError` where they cannot be drawn."""
    with_deadline: Callable[[float], HostEnvironments] | None = None
    """Return the same environments, which replace what takes longer than so many seconds."""
    frame_skip: int = 0
    """Emulator frames in a step, where a step repeats each action; 0 elsewhere."""
    on_device: bool = False
    """Whether arrays of batches lie on a device, not in NumPy.

    Leaves of their timesteps are arrays of any library with `__dlpack__`, such as torch, Warp, CuPy
    or JAX, compact in memory. They are views, not copies, where the device is the actor's. `step`
    gets an array of JAX on the simulator's device, to be read by `__dlpack__` and not written to.
    It may then overwrite the arrays of the previous timestep."""
    shared: bool = False
    """Whether only one batch can be open in a process: then one thread steps all environments, and
    a run evaluates nothing, but `podracer eval` does afterwards."""

    snapshot: Callable[[], EnvState] | None = None
    """Return the state of all rows, a tree of arrays `[B, ...]`, as a checkpoint keeps it."""
    restore: Any = None
    """`(seed, indices, start, state)`: continue from a snapshot, `start` steps into the run; see
    `HostEnvironment.reset`."""
    faults: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Number of faults that the batch has recovered from, by kind, such as `died` or `hung`."""
    first_faults: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """A line on the first fault of each kind since the batch was made."""


def features(environment: Any) -> Features:
    """Return the optional features of an environment, a factory of environments or a batch."""
    names = (field.name for field in dataclasses.fields(Features))
    values = {name: getattr(environment, name, None) for name in names}
    return Features(**{name: value for name, value in values.items() if value is not None})


def wrap_features(wrapper: Any, environment: Any, *names: str, **wrapped: Any) -> None:
    """Give a wrapper optional features of the environment in it, if it has them.

    Those of `names` are as there; `wrapped` has the wrapper's own functions in place of others.
    """
    for name in (*names, *wrapped):
        if (value := getattr(environment, name, None)) is not None:
            object.__setattr__(wrapper, name, wrapped.get(name, value))


@dataclasses.dataclass(frozen=True)
class TaskGroups:
    """Environments in groups that share a task: `EnvironmentSpec.extension` for meta-learning.

    Each `num_envs` environments, one after another in the batch, show one task for `num_steps`
    steps, then another. Observations are dictionaries: `observation`, of the task itself; `task`,
    int32, which of `tasks`; `task_count`, int32, how many tasks the group had before this one.
    """

    num_envs: int
    num_steps: int
    tasks: tuple[str, ...]


def evaluation_environment(environment: Any) -> Any:
    """Return `environment.for_evaluation()` where there is such a variant, else the environment."""
    variant = features(environment).for_evaluation
    return environment if variant is None else variant()


def call_environment(caller: str, function: Callable[..., T], *args: Any) -> T:
    """Return `function(*args)`, a call into host environments, for a thread named `caller`.

    Every exception becomes an `EnvironmentFault`, except the library's own errors and Ctrl-C.
    """
    try:
        return function(*args)
    except (PodracerError, KeyboardInterrupt):
        raise
    except BaseException as error:  # `sys.exit(0)` in an environment must not count as success
        raise EnvironmentFault(
            f"{caller}: the environment raised {type(error).__name__}: {error}"
        ) from error


def expect_timestep(name: str, result: Any) -> None:
    """Raise `EnvironmentFault` where `reset` or `step` of a batch returned anything else."""
    if not isinstance(result, TimeStep):
        raise EnvironmentFault(
            f"{name}: `reset` and `step` must return a `podracer.TimeStep`, but the result is of "
            f"type {type(result).__name__}."
        )


def log_first_faults(place: str, first_faults: Mapping[str, str], logged: set[str]) -> None:
    """Log the faults of kinds that are not yet `logged`, and add these kinds to it."""
    for kind in first_faults.keys() - logged:
        logged.add(kind)
        _LOG.warning("the first fault `%s` %s, %s", kind, place, first_faults[kind])


def action_struct(spec: EnvironmentSpec) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of one action."""
    if isinstance(spec.action, Discrete):
        return jax.ShapeDtypeStruct((), jnp.int32)
    dtype = jnp.int32 if isinstance(spec.action, MultiDiscrete) else jnp.float32
    return jax.ShapeDtypeStruct((spec.action.size,), dtype)


# --- helpers for writing an environment ----------------------------------------------------------


def restart(observation: PyTree) -> TimeStep:
    """Return the first timestep of an episode."""
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
    """Return a later timestep of an episode, which is its end if `terminal` or `timeout` is set.

    Where both are set the end is a terminal.
    """
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
    """State of `AutoReset`."""

    inner: EnvState
    timed_out: jax.Array  # bool: the newest timestep has `last`, so the next step restarts


@struct
class AutoReset:
    """Wrapper that restarts an environment which only marks ends of episodes."""

    inner: Any
    resets_per_step: int = static(default=0)
    show_terminals: bool = static(default=False)

    def __post_init__(self) -> None:
        if type(count := self.resets_per_step) is not int or count < 0:
            raise ConfigError(f"resets_per_step must be 0, 1, 2 and so on, not {count!r}.")
        wrap_features(
            self,
            self.inner,
            *("check_agent", "kinds", "draw"),
            enter=self._enter,
            render=self._render,
            for_evaluation=self._for_evaluation,
        )

    @property
    def spec(self) -> EnvironmentSpec:
        return self.inner.spec

    def reset(self, key: jax.Array) -> tuple[AutoResetState, TimeStep]:
        state, timestep = self.inner.reset(key)
        return AutoResetState(state, jnp.bool_(False)), timestep

    def _enter(self, key: jax.Array, world: Any) -> tuple[AutoResetState, TimeStep]:
        state, timestep = self.inner.enter(key, world)
        return AutoResetState(state, jnp.bool_(False)), timestep

    def step(
        self, key: jax.Array, state: AutoResetState, action: jax.Array
    ) -> tuple[AutoResetState, TimeStep]:
        inner, timestep = self.inner.step(key, state.inner, action)
        is_terminal = timestep.discount == 0
        last = timestep.last | (is_terminal & ~timestep.first)  # a `discount` of 0 alone ends, too
        restarts = state.timed_out | (last & is_terminal & (not self.show_terminals))
        first_state, first_timestep = self._restart(sibling_key(key), restarts)

        def choose(new: PyTree, old: PyTree) -> PyTree:
            return jax.tree.map(lambda n, o: jnp.where(restarts, n, o), new, old)

        timestep = TimeStep(
            observation=choose(first_timestep.observation, timestep.observation),
            reward=jnp.where(state.timed_out, 0.0, timestep.reward),
            discount=jnp.where(state.timed_out, 1.0, timestep.discount),
            first=restarts | timestep.first,  # an environment may restart by itself, too
            last=last & ~restarts,
        )
        return AutoResetState(choose(first_state, inner), timestep.last), timestep

    def _restart(self, key: jax.Array, restarts: jax.Array) -> tuple[EnvState, TimeStep]:
        """Return the beginning of an episode, which is used only where `restarts` is set."""
        if not self.resets_per_step:
            return self.inner.reset(key)

        @jax.custom_batching.custom_vmap
        def reset(key: jax.Array, restarts: jax.Array) -> tuple[EnvState, TimeStep]:
            return self.inner.reset(key)

        @reset.def_vmap
        def _(size: int, batched: Any, keys: jax.Array, restarts: jax.Array) -> Any:
            keys, restarts = (
                x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
                for x, is_batched in zip((keys, restarts), batched, strict=True)
            )
            count = min(self.resets_per_step, size)
            pool = jax.vmap(self.inner.reset)(keys[:count])
            turns = (jnp.cumsum(restarts) - 1) % count
            rows = jax.tree.map(lambda x: x[turns], pool)
            return rows, jax.tree.map(lambda _: True, rows)

        return reset(key, restarts)

    def _render(self, state: AutoResetState) -> np.ndarray:
        return self.inner.render(state.inner)

    def _for_evaluation(self) -> AutoReset:
        return dataclasses.replace(self, inner=self.inner.for_evaluation())


def sibling_key(key: jax.Array) -> jax.Array:
    """Derive an independent key by XOR with a constant: a split costs more than CartPole's step."""
    data = jax.random.key_data(key) ^ np.uint32(0x9E3779B9)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))


@typed
def auto_reset(
    environment: Environment, *, resets_per_step: int = 0, show_terminals: bool = False
) -> AutoReset:
    """Return an environment that restarts by itself, as drivers expect, from one that does not.

    `environment` has a device environment's methods and only marks ends: `last`, or a `discount`
    of 0. Under `vmap` each step computes a reset for every environment. Where that is expensive
    take `resets_per_step` resets for the whole batch: if more end in one step, some begin alike.
    With `show_terminals` a terminal shows its final observation and `last`, as on the host, and the
    next step restarts.
    """
    kind = type(environment)
    if is_of_gymnasium(kind):
        raise ConfigError(
            f"auto_reset takes an environment in JAX, and {kind.__name__} is one of Gymnasium: "
            f"pass podracer.Gymnasium({kind.__name__}), which restarts by itself."
        )
    return AutoReset(environment, resets_per_step, show_terminals)


def is_of_gymnasium(kind: type) -> bool:
    """Return whether a class is an environment of Gymnasium."""
    return any(base.__module__.partition(".")[0] == "gymnasium" for base in kind.__mro__)
