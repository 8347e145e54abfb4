"""Lifetimes of students in the batch of environments: their number, length and experience.

A batch of B environments has L lifetimes; each E = B / L consecutive environments belong to one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from podracer.agents.common.recurrent import check_rollout
from podracer.environment import TaskGroups
from podracer.errors import ConfigError
from podracer.fields import struct
from podracer.types import Carry, EnvironmentSpec, Params, PyTree, Trajectory


@struct
class Experience:
    """T transitions of B environments, time first: what a student learns from."""

    observation: PyTree  # [T+1, B, ...]
    first: jax.Array  # bool [T+1, B]
    action: jax.Array  # i32 [T, B]
    reward: jax.Array  # f32 [T, B], for that action
    discount: jax.Array  # f32 [T, B], 0 where the action ended the episode
    valid: jax.Array  # bool [T, B], False where a time-out ignored the action
    carry: Carry  # the network's recurrent state at the first step
    behavior: PyTree = ()  # logits of the policy that acted, f32 [T, B, A], or ()


def to_experience(trajectory: Trajectory, behavior: PyTree = ()) -> Experience:
    """Return the transitions of a trajectory, without the extras of acting but for `behavior`."""
    timesteps, next_timesteps = trajectory.timesteps(), trajectory.next_timesteps()
    return Experience(
        observation=timesteps.observation,
        first=timesteps.first,
        action=trajectory.steps.action,
        reward=next_timesteps.reward,
        discount=next_timesteps.discount,
        valid=trajectory.valid(),
        carry=trajectory.carry,
        behavior=behavior,
    )


def student_spec(spec: EnvironmentSpec, inner_updates: int, rollout_length: int) -> EnvironmentSpec:
    """Return what a student sees of an environment of lifetimes: one task.

    Raises `ConfigError` for another environment, and where lifetimes are too short for windows of
    `inner_updates` rollouts and the next one.
    """
    groups = spec.extension
    if not isinstance(groups, TaskGroups):
        raise ConfigError(
            "a rule is learned from students' lifetimes: take "
            f'`environment="lifetimes:{spec.name}"`.'
        )
    # Two windows: in shorter lifetimes no window is whole, and nothing is ever learned.
    minimum = 2 * (inner_updates + 1) * rollout_length
    if groups.num_steps < minimum:
        raise ConfigError(
            f"lifetimes of {groups.num_steps} steps are too short for {inner_updates} "
            f"updates of {rollout_length}: take steps={minimum} or more."
        )
    return dataclasses.replace(spec, observation=spec.observation["observation"], extension=None)


def num_lifetimes(groups: TaskGroups, num_envs: int, lifetime_groups: int) -> int:
    """Return the number of lifetimes in a batch, or raise `ConfigError` if one is split."""
    if num_envs % (groups.num_envs * lifetime_groups):
        raise ConfigError(
            f"{num_envs} environments on a device are no multiple of "
            f"{groups.num_envs * lifetime_groups}: {groups.num_envs} share a lifetime, and "
            f"lifetime_groups is {lifetime_groups}."
        )
    return num_envs // groups.num_envs


def lifetime_experience(
    trajectory: Trajectory, groups: TaskGroups, rollout_length: int
) -> tuple[Experience, jax.Array, jax.Array]:
    """Return the students' experience, and the number and the task of each lifetime at its end.

    Both are i32 `[L]`. Raises `ConfigError` for a trajectory of another length.
    """
    check_rollout(rollout_length, trajectory)
    data, final = to_experience(trajectory), trajectory.final.observation
    data = dataclasses.replace(data, observation=data.observation["observation"])
    return data, final["task_count"][:: groups.num_envs], final["task"][:: groups.num_envs]


# --- functions of L students ---------------------------------------------------------------------


def map_lifetimes(function: Callable[..., PyTree], params: Params, inputs: PyTree) -> Any:
    """Return `function(params, *inputs)` for each of L lifetimes with its own of B environments.

    Leaves of `params` are `[L, ...]`, of `inputs` and the result `[T, B, ...]`.
    """
    lifetimes = jax.tree.leaves(params)[0].shape[0]
    grouped = jax.tree.map(lambda x: x.reshape(x.shape[0], lifetimes, -1, *x.shape[2:]), inputs)
    in_axes = (0, *(1 for _ in grouped))
    results = jax.vmap(function, in_axes=in_axes, out_axes=1)(params, *grouped)
    return jax.tree.map(lambda x: x.reshape(x.shape[0], -1, *x.shape[3:]), results)


def lifetime_means(x: jax.Array, lifetimes: int) -> jax.Array:
    """Return means over all steps `[T, B, ...]` of each lifetime, `[L, ...]`."""
    return jnp.mean(x.reshape(x.shape[0], lifetimes, -1, *x.shape[2:]), axis=(0, 2))


def standardize(advantages: jax.Array, valid: jax.Array, lifetimes: int) -> jax.Array:
    """Return advantages `[T, B]` with zero mean and unit variance over each lifetime.

    Invalid ones do not count and become 0.
    """
    mask = valid.reshape(len(valid), lifetimes, -1)
    grouped = advantages.reshape(mask.shape)
    count = jnp.maximum(jnp.sum(mask, axis=(0, 2), keepdims=True), 1)
    mean = jnp.sum(mask * grouped, axis=(0, 2), keepdims=True) / count
    centered = mask * (grouped - mean)
    deviation = jnp.sqrt(jnp.sum(centered**2, axis=(0, 2), keepdims=True) / count)
    # The constant is of the size of rewards, so that noise well below them is not magnified.
    return (centered / (deviation + 1e-3)).reshape(advantages.shape)


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
    """Return leaves `[L, T, E, ...]` as a rollout's, `[T, B, ...]`."""
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
