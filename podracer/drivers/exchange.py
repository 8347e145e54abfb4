"""Exchanges between pods: when one is due, and checks of a period."""

from __future__ import annotations

from typing import Any

from podracer.errors import ConfigError


def is_due(every: int, updates: Any) -> Any:
    """Return whether an exchange is due after `updates` updates, at multiples of `every`.

    `updates` is an int, or an integer array of NumPy or JAX; the result is a bool of that kind.
    """
    return (updates > 0) & (updates % every == 0)


def check_period(every: int, num_pods: int, updates_per_chunk: int, num_updates: int) -> None:
    """Raise `ConfigError` if there are no pods to exchange with, or never a time for it."""
    if num_pods < 2:
        raise ConfigError(
            f"an exchange needs at least 2 pods, but there is {num_pods}: vary a hyperparameter, "
            "or take more seeds."
        )
    if every < 1:
        raise ConfigError(
            "an exchange needs a period: give it by `exchange.every`, in updates, a multiple of a "
            f"chunk's {updates_per_chunk}."
        )
    if every >= num_updates:
        raise ConfigError(
            f"`exchange.every={every}` is never reached in a run of {num_updates} updates: take a "
            "smaller one, or more `frames`."
        )
    if every % updates_per_chunk:
        nearest = max(1, round(every / updates_per_chunk)) * updates_per_chunk
        remedy = f"take {nearest}, or another" if nearest < num_updates else "take a smaller"
        raise ConfigError(
            f"`exchange.every` counts updates and must be a multiple of a chunk's "
            f"{updates_per_chunk}, but it is {every}: {remedy} `driver.updates_per_chunk`."
        )
