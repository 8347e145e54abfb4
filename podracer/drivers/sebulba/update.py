"""Program of the learner devices: an update from the trajectories of all actor threads."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from podracer.agent import Agent
from podracer.drivers.common import (
    TRAIN_SPEC,
    TrainState,
    apply_unless_fault,
    learn_key,
    reduce_metrics,
)
from podracer.drivers.sebulba.trajectory import ROW_AXES, TrajectoryShard, map_over_rows
from podracer.mesh import DATA, REPLICATED, SHARDED
from podracer.types import LearnerState, Metrics, Params, PyTree


def _partition_spec(axis: int) -> PartitionSpec:
    return PartitionSpec(*[None] * axis, DATA)


SHARD_SPEC = jax.tree.map(_partition_spec, ROW_AXES)


def make_update(mesh: Mesh, num_actors: int, updates_per_batch: int) -> jax.stages.Wrapped:
    """Return the jitted program `(agent, state, shards, request) -> (state, params, metrics)`.

    `shards` has one item for each actor thread of a host, see `on_mesh`. The state is donated. The
    actors' parameters are an output of their own, so that they can be sent during the next update.
    """
    axis = DATA if mesh.size > 1 else None
    update = jax.shard_map(
        partial(_update, updates_per_batch, axis),
        mesh=mesh,
        in_specs=(REPLICATED, TRAIN_SPEC, [SHARD_SPEC] * num_actors, SHARDED),
        out_specs=(TRAIN_SPEC, REPLICATED, REPLICATED),
        check_vma=False,
    )
    return jax.jit(update, donate_argnums=1)


def _update(
    num_parts: int,
    axis: str | None,
    agent: Agent,
    state: TrainState,
    shards: list[TrajectoryShard],
    request: jax.Array,
) -> tuple[TrainState, Params, Metrics]:
    """Learn from the rows of all actors on one learner, in one update or in several parts."""
    batch = map_over_rows(lambda axis, *rows: jnp.concatenate(rows, axis), *shards)
    if num_parts == 1:  # without a scan, which would copy a replay
        key = learn_key(state, axis)
        learner, metrics = agent.learn(state.learner, batch.trajectory, key, axis)
        state, metrics = apply_unless_fault(agent, state, learner, batch.trajectory, metrics, axis)
        series = jax.tree.map(lambda x: x[None], metrics)
    else:
        state, series = _update_in_parts(agent, num_parts, axis, state, batch)
    metrics = reduce_metrics(batch.episodes, state.fault, series, request[0], axis)
    return state, agent.actor_params(state.learner), metrics


def _update_in_parts(
    agent: Agent, num_parts: int, axis: str | None, state: TrainState, batch: TrajectoryShard
) -> tuple[TrainState, Metrics]:
    """Make one update from each of `num_parts` equal parts of the rows, one after the other."""

    def step(state: TrainState, part: Any) -> tuple[TrainState, tuple[PyTree, Metrics]]:
        number, local, shard = part
        learner = LearnerState(state.learner.shared, local)
        part_state = dataclasses.replace(state, learner=learner)
        key = learn_key(part_state, axis, number)
        learner, metrics = agent.learn(learner, shard.trajectory, key, axis)
        part_state, metrics = apply_unless_fault(
            agent, part_state, learner, shard.trajectory, metrics, axis
        )
        learner = part_state.learner
        new_state = dataclasses.replace(
            part_state, learner=LearnerState(learner.shared), update=state.update
        )
        return new_state, (learner.local, metrics)

    def split(axis: int, x: jax.Array) -> jax.Array:
        parts = x.reshape(*x.shape[:axis], num_parts, -1, *x.shape[axis + 1 :])
        return jnp.moveaxis(parts, axis, 0)

    local = jax.tree.map(partial(split, 0), state.learner.local)
    initial = dataclasses.replace(state, learner=LearnerState(state.learner.shared))
    parts = (jnp.arange(num_parts), local, map_over_rows(split, batch))
    final, (local, series) = jax.lax.scan(step, initial, parts)
    local = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), local)
    learner = LearnerState(final.learner.shared, local)
    return dataclasses.replace(final, learner=learner, update=state.update + 1), series


def on_mesh(mesh: Mesh, shards: list[TrajectoryShard]) -> TrajectoryShard:
    """Return one actor's shards, each on a learner of this host, as arrays over all learners."""

    def join(axis: int, *rows: jax.Array) -> jax.Array:
        shape, sharding = _global(mesh, axis, rows[0].shape)
        return jax.make_array_from_single_device_arrays(shape, sharding, list(rows))

    return map_over_rows(join, *shards)


def abstract_on_mesh(mesh: Mesh, shard: TrajectoryShard) -> TrajectoryShard:
    """Return shapes and shardings of `on_mesh`, from the shapes of one shard."""

    def extend(axis: int, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        shape, sharding = _global(mesh, axis, x.shape)
        return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)

    return map_over_rows(extend, shard)


def _global(mesh: Mesh, axis: int, shape: tuple[int, ...]) -> tuple[tuple[int, ...], NamedSharding]:
    """Return shape and sharding of an array whose shard on each learner has this shape."""
    size = shape[axis] * mesh.size
    return (*shape[:axis], size, *shape[axis + 1 :]), NamedSharding(mesh, _partition_spec(axis))
