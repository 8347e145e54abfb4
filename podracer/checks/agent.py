"""Check of an agent against its contract."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, jaxprs_in_params
from jax.sharding import AbstractMesh, AxisType

from podracer.agent import Agent, Blueprint, Context, policy_params
from podracer.arguments import refusal
from podracer.checks.errors import ARRAYS, structure_change, trace, type_text
from podracer.devices.mesh import DATA, REPLICATED
from podracer.devices.ordering import call_in_order, is_reduction, scan_parts
from podracer.devices.reductions import MaskedMean
from podracer.environment import action_struct
from podracer.errors import ConfigError
from podracer.io.entry_points import PACKAGES
from podracer.io.sinks import group
from podracer.ops.action_masks import component_masks
from podracer.types import (
    Carry,
    LearnerState,
    Metrics,
    Params,
    PyTree,
    Step,
    TimeStep,
    Trajectory,
    blank_timestep,
    leaves_by_path,
)

_LOG = logging.getLogger("podracer")
MOST_IN_A_METRIC = 1024  # numbers
# Tests have checked their agents, and to trace a search again is slow.
_REPOSITORY = {"podracer", *(f"podracer_{name}" for name in PACKAGES)}


def check_fields(settings: Any) -> None:
    """Raise `ConfigError` if an object is no settings that build an agent."""
    if isinstance(settings, type):
        name = settings.__name__
        raise ConfigError(f"{name} is a class: pass an instance, {name}().")
    name = type(settings).__name__
    if not callable(getattr(settings, "build", None)):
        raise ConfigError(
            f"{name} builds no agent: it lacks a method build(spec, context) that returns a "
            "podracer.Agent."
        )
    if jax.tree_util.all_leaves([settings]) or not dataclasses.is_dataclass(settings):
        raise ConfigError(f"{name} is not a tree of arrays: put @podracer.struct above its class.")
    for path, leaf in leaves_by_path(settings).items():
        if not isinstance(leaf, ARRAYS):
            raise ConfigError(f"{name}{path} is a {_kind(leaf)}: declare it with podracer.static.")


def check_agent(blueprint: Blueprint, *, num_envs: int = 256, num_devices: int = 2) -> None:
    """Raise `ConfigError` if an agent breaks its contract, see `podracer.check_agent`."""
    settings, context = blueprint.settings, blueprint.context
    if not isinstance(context, Context):
        raise ConfigError(refusal("Blueprint.context", context, Context))
    check_fields(settings)
    name = blueprint.name
    # The settings are an argument: their float leaves must not steer Python control flow.
    _trace(name, "build", lambda b: (b.settings.build(b.spec, b.context), ())[1], blueprint)
    built = settings.build(blueprint.spec, context)
    if not isinstance(built, Agent):
        raise ConfigError(f"{name}.build must return a podracer.Agent, not {_kind(built)}.")
    built = dataclasses.replace(built, name=name)
    _check_groups(built)
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = _trace(name, "init", lambda b, k: b.build().init(k, num_envs), blueprint, key)
    if not isinstance(state, LearnerState):
        raise ConfigError(f"{name}.init must return a LearnerState, not {_kind(state)}.")
    for path, leaf in leaves_by_path(state.local).items():
        if not leaf.shape or not leaf.shape[0] or num_envs % leaf.shape[0]:
            raise ConfigError(
                f"{name}.init: local{path} must lead with num_envs ({num_envs}) or a number that "
                f"divides it, but its shape is {leaf.shape}."
            )
    trajectory = _check_act(blueprint, built, state, num_envs, context.rollout_length)

    def learn(
        blueprint: Blueprint, state: Any, trajectory: Any, key: Any
    ) -> tuple[LearnerState, Metrics]:
        result: Any = blueprint.build().learn(state, trajectory, key, None)
        if not (isinstance(result, tuple) and len(result) == 2):
            raise ConfigError(f"{name}.learn must return the pair (state, metrics).")
        _check_metrics(f"{name}.learn", result[1])
        return result

    new_state, _ = _trace(name, "learn", learn, blueprint, state, trajectory, key)
    if not isinstance(new_state, LearnerState):
        raise ConfigError(f"{name}.learn must return a LearnerState first, not {_kind(new_state)}.")
    _check_kept(f"{name}.learn", "state", state, new_state)
    if num_devices > 1 and not _is_of_repository(settings):
        _check_reduces(built, state, trajectory, key, num_devices)


def _check_groups(agent: Agent) -> None:
    """Raise `ConfigError` if actions depend on what is for critics; log keys that nobody reads."""
    spec = agent.spec
    entries = spec.observation if isinstance(spec.observation, dict) else {}
    is_declared = "actor" in (*spec.groups, *entries)
    is_part = is_declared and entries.keys() > set(spec.keys(("actor",)))
    if is_part and not agent.groups and agent.rule is None:
        raise ConfigError(
            f"{agent.name} acts on the whole observation, but {spec.name} has a group `actor` for "
            "policies: take PPO, IMPALA, A2C, SAC or TD3."
        )
    read = {key for keys in agent.groups.values() for key in keys}
    if agent.groups and (unread := sorted(entries.keys() - read)):
        _LOG.warning("%s: no network sees %s of %s.", agent.name, ", ".join(unread), spec.name)


def _is_of_repository(settings: Any) -> bool:
    return type(settings).__module__.split(".")[0] in _REPOSITORY


def _check_reduces(
    agent: Agent, state: LearnerState, trajectory: Trajectory, key: Any, num_devices: int
) -> None:
    """Raise `ConfigError` if `learn` puts what one device alone knows into the shared state."""

    def learn(state: LearnerState, trajectory: Trajectory, key: Any) -> PyTree:
        return agent.learn(state, trajectory, key, DATA)[0].shared

    def ordered(*args: Any) -> PyTree:
        is_for_cpu = jax.default_backend() == "cpu"
        return call_in_order(learn, (DATA,), *args) if is_for_cpu else learn(*args)

    mesh = AbstractMesh((num_devices,), (DATA,), axis_types=(AxisType.Auto,))
    program = jax.shard_map(
        ordered, mesh=mesh, in_specs=REPLICATED, out_specs=REPLICATED, check_vma=False
    )
    traced, _ = trace(f"{agent.name}.learn on several devices", program, state, trajectory, key)
    differs = [
        group is not state.shared
        for group in (state.shared, state.local, trajectory, key)
        for _ in jax.tree.leaves(group)
    ]
    are_different = _differing(traced.jaxpr, differs)
    different = [p for p, x in zip(leaves_by_path(state.shared), are_different, strict=True) if x]
    if different:
        raise ConfigError(
            f"{agent.name}.learn puts into shared{different[0]} what each of the "
            f"{num_devices} devices has by itself, so that their states drift apart: take "
            "gradients with podracer.global_grad(loss, params, ..., axis=axis), other means with "
            "podracer.global_mean, or train with `devices=1`."
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


def _check_act(
    blueprint: Blueprint, built: Agent, state: LearnerState, num_envs: int, length: int
) -> Trajectory:
    """Check how an agent acts, explores or not; return the abstract trajectory of a rollout."""
    name, learns_rule = built.name, built.rule is not None
    carry = _trace(name, "carry", lambda b: b.build().carry(num_envs), blueprint)
    _check_rows(f"{name}.carry", "carry", carry, num_envs)
    params = _trace(
        name,
        "actor_params" if learns_rule else "actor_params (shared.params by default), local=(),",
        lambda a, s: a.build().actor_params(s) if learns_rule else policy_params(a.build(), s),
        blueprint,
        state,
    )
    timestep = jax.eval_shape(lambda: blank_timestep(blueprint.spec, num_envs))
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), num_envs))
    inputs = (params, carry, timestep, keys)
    action, extras, new_carry = _act(blueprint, built, num_envs, inputs, explore=True)
    # Nobody evaluates a meta-learner.
    if not learns_rule and not _is_of_repository(blueprint.settings):
        _act(blueprint, built, num_envs, inputs, explore=False)
        _check_distribution(blueprint, built, inputs[:3])
        _check_masked_actions(blueprint, num_envs)
    _check_rows(f"{name}.act", "extras", extras, num_envs)
    step = Step(timestep, action, extras)
    steps = jax.tree.map(lambda x: jax.ShapeDtypeStruct((length, *x.shape), x.dtype), step)
    return Trajectory(steps, timestep, carry, new_carry)


def _act(
    blueprint: Blueprint,
    built: Agent,
    num_envs: int,
    inputs: tuple[Params, Carry, TimeStep, Any],
    *,
    explore: bool,
) -> tuple[Any, PyTree, Carry]:
    """Return what `act` returns, after a check of its parts."""
    method = "act" if explore else "act(explore=False)"
    place = f"{built.name}.{method}"
    result = _trace(
        built.name, method, lambda b, *x: b.build().act(*x, explore), blueprint, *inputs
    )
    if not (isinstance(result, tuple) and len(result) == 3):
        raise ConfigError(f"{place} must return the triple (actions, extras, carry).")
    action, _, new_carry = result
    struct = action_struct(built.spec)
    wanted = f"{struct.dtype}{[num_envs, *struct.shape]}"
    actual = type_text(action) if isinstance(action, jax.ShapeDtypeStruct) else _kind(action)
    if actual != wanted:
        raise ConfigError(f"{place} must return actions {wanted}, not {actual}.")
    _check_kept(place, "carry", inputs[1], new_carry)
    return result


def _check_masked_actions(blueprint: Blueprint, num_envs: int) -> None:
    """Raise `ConfigError` if an agent's first state chooses actions that masks forbid.

    Each mask allows one action, which is the right one for all parameters.
    """
    spec, generator = blueprint.spec, np.random.default_rng(0)
    timestep = jax.tree.map(np.array, blank_timestep(spec, num_envs))
    masks = list(component_masks(spec, timestep.observation))  # views of it
    masked = [i for i, mask in enumerate(masks) if mask is not None]
    if not masked:
        return
    allowed = np.zeros((num_envs, len(masks)), np.int32)
    for i in masked:
        size = masks[i].shape[-1]
        allowed[:, i] = generator.integers(size, size=num_envs)
        masks[i][...] = np.eye(size, dtype=bool)[allowed[:, i]]

    @jax.jit
    def act(blueprint: Blueprint, timestep: TimeStep, key: jax.Array) -> list[Any]:
        agent = blueprint.build()
        params = policy_params(agent, agent.init(key, num_envs))
        inputs = params, agent.carry(num_envs), timestep, jax.random.split(key, num_envs)
        return [agent.act(*inputs, explore)[0] for explore in (True, False)]

    batches = jax.device_get(act(blueprint, timestep, jax.random.key(0)))
    for method, actions in zip(("act", "act(explore=False)"), batches, strict=True):
        columns = actions.reshape(num_envs, -1)[:, masked]
        for action, only_action in zip(columns, allowed[:, masked], strict=True):
            if np.any(action != only_action):
                raise ConfigError(
                    f"{blueprint.name}.{method} chose the action {np.squeeze(action)} where "
                    f"the action mask of {spec.name} allows {np.squeeze(only_action)} alone: mask "
                    "the logits by `mask_logits` of podracer.ops.action_masks."
                )


def _check_distribution(
    blueprint: Blueprint, built: Agent, inputs: tuple[Params, Carry, TimeStep]
) -> None:
    """Raise `ConfigError` unless an agent's distribution, if it has one, comes with a carry."""
    if built.distribution is None:
        return
    name = f"{built.name}.distribution"

    def distribution(blueprint: Blueprint, *inputs: Any) -> tuple[list[Any], Carry]:
        agent = blueprint.build()
        assert agent.distribution is not None
        result: Any = agent.distribution(*inputs)
        if not (isinstance(result, tuple) and len(result) == 2):
            raise ConfigError(f"{name} must return the pair (distribution, carry).")
        return jax.tree.leaves(result[0]), result[1]

    _, new_carry = _trace(built.name, "distribution", distribution, blueprint, *inputs)
    _check_kept(name, "carry", inputs[1], new_carry)


def _check_metrics(place: str, metrics: Any) -> None:
    """Raise `ConfigError` unless all metrics are arrays [] or [n] with names of their own."""
    if not isinstance(metrics, Mapping):
        raise ConfigError(f"{place} must return a dictionary of metrics, not {_kind(metrics)}.")
    for name, value in metrics.items():
        if not isinstance(name, str):
            raise ConfigError(f"{place}: the name of a metric must be a str, not {name!r}.")
        if group(name) != "learn":
            raise ConfigError(
                f"{place}: the metric {name!r} would be one of the run's own records, in the group "
                f"`{group(name)}`: take another name."
            )
        if not isinstance(value, jax.Array | np.generic | np.ndarray | MaskedMean):
            kind = _kind(value)
            advice = f": write jnp.asarray({value!r})" if isinstance(value, int | float) else ""
            raise ConfigError(
                f"{place} must return metrics that are arrays, but {name!r} is of type "
                f"{kind}{advice}."
            )
        value = value.total if isinstance(value, MaskedMean) else value
        if len(value.shape) > 1 or math.prod(value.shape) > MOST_IN_A_METRIC:
            raise ConfigError(
                f"{place} must return metrics that are scalars or of shape [n], n up to "
                f"{MOST_IN_A_METRIC:,}, but {name!r} is {type_text(value)}: take its histogram."
            )


def _check_rows(place: str, part: str, tree: PyTree, num_envs: int) -> None:
    for path, leaf in leaves_by_path(tree).items():
        if leaf.shape[:1] != (num_envs,):
            raise ConfigError(
                f"{place}: {part}{path} must lead with num_envs ({num_envs}), but its shape is "
                f"{leaf.shape}."
            )


def _check_kept(place: str, part: str, old: PyTree, new: PyTree) -> None:
    """Raise `ConfigError` unless a tree has kept its paths, shapes and dtypes."""
    if jax.tree.structure(old) != jax.tree.structure(new):
        change = structure_change(old, new, part)
        raise ConfigError(f"{place} must keep the structure of its {part}: {change}.")
    new_leaves = leaves_by_path(new)
    for path, leaf in leaves_by_path(old).items():
        text, actual = type_text(leaf), type_text(new_leaves[path])
        if text != actual:
            raise ConfigError(f"{place} must keep {part}{path} as {text}, but it became {actual}.")


def _trace(name: str, method: str, function: Any, *args: Any) -> Any:
    """Return the shapes of what a method returns, whose leaves must be numbers or arrays."""
    return trace(f"{name}.{method}", function, *args)[1]


def _kind(value: Any) -> str:
    return "array" if isinstance(value, jax.Array) else type(value).__name__
