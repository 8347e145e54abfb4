"""Lifetimes of students in the batch of environments: their number, length and observations."""

from __future__ import annotations

import dataclasses

import jax

from podracer.agents.common.actor_critic import require_spec
from podracer.agents.lpg.rule import Experience, to_experience
from podracer.environment import TaskGroups
from podracer.types import ConfigError, EnvironmentSpec, Trajectory


def task_groups(
    spec: EnvironmentSpec | None, inner_updates: int, rollout_length: int | None
) -> TaskGroups:
    """Return the groups of an environment for LPG, or raise `ConfigError` if they do not suit."""
    spec = require_spec(spec)
    groups = spec.extension
    if rollout_length is None:
        raise ConfigError("LPG has no `rollout_length`: give it that of the driver.")
    if not isinstance(groups, TaskGroups):
        raise ConfigError(f"LPG trains students in lifetimes: take lifetimes:{spec.name}.")
    # Two windows: in shorter lifetimes no window is whole, and nothing is ever learned.
    minimum = 2 * (inner_updates + 1) * rollout_length
    if groups.num_steps < minimum:
        raise ConfigError(
            f"lifetimes of {groups.num_steps} steps are too short for {inner_updates} "
            f"updates of {rollout_length}: take steps={minimum} or more."
        )
    return groups


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
    trajectory: Trajectory, groups: TaskGroups, rollout_length: int | None
) -> tuple[Experience, jax.Array, jax.Array]:
    """Return the students' experience, and the number and the task of each lifetime at its end.

    Both are i32 `[L]`. Raises `ConfigError` for a trajectory of another length.
    """
    length = trajectory.steps.action.shape[0]
    if length != rollout_length:
        raise ConfigError(f"rollout_length is {rollout_length}, but a rollout has {length} steps.")
    data, final = to_experience(trajectory), trajectory.final.observation
    data = dataclasses.replace(data, observation=data.observation["observation"])
    return data, final["task_count"][:: groups.num_envs], final["task"][:: groups.num_envs]
