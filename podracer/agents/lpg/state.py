"""The state of LPG: the update rule, the students of L lifetimes, and their last K rollouts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from podracer.agents.common.actor_critic import ParamsState
from podracer.agents.lpg.rule import Experience
from podracer.types import Metrics, Params, PyTree, struct


@struct
class RuleState:
    """State of the update rule, the same on all devices."""

    rule: Params  # `RuleParams`
    optimizer_state: optax.OptState
    frames: jax.Array  # uint32 [], of all lifetimes, see `schedules`
    num_rollouts: jax.Array  # i32, rollouts in the window, at most K
    metrics: Metrics  # of the last update of the rule


@struct
class LifetimeStates:
    """State of L lifetimes, leaves `[L, ...]`."""

    students: ParamsState
    critics: ParamsState
    initial_students: ParamsState  # before the first update of the window
    window: Experience  # the rollouts of the last updates, [L, K, T, E, ...]
    lifetime: jax.Array  # i32 [L], number of each lifetime within its group of environments
    is_whole: jax.Array  # bool [L], whether the window lies within one lifetime


@struct
class MetaBatch:
    """Data of one update of the rule, leaves `[L, ...]`."""

    students: ParamsState  # before the K updates
    window: Experience  # of the K updates, [L, K, T, E, ...]
    rollout: Experience  # after them, [L, T, E, ...]
    advantages: jax.Array  # of that rollout, f32 [L, T, E]
    is_whole: jax.Array  # bool [L]
    task: jax.Array  # i32 [L]


# --- windows of K rollouts -----------------------------------------------------------------------


def group_by_lifetime(rollout: PyTree, envs: int) -> Any:
    """Return leaves `[T, B, ...]` of a rollout as `[L, T, E, ...]`, E environments a lifetime."""
    return jax.tree.map(
        lambda x: jnp.moveaxis(x.reshape(x.shape[0], -1, envs, *x.shape[2:]), 1, 0), rollout
    )


def to_rollouts(window: PyTree) -> Any:
    """Return a window, leaves `[L, K, T, E, ...]`, as rollouts `[K, T, B, ...]`."""
    time_major = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 2), window)
    return jax.tree.map(lambda x: x.reshape(*x.shape[:2], -1, *x.shape[4:]), time_major)


def to_rollout(grouped: PyTree) -> Any:
    """Return leaves `[L, T, E, ...]` as those of a rollout, `[T, B, ...]`."""
    window = jax.tree.map(lambda x: x[:, None], grouped)
    return jax.tree.map(lambda x: x[0], to_rollouts(window))


def empty_window(spec: PyTree, lead: tuple[int, int], length: int, envs: int) -> Experience:
    """Return zeros for K rollouts of L lifetimes, `lead` being `(L, K)`: `[L, K, T, E, ...]`."""
    steps, timesteps = (*lead, length, envs), (*lead, length + 1, envs)
    return Experience(
        observation=jax.tree.map(lambda x: jnp.zeros((*timesteps, *x.shape), x.dtype), spec),
        first=jnp.zeros(timesteps, bool),
        action=jnp.zeros(steps, jnp.int32),
        reward=jnp.zeros(steps),
        discount=jnp.zeros(steps),
        valid=jnp.zeros(steps, bool),
        carry=(),
    )
