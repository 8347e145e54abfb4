"""Hosts that average what they learned now and then, in place of gradients at every update.

    shard_map(update of each host's own state, then cond(average over the hosts))

The learners of one host average gradients as always; hosts, between which links are slow, meet
every so many updates only: local SGD (Stich 2019, arXiv 1805.09767), and gossip with one neighbor
(GALA: Assran et al. 2019, arXiv 1906.04585). Actors have the parameters of their host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from podracer.devices.mesh import DATA, HOST, REPLICATED
from podracer.devices.reductions import global_mean
from podracer.drivers.common import TRAIN_SPEC, TrainState
from podracer.drivers.exchange import Peers, check_hypercube, is_due, num_rounds, partners_values
from podracer.drivers.sebulba.config import DeviceSplit, SebulbaConfig
from podracer.types import LearnerState, PyTree

BY_HOST = PartitionSpec(HOST)  # leaves [hosts, ...]
BY_HOST_SPEC = dataclasses.replace(
    TRAIN_SPEC,
    learner=LearnerState(BY_HOST, PartitionSpec((HOST, DATA))),  # type: ignore[arg-type]
)


@dataclasses.dataclass(frozen=True)
class HostAveraging:
    """Periodic averaging of the hosts' learner states: among which hosts, and how often.

    While it runs each leaf of `learner.shared` is `[hosts, ...]`, with one value for each host.
    Checkpoints and evaluations have the mean of all hosts, from which a resumed run goes on; the
    run itself does not.
    """

    peers: Peers
    every: int  # updates
    mesh: Mesh  # [hosts, learners of a host]

    @property
    def axis(self) -> str | None:
        """Axis of the learners of a host, over which their gradients are averaged."""
        return DATA if self.mesh.shape[DATA] > 1 else None

    def copy_for_hosts(self, state: TrainState) -> TrainState:
        """Return the state with a copy of `learner.shared` for each host; free the original.

        `local` is not copied.
        """
        copies = map_shared(partial(_copies, self.mesh), state)
        free_shared(state)
        return copies

    def abstract(self, state: TrainState) -> TrainState:
        """Return shapes and shardings of `copy_for_hosts`."""
        num_hosts, sharding = self.mesh.shape[HOST], NamedSharding(self.mesh, BY_HOST)
        return map_shared(
            partial(
                jax.tree.map,
                lambda x: jax.ShapeDtypeStruct((num_hosts, *x.shape), x.dtype, sharding=sharding),
            ),
            state,
        )

    def mean(self, state: TrainState) -> TrainState:
        """Return the state with the mean of all hosts.

        Integers come from the first host. They count frames and updates, the same on all hosts,
        and steps of the optimizer, which differ where a host ended an update early.
        """
        return map_shared(partial(_mean, self.mesh), state)

    def average_if_due(self, state: TrainState) -> TrainState:
        """Average a host's floats of `learner.shared`, in `shard_map`, after each N-th update."""
        due = is_due(self.every, state.update)
        average = partial(_on_floats, partial(self._average, state.update // self.every - 1))
        return map_shared(lambda x: jax.lax.cond(due, average, lambda x: x, x), state)

    def _average(self, round: jax.Array, flat: jax.Array) -> jax.Array:
        if self.peers == "all":
            return _by_learners(partial(global_mean, axis=HOST), flat)
        num_hosts = self.mesh.shape[HOST]
        rounds = [
            partial(_average_with, partners_values(self.peers, number, np.arange(num_hosts)))
            for number in range(num_rounds(self.peers, num_hosts))
        ]
        return _by_learners(lambda part: jax.lax.switch(round % len(rounds), rounds, part), flat)


def host_averaging(config: SebulbaConfig, split: DeviceSplit) -> HostAveraging | None:
    """Return how hosts average, or None where they average gradients; one host has no other.

    Raises `ConfigError` if the peers do not fit the number of hosts.
    """
    num_hosts = split.num_hosts
    if config.average_hosts == "hypercube":
        remedy = 'take another number of hosts, or in a new run `driver.average_hosts="ring"`'
        check_hypercube(num_hosts, "hosts", remedy)
    if config.average_hosts is None or num_hosts == 1:
        return None
    learners = split.mesh.devices.reshape(num_hosts, -1)
    mesh = Mesh(learners, (HOST, DATA), axis_types=(AxisType.Auto, AxisType.Auto))
    return HostAveraging(config.average_hosts, config.average_every, mesh)


def map_shared(function: Callable[[PyTree], PyTree], state: TrainState) -> TrainState:
    """Return the state with `function` of its `learner.shared` in place of it."""
    return state.with_shared(function(state.learner.shared))


def free_shared(state: TrainState) -> None:
    """Free the memory of `learner.shared`, as a program does to which it is donated."""
    for leaf in jax.tree.leaves(state.learner.shared):
        leaf.delete()


@jax.jit
def host_part(tree: PyTree) -> PyTree:
    """Return this host's leaves `[...]` from its shard `[1, ...]` of leaves `[hosts, ...]`."""
    return jax.tree.map(lambda x: x[0], tree)


def _on_floats(function: Callable[[jax.Array], jax.Array], tree: PyTree) -> PyTree:
    """Return the tree with a function of its float leaves, as one vector, in place of them."""
    floats, other_leaves = eqx.partition(tree, eqx.is_inexact_array)
    flat, unravel = ravel_pytree(floats)
    return eqx.combine(unravel(function(flat)), other_leaves)


def _by_learners(function: Callable[[jax.Array], jax.Array], flat: jax.Array) -> jax.Array:
    """Return a function of a vector that a host's learners share, each of a part of it.

    So a host sends each number once, whatever the number of its learners.
    """
    learners = jax.lax.axis_size(DATA)
    if learners == 1:
        return function(flat)
    parts = jnp.pad(flat, (0, -flat.size % learners)).reshape(learners, -1)
    part = function(parts[jax.lax.axis_index(DATA)])
    return jax.lax.all_gather(part, DATA, tiled=True)[: flat.size]


def _average_with(partners: np.ndarray, flat: jax.Array) -> jax.Array:
    """Return the average with another host, from which each host `i` receives: `partners[i]`."""
    pairs = [(int(source), target) for target, source in enumerate(partners)]
    return 0.5 * (flat + jax.lax.ppermute(flat, HOST, pairs))


@partial(jax.jit, static_argnums=0)
def _copies(mesh: Mesh, shared: PyTree) -> PyTree:
    copies = jax.tree.map(lambda x: jnp.broadcast_to(x, (mesh.shape[HOST], *x.shape)), shared)
    return jax.lax.with_sharding_constraint(copies, NamedSharding(mesh, BY_HOST))


@partial(jax.jit, static_argnums=0)
def _mean(mesh: Mesh, shared: PyTree) -> PyTree:
    def mean_of_parts(shared: PyTree) -> PyTree:
        mean = partial(_by_learners, partial(global_mean, axis=HOST))
        return _on_floats(mean, host_part(shared))

    return jax.shard_map(
        mean_of_parts, mesh=mesh, in_specs=BY_HOST, out_specs=REPLICATED, check_vma=False
    )(shared)
