"""Normalization of observations and rewards by running moments.

Where moments are None nothing is normalized.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from podracer.ops.moments import Moments, merge, moments_of, normalize
from podracer.ops.returns import discounted_sums
from podracer.types import PyTree, TimeStep, Trajectory


def normalize_observation(moments: Moments | None, timestep: TimeStep) -> TimeStep:
    """Return a timestep whose observation has about zero mean and unit deviation."""
    if moments is None:
        return timestep
    observation = normalize(moments, timestep.observation)
    return dataclasses.replace(timestep, observation=observation)


def normalize_observations(moments: Moments | None, trajectory: Trajectory) -> Trajectory:
    """Return a trajectory whose observations are normalized as `normalize_observation` does."""
    return _map_timesteps(lambda timestep: normalize_observation(moments, timestep), trajectory)


def update_moments(moments: Moments | None, batch_moments: Moments) -> Moments | None:
    """Return the moments of all batches so far and of a new one; None stays None."""
    return None if moments is None else merge(moments, batch_moments)


def scale_rewards(
    moments: Moments | None,
    sums: PyTree,
    trajectory: Trajectory,
    *,
    discount: float,
    axis: str | None,
) -> tuple[Trajectory, Moments | None, PyTree]:
    """Divide rewards by the standard deviation of the discounted sums of past rewards.

    `moments` and `sums [B]` are those of the previous rollouts. Returns the trajectory, the moments
    of all sums so far and the newest sum of each environment. Source: Engstrom et al. 2020,
    section 3 (arXiv 2005.12729).
    """
    if moments is None:
        return trajectory, moments, sums
    next_timesteps = trajectory.next_timesteps()
    ended = next_timesteps.last | (next_timesteps.discount == 0)
    decay = jnp.full_like(next_timesteps.reward, 1.0) * discount
    returns, sums = discounted_sums(sums, next_timesteps.reward, decay, ended)
    moments = merge(moments, moments_of(returns, axis))
    scale = jax.lax.rsqrt(moments.variance + 1e-8)

    def scale_reward(timestep: TimeStep) -> TimeStep:
        return dataclasses.replace(timestep, reward=timestep.reward * scale)

    return _map_timesteps(scale_reward, trajectory), moments, sums


def standardize(x: jax.Array, moments: Moments) -> jax.Array:
    """Return numbers with zero mean and unit variance, from their moments."""
    return (x - moments.mean) * jax.lax.rsqrt(moments.variance + 1e-8)


def _map_timesteps(function: Callable[[TimeStep], TimeStep], trajectory: Trajectory) -> Trajectory:
    timestep = function(trajectory.steps.timestep)
    steps = dataclasses.replace(trajectory.steps, timestep=timestep)
    return dataclasses.replace(trajectory, steps=steps, final=function(trajectory.final))
