"""Exchanges between replicas: when one is due, who averages with whom, and checks of a period."""

from __future__ import annotations

from typing import Any, Literal

from podracer.errors import ConfigError

Peers = Literal["all", "hypercube", "ring"]


def is_due(every: int, updates: Any) -> Any:
    """Return whether an exchange is due after `updates` updates, at multiples of `every`.

    `updates` is an int, or an integer array of NumPy or JAX; the result is a bool of that kind.
    """
    return (updates > 0) & (updates % every == 0)


def num_rounds(peers: Peers, num_replicas: int) -> int:
    """Return after how many rounds the partners are the same again."""
    return num_replicas.bit_length() - 1 if peers == "hypercube" else 1


def check_hypercube(num_replicas: int, kind: str, remedy: str) -> None:
    """Raise `ConfigError` if a hypercube cannot have so many pods or hosts."""
    if num_replicas & (num_replicas - 1):
        raise ConfigError(
            f"a hypercube needs a power of 2 of {kind}, but there are {num_replicas}: {remedy}."
        )


def partners_values(peers: Peers, round: int, values: Any) -> Any:
    """Return for each replica the value `[P, ...]` of the one that it averages with; not for `all`.

    Of an array of NumPy or JAX the result is one, too. Between devices it is a permutation, of one
    replica's value for a `ring`, and of the values of a device for a `hypercube`.
    """
    if peers == "ring":
        return values.__array_namespace__().roll(values, 1, axis=0)
    distance = 1 << (round % num_rounds(peers, len(values)))
    pairs = values.reshape(-1, 2, distance, *values.shape[1:])
    return pairs[:, ::-1].reshape(values.shape)


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
