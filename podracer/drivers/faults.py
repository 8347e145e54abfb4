"""Check of each update: it is applied unless a value is not finite or an environment broke."""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.agent import Agent
from podracer.devices.fused import all_finite, select
from podracer.drivers.state import TrainState
from podracer.errors import ConfigError, EnvironmentFault, NonFiniteError
from podracer.ops.action_masks import lacks_action
from podracer.types import NO_ACTION, LearnerState, Metrics, PyTree, Trajectory


class Fault(enum.IntFlag):
    """Reasons not to apply an update: values that are not finite, or a broken environment."""

    OBSERVATION = 1
    REWARD = 2
    LOSS = 4
    GRADIENT = 8
    RESTART = 16
    ACTION_MASK = 32


_LEAF_SHIFT = 8  # the bits below are for `Fault`


def apply_unless_fault(
    agent: Agent,
    state: TrainState,
    learner: LearnerState,
    trajectory: Trajectory,
    metrics: Metrics,
    axis: str | None,
) -> tuple[TrainState, Metrics]:
    """Apply one shard's update, unless this or an earlier one had a `Fault` on any shard.

    After a fault `learner.shared` stays as it was before that update. Metrics gain `frames`, the
    number of valid transitions.
    """
    bits = fault_bits(agent, trajectory, learner, metrics, axis)
    no_earlier_fault = state.fault[0] == 0
    is_applied = (bits == 0) & no_earlier_fault
    shared = select(is_applied, learner.shared, state.learner.shared)
    is_first_fault = (bits != 0) & no_earlier_fault
    new_state = dataclasses.replace(
        state,
        learner=LearnerState(shared, learner.local),
        update=state.update + 1,
        fault=jnp.where(is_first_fault, jnp.stack([bits, state.update]), state.fault),
    )
    return new_state, {**metrics, "frames": jnp.sum(trajectory.valid(), dtype=jnp.int32)}


def fault_bits(
    agent: Agent, trajectory: Trajectory, learner: LearnerState, metrics: Metrics, axis: str | None
) -> jax.Array:
    """Return the bits of `Fault` of this update on any shard.

    The bits from `_LEAF_SHIFT` on are 1 + the index of the first bad leaf of `_checked_leaves`.
    """
    final, steps = trajectory.final, trajectory.steps.timestep
    observations, rewards = (steps.observation, final.observation), (steps.reward, final.reward)
    leaves = _checked_leaves(observations, rewards, metrics, learner.shared)
    following = trajectory.next_timesteps()
    are_ends_marked = following.first | following.last | (following.discount != 0)  # 0 is an end
    restarts = jnp.all((following.first | trajectory.valid()) & are_ends_marked)
    passed = [
        (flag, is_finite)
        for flag, group in itertools.groupby(leaves, lambda leaf: leaf[0])
        for is_finite in all_finite([leaf for _, _, leaf in group])
    ]
    passed.append((Fault.RESTART, restarts))
    passed.append((Fault.ACTION_MASK, ~jnp.any(lacks_action(agent.spec, steps))))
    failures = 1.0 - jnp.stack([x for _, x in passed]).astype(jnp.float32)
    has_failed = (jax.lax.psum(failures, axis) if axis else failures) > 0
    flags = np.asarray([flag.value for flag, _ in passed], np.uint32)
    bits = jnp.bitwise_or.reduce(jnp.where(has_failed, flags, np.uint32(0)))
    place = jnp.where(jnp.any(has_failed[: len(leaves)]), jnp.argmax(has_failed) + 1, 0)
    return bits | place.astype(jnp.uint32) << _LEAF_SHIFT


def _checked_leaves(
    observations: Sequence[PyTree], reward: PyTree, metrics: Mapping[str, Any], shared: PyTree
) -> list[tuple[Fault, str, Any]]:
    """Return the `Fault`, the name and the value of each part of an update that must be finite.

    Metrics that are neither losses nor norms of gradients are diagnostics and may be anything.
    """

    def leaves(flag: Fault, name: str, tree: PyTree) -> list[tuple[Fault, str, Any]]:
        paths = jax.tree_util.tree_leaves_with_path(tree)
        return [(flag, name + jax.tree_util.keystr(path), leaf) for path, leaf in paths]

    names = sorted(metrics)
    losses = [name for name in names if name == "loss" or name.endswith("_loss")]
    norms = [name for name in names if name.endswith("gradient_norm")]
    return [
        *(x for tree in observations for x in leaves(Fault.OBSERVATION, "observation", tree)),
        (Fault.REWARD, "reward", reward),
        *((Fault.LOSS, name, metrics[name]) for name in losses),
        *((Fault.GRADIENT, name, metrics[name]) for name in norms),
        *leaves(Fault.GRADIENT, "shared", shared),
    ]


def check_no_fault(
    fault: np.ndarray, observation: PyTree, metrics: Mapping[str, Any], shared: PyTree
) -> None:
    """Raise the fault that `TrainState.fault`, u32 [2], holds, with the number of the update.

    That is `NonFiniteError`, `ConfigError` for an environment that does not restart, or
    `EnvironmentFault` for one that allows no action. The other arguments have the structure of what
    was checked, by which what is not finite is named.
    """
    bits, update = int(fault[0]), int(fault[1]) + 1
    if not bits:
        return
    faults, place = Fault(bits % (1 << _LEAF_SHIFT)), bits >> _LEAF_SHIFT
    if Fault.RESTART in faults:
        raise ConfigError(
            f"update {update}: an episode ended and the environment did not restart: wrap it in "
            "podracer.auto_reset if it is in JAX; on the host its `step` restarts it."
        )
    if Fault.ACTION_MASK in faults:
        raise EnvironmentFault(f"update {update}: {NO_ACTION}")
    leaves = _checked_leaves([observation] * 2, (), metrics, shared)
    names, first = ", ".join(str(fault.name).lower() for fault in faults), leaves[place - 1][1]
    names += "" if first == names else f" (first {first})"
    raise NonFiniteError(f"update {update}: not finite: {names}. The update was not applied.")
