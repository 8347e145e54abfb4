"""Rewards divided so that returns keep one scale, for agents with a replay of transitions.

Source: Lee et al. 2025, section 4.3 (arXiv 2502.15280).
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from podracer.agent import Agent
from podracer.agents.common.normalization import discounted_rewards
from podracer.agents.continuous.learning import Transition
from podracer.devices.reductions import Moments, global_max, init_moments, merge, moments_of
from podracer.fields import struct
from podracer.types import LearnerState, Metrics, Trajectory


@struct
class ReturnStatistics:
    """Moments of the discounted sums of past rewards, and the largest of their absolute values."""

    moments: Moments
    largest: jax.Array  # f32 []


class ScaledReplay(NamedTuple):
    """Part of the learner's state for each environment."""

    replay: Any
    reward_sums: jax.Array  # f32 [B], discounted sums of past rewards


def with_return_statistics(agent: Agent, discount: float | jax.Array) -> Agent:
    """Return an agent that keeps statistics of its returns, by which its updates scale rewards.

    They are the field `returns` of its shared state; the local one is a `ScaledReplay`.
    """

    def learn(
        state: LearnerState, trajectory: Trajectory, key: jax.Array, axis: str | None
    ) -> tuple[LearnerState, Metrics]:
        replay, sums = state.local
        returns, sums = update_returns(
            state.shared.returns, sums, trajectory, discount=discount, axis=axis
        )
        shared = dataclasses.replace(state.shared, returns=returns)
        state, metrics = agent.learn(LearnerState(shared, replay), trajectory, key, axis)
        return LearnerState(state.shared, ScaledReplay(state.local, sums)), metrics

    return dataclasses.replace(agent, learn=learn)


def scaled(
    transition: Transition, returns: ReturnStatistics, limit: float | jax.Array
) -> Transition:
    """Return transitions with rewards divided by `reward_scale`."""
    scale = reward_scale(returns, limit)
    return dataclasses.replace(transition, n_step_return=transition.n_step_return / scale)


def init_returns() -> ReturnStatistics:
    """Return the statistics of no rewards."""
    return ReturnStatistics(init_moments(jnp.zeros(())), jnp.zeros(()))


def update_returns(
    returns: ReturnStatistics,
    sums: jax.Array,
    trajectory: Trajectory,
    *,
    discount: float | jax.Array,
    axis: str | None,
) -> tuple[ReturnStatistics, jax.Array]:
    """Return statistics with a rollout's rewards, and the newest sums `[B]` of environments."""
    valid = trajectory.valid().astype(jnp.float32)
    discounted, sums = discounted_rewards(sums, trajectory, discount)
    moments = merge(returns.moments, moments_of(discounted, axis, valid))
    largest = global_max(jnp.max(valid * jnp.abs(discounted)), axis)
    return ReturnStatistics(moments, jnp.maximum(returns.largest, largest)), sums


def reward_scale(returns: ReturnStatistics, limit: float | jax.Array) -> jax.Array:
    """Return the number by which rewards are divided, so that no return exceeds a limit.

    It is the standard deviation of returns, or larger.
    """
    return jnp.maximum(jnp.sqrt(returns.moments.variance + 1e-8), returns.largest / limit)
