"""Exchanges between pods: when one is due, and averages of what they have learned.

    jit(cond(average), shard_map(map(vmap(chunk))))

A pod that averages learns from environments of its own, as a replica of synchronous training does,
but the replicas meet every so many updates only: local SGD (Stich 2019, arXiv 1805.09767), and
gossip with one neighbor (GALA: Assran et al. 2019, arXiv 1906.04585).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from podracer.devices.mesh import POD, REPLICATED
from podracer.drivers.state import TrainState
from podracer.errors import ConfigError
from podracer.types import PyTree


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


Peers = Literal["all", "ring"]


@dataclasses.dataclass(frozen=True)
class Averaging:
    """Periodic averaging of the pods' learner states: among which pods, and how often.

    Floats are averaged: parameters, targets, moments of the optimizer and of observations, each
    number for itself, so averaged variances ignore the spread between pods. A pod keeps its
    replay, its environments and its random numbers.
    """

    peers: Peers
    """`all` pods, or the pod before in a directed `ring`, as in GALA. Averages keep the mean of
    all pods, but in a ring beside a failed pod: the pod after it keeps what it has."""
    every: int
    """Number of updates between two averages: whole chunks."""

    def check(self, pods: Sequence[Any]) -> None:
        """Raise `ConfigError` if the peers do not fit the number of pods, or pods differ."""
        if len({pod.hyperparameters for pod in pods}) > 1:
            raise ConfigError(
                "pods that average become one learner, so they need the same hyperparameters: "
                "vary none, or leave out the average."
            )


def with_averaging(chunk: Callable[..., Any], averaging: Averaging, mesh: Mesh) -> Any:
    """Return a chunk `(agents, states, request) -> (states, metrics)` that averages before it."""

    def average(states: TrainState) -> TrainState:
        is_sound = states.fault[:, 0] == 0
        shared = average_states(averaging, states.learner.shared, is_sound, mesh)
        return states.with_shared(shared)

    def program(agents: Any, states: TrainState, request: jax.Array) -> tuple[TrainState, Any]:
        due = is_due(averaging.every, states.update[0])
        states = jax.lax.cond(due, average, lambda states: states, states)
        return chunk(agents, states, request)

    return program


def average_states(averaging: Averaging, tree: PyTree, is_sound: jax.Array, mesh: Mesh) -> PyTree:
    """Return the averages of the float leaves `[P, ...]` of sound pods, bool `[P]`.

    Pods that are not sound, and other leaves, stay as they are. In a ring the pod after one that is
    not sound stays, too, which gives its neighbors unequal weights.
    """
    whole, sharded = (NamedSharding(mesh, spec) for spec in (REPLICATED, PartitionSpec(POD)))

    def average_all(x: jax.Array, is_sound: jax.Array) -> jax.Array:
        # Whole on each device, so that the sum's order does not depend on their number.
        is_sound = jax.lax.with_sharding_constraint(is_sound, whole)
        sound = jnp.expand_dims(is_sound, range(1, x.ndim))
        summands = jax.lax.with_sharding_constraint(jnp.where(sound, x, 0), whole)
        # Behind a barrier, or each device would sum its own pods first.
        summands = jax.lax.optimization_barrier(summands)
        count = jnp.maximum(is_sound.sum(), 1).astype(x.dtype)
        return jnp.where(sound, jnp.sum(summands, axis=0, keepdims=True) / count, x)

    def average_pairs(x: jax.Array, is_sound: jax.Array) -> jax.Array:
        values, sound = (jnp.roll(y, 1, axis=0) for y in (x, is_sound))  # those one pod before
        both_sound = jnp.expand_dims(is_sound & sound, range(1, x.ndim))
        return jnp.where(both_sound, 0.5 * (x + values), x)

    def average(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        meet = average_all if averaging.peers == "all" else average_pairs
        return jax.lax.with_sharding_constraint(meet(x, is_sound), sharded)

    return jax.tree.map(average, tree)
