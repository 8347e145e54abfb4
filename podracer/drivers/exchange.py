"""Exchanges between the pods of a population: when one is due, and the check of its period."""

from __future__ import annotations

from typing import Any

from podracer.types import ConfigError


def is_due(every: int, updates: Any) -> Any:
    """Return whether the chunk that begins after so many updates begins with an exchange.

    `updates` is an int, or an integer array of NumPy or JAX; the result is a bool of that kind.
    """
    return (updates > 0) & (updates % every == 0)


def check_period(every: int, num_pods: int, updates_per_chunk: int, num_updates: int) -> None:
    """Raise `ConfigError` if there are no pods to exchange with, or never a time for it."""
    if num_pods < 2:
        raise ConfigError(
            f"--select and --average need at least 2 pods, but there is {num_pods}: vary a "
            "hyperparameter, or take more --seeds."
        )
    if every < 1:
        raise ConfigError(
            "--select and --average need a period: give it with --every N, in updates, a multiple "
            f"of a chunk's {updates_per_chunk}."
        )
    if every % updates_per_chunk:
        near = max(1, round(every / updates_per_chunk)) * updates_per_chunk
        raise ConfigError(
            f"--every counts updates and must be a multiple of a chunk's {updates_per_chunk}, "
            f"but it is {every}: take {near}, or another --updates-per-chunk."
        )
    if every >= num_updates:
        raise ConfigError(
            f"--every {every} is never reached in a run of {num_updates} updates: take a smaller "
            "one, or more --frames."
        )
