"""Check of an agent against its contract."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, jaxprs_in_params
from jax.sharding import AbstractMesh, AxisType

from podracer.agent import Agent, MetaLearner, NeedsRolloutLength, policy_params
from podracer.checks.errors import describe_error
from podracer.environment import action_struct
from podracer.io.sinks import group
from podracer.means import Mean
from podracer.mesh import DATA, REPLICATED
from podracer.reductions import is_reduction, scan_parts
from podracer.types import (
    Carry,
    ConfigError,
    EnvironmentSpec,
    LearnerState,
    Metrics,
    Params,
    PyTree,
    Step,
    TimeStep,
    Trajectory,
)

_NUMBERS = (bool, int, float, np.generic, np.ndarray, jax.Array)  # of a tree that JAX takes


def check_fields(agent: Any) -> None:
    """Raise `ConfigError` if an object is no agent that can be made for an environment."""
    if isinstance(agent, type):
        raise ConfigError(f"{agent.__name__} is a class: pass an instance, {agent.__name__}().")
    name = type(agent).__name__
    missing = [m for m in ("init", "carry", "actor_params", "act", "learn")
               if not callable(getattr(agent, m, None))]  # fmt: skip
    if missing:
        raise ConfigError(f"{name} is not an agent: it lacks {', '.join(missing)}.")
    if jax.tree_util.all_leaves([agent]) or not dataclasses.is_dataclass(agent):
        raise ConfigError(f"{name} is not a tree of arrays: put @podracer.struct above its class.")
    if "spec" not in (field.name for field in dataclasses.fields(agent)):
        raise ConfigError(
            f"{name} has no field `spec`, which is filled in with the environment's: add "
            "spec: podracer.EnvironmentSpec | None = podracer.static(default=None)."
        )
    for path, leaf in jax.tree_util.tree_leaves_with_path(agent):
        if not isinstance(leaf, _NUMBERS):
            field = f"{name}{jax.tree_util.keystr(path)}"
            raise ConfigError(f"{field} is a {_kind(leaf)}: declare it with podracer.static.")


def check_agent(
    agent: Any, *, num_envs: int = 256, length: int | None = None, num_devices: int = 1
) -> None:
    """Raise `ConfigError` that names the method if an agent breaks the contract of `Agent`.

    The agent is built for an environment: its `spec` is that of the environment. It is traced with
    `num_envs` environments and rollouts of `length` steps on each of `num_devices` devices: by
    default of the agent's own `rollout_length`, or 16. Nothing is computed.
    """
    check_fields(agent)
    name = type(agent).__name__
    if agent.spec is None:
        raise ConfigError(f"{name} has no `spec`: make it for an environment first.")
    if length is None:
        length = int(getattr(agent, "rollout_length", None) or 16)
        if isinstance(agent, NeedsRolloutLength):
            agent = dataclasses.replace(cast(Any, agent), rollout_length=length)
    key = jax.eval_shape(lambda: jax.random.key(0))
    # The agent itself is an argument: its float leaves must not steer Python control flow.
    state = _trace(name, "init", lambda a, k: a.init(k, num_envs), agent, key)
    if not isinstance(state, LearnerState):
        raise ConfigError(f"{name}.init must return a LearnerState, not {_kind(state)}.")
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.local):
        if not leaf.shape or not leaf.shape[0] or num_envs % leaf.shape[0]:
            raise ConfigError(
                f"{name}.init: local{jax.tree_util.keystr(path)} must lead with num_envs "
                f"({num_envs}) or a number that divides it, but its shape is {leaf.shape}."
            )
    trajectory = _check_act(agent, state, num_envs, length)

    def learn(agent: Any, *args: Any) -> tuple[LearnerState, Metrics]:
        result = agent.learn(*args, None)
        if not (isinstance(result, tuple) and len(result) == 2):
            raise ConfigError(f"{name}.learn must return the pair (state, metrics).")
        _check_metrics(f"{name}.learn", result[1])
        return result

    new_state, _ = _trace(name, "learn", learn, agent, state, trajectory, key)
    if not isinstance(new_state, LearnerState):
        raise ConfigError(f"{name}.learn must return a LearnerState first, not {_kind(new_state)}.")
    _check_kept(f"{name}.learn", "state", state, new_state)
    if num_devices > 1 and not _is_of_library(agent):
        _check_reduces(agent, state, trajectory, key, num_devices)


def _is_of_library(agent: Any) -> bool:
    """Return whether tests have checked an agent already: to trace a search again is slow."""
    return type(agent).__module__.startswith("podracer.")


def _check_reduces(
    agent: Any, state: LearnerState, trajectory: Trajectory, key: Any, num_devices: int
) -> None:
    """Raise `ConfigError` if `learn` puts what one device alone knows into the shared state."""

    def learn(state: LearnerState, trajectory: Trajectory, key: Any) -> PyTree:
        return agent.learn(state, trajectory, key, DATA)[0].shared

    mesh = AbstractMesh((num_devices,), (DATA,), axis_types=(AxisType.Auto,))
    program = jax.shard_map(
        learn, mesh=mesh, in_specs=REPLICATED, out_specs=REPLICATED, check_vma=False
    )
    with _explain(f"{type(agent).__name__}.learn cannot be traced for several devices"):
        jaxpr = jax.make_jaxpr(program)(state, trajectory, key).jaxpr
    differs = [
        group is not state.shared
        for group in (state.shared, state.local, trajectory, key)
        for _ in jax.tree.leaves(group)
    ]
    names = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(state.shared)]
    different = [name for name, x in zip(names, _differing(jaxpr, differs), strict=True) if x]
    if different:
        raise ConfigError(
            f"{type(agent).__name__}.learn puts into shared{different[0]} what each of the "
            f"{num_devices} devices has by itself, so that their states drift apart: take "
            "gradients with podracer.global_grad(loss, params, ..., axis=axis), other means with "
            "podracer.global_mean, or train with --devices 1."
        )


def _differing(jaxpr: Jaxpr, differs: Sequence[bool]) -> list[bool]:
    """Return which outputs of a program differ between devices, given which inputs do."""
    variables = {x for x, differ in zip(jaxpr.invars, differs, strict=True) if differ}
    for equation in jaxpr.eqns:
        inputs = [not isinstance(x, Literal) and x in variables for x in equation.invars]
        outputs = _differing_outputs(equation, inputs)
        variables |= {x for x, differ in zip(equation.outvars, outputs, strict=True) if differ}
    return [not isinstance(x, Literal) and x in variables for x in jaxpr.outvars]


def _differing_outputs(equation: JaxprEqn, inputs: list[bool]) -> list[bool]:
    """Return which outputs of one operation differ between devices, given which inputs do.

    Conditions count as equal: whether a replay is warm is, though each device has its own.
    """
    name, params = equation.primitive.name, equation.params
    parts = list(jaxprs_in_params(params))
    if is_reduction(equation):
        return [False] * len(equation.outvars)
    if name == "scan":
        num_consts, num_carry = scan_parts(equation)
        return _differing_in_loop(parts[0], inputs, num_consts + num_carry, num_carry)
    if name == "while":
        body, body_inputs = params["body_jaxpr"].jaxpr, inputs[params["cond_nconsts"] :]
        return _differing_in_loop(body, body_inputs, len(body_inputs), len(equation.outvars))
    if name == "cond":
        outputs = [_differing(part, inputs[1:]) for part in parts]
        return [any(branches) for branches in zip(*outputs, strict=True)]
    if name == "select_n":
        inputs = inputs[1:]
    if [len(part.invars) for part in parts] == [len(inputs)]:
        return _differing(parts[0], inputs)
    differs = name == "axis_index" or any(inputs)
    return [differs] * len(equation.outvars)


def _differing_in_loop(body: Jaxpr, inputs: list[bool], end: int, num_carry: int) -> list[bool]:
    """Return which outputs of a loop differ, whose carry takes in what the body puts there.

    The carry are the first outputs, and the inputs before the one of number `end`.
    """
    carry = slice(end - num_carry, end)
    while True:
        outputs = _differing(body, inputs)
        grown = [x or y for x, y in zip(inputs[carry], outputs[:num_carry], strict=True)]
        if grown == inputs[carry]:
            return outputs
        inputs = [*inputs[: carry.start], *grown, *inputs[carry.stop :]]


def _check_act(agent: Agent, state: LearnerState, num_envs: int, length: int) -> Trajectory:
    """Check how an agent acts, explores or not; return the abstract trajectory of a rollout."""
    assert agent.spec is not None
    name, is_meta = type(agent).__name__, isinstance(agent, MetaLearner)
    carry = _trace(name, "carry", lambda a: a.carry(num_envs), agent)
    _check_rows(f"{name}.carry", "carry", carry, num_envs)
    params = _trace(
        name,
        "actor_params",
        (lambda a, s: a.actor_params(s)) if is_meta else policy_params,
        agent,
        state,
    )
    timestep = jax.eval_shape(lambda: _blank_timestep(agent.spec, num_envs))
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), num_envs))
    inputs = (params, carry, timestep, keys)
    action, extras, new_carry = _act(agent, num_envs, inputs, explore=True)
    # Nobody evaluates a meta-learner.
    if not is_meta and not _is_of_library(agent):
        _act(agent, num_envs, inputs, explore=False)
    _check_rows(f"{name}.act", "extras", extras, num_envs)
    step = Step(timestep, action, extras)
    steps = jax.tree.map(lambda x: jax.ShapeDtypeStruct((length, *x.shape), x.dtype), step)
    return Trajectory(steps, timestep, carry, new_carry)


def _act(
    agent: Agent, num_envs: int, inputs: tuple[Params, Carry, TimeStep, Any], *, explore: bool
) -> tuple[Any, PyTree, Carry]:
    """Return what `act` returns, after a check of its parts."""
    assert agent.spec is not None
    name = type(agent).__name__
    method = "act" if explore else "act(explore=False)"
    result = _trace(name, method, lambda a, *args: a.act(*args, explore), agent, *inputs)
    where = f"{name}.{method}"
    if not (isinstance(result, tuple) and len(result) == 3):
        raise ConfigError(f"{where} must return the triple (actions, extras, carry).")
    action, _, new_carry = result
    struct = action_struct(agent.spec)
    expected = jax.ShapeDtypeStruct((num_envs, *struct.shape), struct.dtype)
    if not isinstance(action, jax.ShapeDtypeStruct):
        raise ConfigError(
            f"{where} must return actions {_format(expected)}, not a {_kind(action)}."
        )
    if action.shape != expected.shape or action.dtype != expected.dtype:
        raise ConfigError(
            f"{where} must return actions {_format(expected)}, but they are {_format(action)}."
        )
    _check_kept(where, "carry", inputs[1], new_carry)
    return result


def _blank_timestep(spec: EnvironmentSpec | None, num_envs: int) -> TimeStep:
    assert spec is not None
    return TimeStep(
        observation=jax.tree.map(
            lambda leaf: jnp.zeros((num_envs, *leaf.shape), leaf.dtype), spec.observation
        ),
        reward=jnp.zeros(num_envs),
        discount=jnp.ones(num_envs),
        first=jnp.ones(num_envs, bool),
        last=jnp.zeros(num_envs, bool),
    )


def _check_metrics(where: str, metrics: Any) -> None:
    """Raise `ConfigError` unless all metrics are scalar arrays with names of their own."""
    if not isinstance(metrics, Mapping):
        raise ConfigError(f"{where} must return a dictionary of metrics, not {_kind(metrics)}.")
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise ConfigError(f"{where}: the name of a metric must be a str, not {name!r}.")
        if group(name) != "learn":
            raise ConfigError(
                f"{where}: the metric {name!r} would be one of the run's own records, in the group "
                f"`{group(name)}`: take another name."
            )
        if not isinstance(value, jax.Array | np.generic | np.ndarray | Mean):
            kind = _kind(value)
            advice = f": write jnp.asarray({value!r})" if isinstance(value, int | float) else ""
            raise ConfigError(
                f"{where} must return scalar metrics, but {name!r} is of type {kind}{advice}."
            )
        if isinstance(value, Mean):
            value = value.total
        if value.shape:
            raise ConfigError(
                f"{where} must return scalar metrics, but {name!r} is {_format(value)}."
            )


def _check_rows(where: str, part: str, tree: PyTree, num_envs: int) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if leaf.shape[:1] != (num_envs,):
            raise ConfigError(
                f"{where}: {part}{jax.tree_util.keystr(path)} must lead with num_envs "
                f"({num_envs}), but its shape is {leaf.shape}."
            )


def _check_kept(where: str, part: str, old: PyTree, new: PyTree) -> None:
    """Raise `ConfigError` unless a tree has kept its paths, shapes and dtypes."""
    leaves, new_leaves = (
        {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(x)}
        for x in (old, new)
    )
    changes = [f"{part}{path} is missing" for path in leaves if path not in new_leaves]
    changes += [f"{part}{path} is new" for path in new_leaves if path not in leaves]
    if not changes and jax.tree.structure(old) != jax.tree.structure(new):
        changes = [f"{jax.tree.structure(old)} became {jax.tree.structure(new)}"]
    if changes:
        raise ConfigError(f"{where} must keep the structure of its {part}: {changes[0]}.")
    for path, leaf in leaves.items():
        new_leaf = new_leaves[path]
        if leaf.shape != new_leaf.shape or leaf.dtype != new_leaf.dtype:
            raise ConfigError(
                f"{where} must keep {part}{path} as {_format(leaf)}, "
                f"but it became {_format(new_leaf)}."
            )


def _trace(name: str, method: str, function: Any, *args: Any) -> Any:
    """Return the shapes of what a method returns, whose leaves must be numbers or arrays."""

    def checked(*args: Any) -> Any:
        result = function(*args)
        for path, leaf in jax.tree_util.tree_leaves_with_path(result):
            if not isinstance(leaf, _NUMBERS):
                part = jax.tree_util.keystr(path)
                raise ConfigError(f"{name}.{method} returns a {_kind(leaf)} in {part}, no array.")
        return result

    with _explain(f"{name}.{method} cannot be traced"):
        return jax.eval_shape(checked, *args)


@contextlib.contextmanager
def _explain(what: str) -> Iterator[None]:
    """Raise `ConfigError` that says what failed, and the error and line by which it did."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{what}: {describe_error(error)}") from error


def _kind(value: Any) -> str:
    return "array" if isinstance(value, jax.Array) else type(value).__name__


def _format(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"
