"""Averaging within a population: pods exchange parameters now and then, not gradients always.

    jit(cond(average), shard_map(map(vmap(chunk))))

Each pod learns from environments of its own, as a replica of synchronous training does, but the
replicas meet every so many updates only: local SGD (Stich 2019, arXiv 1805.09767), and gossip with
one neighbor (GALA: Assran et al. 2019, arXiv 1906.04585).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from podracer.devices.mesh import POD, REPLICATED
from podracer.drivers.exchange import is_due
from podracer.drivers.state import TrainState
from podracer.errors import ConfigError
from podracer.types import PyTree

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
        sound = _like(is_sound, x)
        summands = jax.lax.with_sharding_constraint(jnp.where(sound, x, 0), whole)
        # Behind a barrier, or each device would sum its own pods first.
        summands = jax.lax.optimization_barrier(summands)
        count = jnp.maximum(is_sound.sum(), 1).astype(x.dtype)
        return jnp.where(sound, jnp.sum(summands, axis=0, keepdims=True) / count, x)

    def average_pairs(x: jax.Array, is_sound: jax.Array) -> jax.Array:
        values, sound = (jnp.roll(y, 1, axis=0) for y in (x, is_sound))  # those one pod before
        return jnp.where(_like(is_sound & sound, x), 0.5 * (x + values), x)

    def average(x: jax.Array) -> jax.Array:
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        meet = average_all if averaging.peers == "all" else average_pairs
        return jax.lax.with_sharding_constraint(meet(x, is_sound), sharded)

    return jax.tree.map(average, tree)


def _like(flags: jax.Array, x: jax.Array) -> jax.Array:
    """Return bools `[P]` with as many axes as `x`, `[P, ...]`."""
    return flags.reshape(flags.shape + (1,) * (x.ndim - 1))
