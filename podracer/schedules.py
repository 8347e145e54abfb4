"""Schedules: hyperparameters that change with the frames of a run (docs/decisions/0029).

An agent with a schedule keeps a counter of `frames` in its shared state, and a population may give
its members different ones: the numbers of a schedule are leaves of the agent.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from podracer.mesh import num_shards
from podracer.types import Trajectory, bounded, struct

MAX_FRAMES = 2**32 - 1


@struct
class Linear:
    """Number that changes linearly with the frames of a run, and then stays."""

    start: float
    """Value before the first update."""
    end: float
    """Value from `frames` on."""
    frames: float = bounded(1e6, low=1.0)
    """Number of frames over which the value changes, at least 1."""


Schedule = float | Linear


def value_at(schedule: Schedule | jax.Array, frames: jax.Array) -> float | jax.Array:
    """Return the value of a schedule after a number of frames `[]`; a number is its own value."""
    if not isinstance(schedule, Linear):
        return schedule
    progress = jnp.minimum(1.0, frames.astype(jnp.float32) / schedule.frames)
    return schedule.start + (schedule.end - schedule.start) * progress


def frames_of(trajectory: Trajectory, axis: str | None) -> int:
    """Return the number of timesteps T x B of a trajectory, those of all shards together."""
    return trajectory.steps.timestep.reward.size * num_shards(axis)


def init_frames() -> jax.Array:
    """Return a counter of frames at zero, uint32 []."""
    return jnp.uint32(0)


def add_frames(frames: jax.Array, count: int) -> jax.Array:
    """Return the counter of frames, uint32 [], after `count` more; it stays at its maximum."""
    return frames + jnp.minimum(jnp.uint32(count), jnp.uint32(MAX_FRAMES) - frames)
