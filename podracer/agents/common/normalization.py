"""Normalization of observations and rewards by running moments."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from podracer.devices.reductions import Moments, merge, moments_of, normalize
from podracer.ops.returns import discounted_sums
from podracer.types import TimeStep, Trajectory


def normalize_observation(moments: Moments | None, timestep: TimeStep) -> TimeStep:
    """Return a timestep whose observation has about zero mean and unit variance.

    It stays as it is without moments.
    """
    if moments is None:
        return timestep
    observation = normalize(moments, timestep.observation)
    return dataclasses.replace(timestep, observation=observation)


def normalized_by_actor(moments: Moments, trajectory: Trajectory) -> Trajectory:
    """Return a trajectory with the normalized observations that acting has seen.

    Acting keeps them in its extras as `observation`: its moments may be older than the learner's,
    `moments`, which normalize the final observation, since acting has not seen it.
    """
    steps = trajectory.steps.with_timestep(observation=trajectory.steps.extras["observation"])
    final = normalize_observation(moments, trajectory.final)
    return dataclasses.replace(trajectory, steps=steps, final=final)


def update_moments(moments: Moments, trajectory: Trajectory, axis: str | None) -> Moments:
    """Return the moments of the valid observations so far, with a rollout's."""
    valid = trajectory.valid().astype(jnp.float32)
    return merge(moments, moments_of(trajectory.steps.timestep.observation, axis, valid))


def scale_rewards(
    moments: Moments, sums: jax.Array, trajectory: Trajectory, *, discount: float, axis: str | None
) -> tuple[Trajectory, Moments, jax.Array]:
    """Divide rewards by the standard deviation of the discounted sums of past rewards.

    Only valid transitions have a sum. The quotients are clipped to [-10, 10]. `moments` and
    `sums [B]` are those of the previous rollouts. Returns the trajectory, the moments of all sums
    so far and the newest sum of each environment. Source: Engstrom et al. 2020, section 3 (arXiv
    2005.12729).
    """
    returns, sums = discounted_rewards(sums, trajectory, discount)
    moments = merge(moments, moments_of(returns, axis, trajectory.valid().astype(jnp.float32)))
    scale = jax.lax.rsqrt(moments.variance + 1e-8)
    rewards = jnp.clip(trajectory.timesteps().reward * scale, -10.0, 10.0)
    return trajectory.with_rewards(rewards), moments, sums


def discounted_rewards(
    sums: jax.Array, trajectory: Trajectory, discount: float | jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the discounted sums of past rewards `[T, B]`, and the newest ones after ends `[B]`.

    They change their sign where the turn passes: each is of the player who gets the reward.
    """
    timestep, next_timesteps = trajectory.steps.timestep, trajectory.next_timesteps()
    ended = next_timesteps.last | (next_timesteps.discount == 0)
    # The discount between the last reward and this one: a new episode has no past, also where a
    # fault, or a run that was resumed with new episodes, left the one before.
    decay = jnp.where(timestep.first, 0.0, discount * timestep.discount)
    return discounted_sums(sums, next_timesteps.reward, decay, ended)
