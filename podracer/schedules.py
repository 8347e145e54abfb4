"""Schedules: hyperparameters that change with the frames of a run (docs/decisions/0029).

An agent with a schedule keeps a counter of `frames` in its shared state, and a population may give
its members different ones: the numbers of a schedule are leaves of the agent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp

from podracer.devices.reductions import global_mean, num_shards
from podracer.errors import ConfigError
from podracer.fields import bounded, struct
from podracer.types import Trajectory

Config = TypeVar("Config")

MAX_FRAMES = 2**32 - 1


@struct
class Linear:
    """Number that changes linearly with the frames of a run, and then stays."""

    start: float
    """Value before the first update."""
    end: float
    """Value from `frames` on."""
    frames: float | None = bounded(None, low=1.0)
    """Number of frames over which the value changes, at least 1; None for all of the run's."""


Schedule = float | Linear


def value_at(schedule: Schedule | jax.Array, frames: jax.Array) -> float | jax.Array:
    """Return the value of a schedule after a number of frames `[]`; a number is its own value."""
    if not isinstance(schedule, Linear):
        return schedule
    if schedule.frames is None:
        raise ConfigError("a schedule without `frames` needs a run, whose frames it takes.")
    progress = frames.astype(jnp.float32) / schedule.frames
    value = schedule.start + (schedule.end - schedule.start) * progress
    # Decided by the frames: a sum that is rounded may miss the end.
    return jnp.where(frames >= schedule.frames, schedule.end, value)


def over_run(config: Config, frames: int) -> Config:
    """Return a dataclass whose schedules without frames of their own, at any depth, last these.

    Raises `ConfigError` for more frames than a schedule can count.
    """
    changes: dict[str, Any] = {}
    for name, value in _parts(config):
        if not isinstance(value, Linear):
            new = over_run(value, frames)
        else:
            duration = float(value.frames or frames)
            new = dataclasses.replace(value, frames=duration)
            if duration > MAX_FRAMES:
                raise ConfigError(
                    f"{name} would change over {duration:,.0f} frames, but schedules count to "
                    f"{MAX_FRAMES:,}: give it fewer frames of its own."
                )
        if new != value:
            changes[name] = new
    return dataclasses.replace(cast(Any, config), **changes) if changes else config


def current_values(config: Any, frames: int) -> dict[str, float]:
    """Return the values of a dataclass's schedules after a number of frames, by their names."""
    values: dict[str, float] = {}
    for name, value in _parts(config):
        if not isinstance(value, Linear):
            values |= {f"{name}.{key}": x for key, x in current_values(value, frames).items()}
        elif value.frames is not None:
            progress = frames / value.frames
            present = value.start + (value.end - value.start) * progress
            values[name] = value.end if frames >= value.frames else present
    return values


def _parts(config: Any) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a dataclass that are dataclasses, with their names."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            yield field.name, value


def valid_share(trajectory: Trajectory) -> jax.Array:
    """Return the share of a shard's transitions that are valid, f32 []."""
    return jnp.mean(trajectory.valid().astype(jnp.float32))


def frames_of(valid: jax.Array, share: jax.Array, axis: str | None) -> jax.Array:
    """Return the frames of a rollout, uint32 [], from its `valid [T, B]` and all shards' share."""
    return jnp.round(share * (valid.size * num_shards(axis))).astype(jnp.uint32)


def count_frames(trajectory: Trajectory, axis: str | None) -> jax.Array:
    """Return the frames of a rollout, all shards together, uint32 []."""
    return frames_of(trajectory.valid(), global_mean(valid_share(trajectory), axis), axis)


def init_frames() -> jax.Array:
    """Return a counter of frames at zero, uint32 []."""
    return jnp.uint32(0)


def add_frames(frames: jax.Array, count: jax.Array) -> jax.Array:
    """Return the counter of frames, uint32 [], after `count` more; it stays at its maximum."""
    return frames + jnp.minimum(count, jnp.uint32(MAX_FRAMES) - frames)
