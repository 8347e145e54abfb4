"""The learners' program: an update from what every actor thread sent."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from podracer.agent import Agent
from podracer.drivers.common import (
    TRAIN_SPEC,
    TrainState,
    apply_if_finite,
    learn_key,
    reduce_metrics,
)
from podracer.drivers.sebulba.trajectory import Batch, over_rows
from podracer.mesh import DATA, REPLICATED, SHARDED
from podracer.types import LearnerState, Metrics, Params, PyTree

BATCH_SPEC = Batch(PartitionSpec(None, DATA), SHARDED)  # type: ignore[arg-type]


def make_update(
    agent: Agent, mesh: Mesh, num_batches: int, updates_per_batch: int
) -> Callable[..., tuple[TrainState, Params, Metrics]]:
    """The compiled program `(state, batches, request) -> (state, actor params, metrics)`.

    The state is donated; what actors need is an output of its own, so it can travel while the
    next update runs.
    """
    axis = DATA if mesh.size > 1 else None
    update = jax.shard_map(
        partial(_update, agent, updates_per_batch, axis),
        mesh=mesh,
        in_specs=(TRAIN_SPEC, [BATCH_SPEC] * num_batches, SHARDED),
        out_specs=(TRAIN_SPEC, REPLICATED, REPLICATED),
        check_vma=False,
    )
    return jax.jit(update, donate_argnums=0)


def _update(
    agent: Agent,
    count: int,
    axis: str | None,
    state: TrainState,
    batches: list[Batch],
    request: jax.Array,
) -> tuple[TrainState, Params, Metrics]:
    """One shard's update from what every actor thread sent: `count` updates of equal parts."""
    batch = over_rows(lambda axis, *parts: jnp.concatenate(parts, axis), *batches)

    if count == 1:  # without a scan, which would copy a replay
        trajectory = batch.trajectory
        learner, metrics = agent.learn(state.learner, trajectory, learn_key(state, axis), axis)
        state, metrics = apply_if_finite(state, learner, trajectory, metrics, axis)
        series = jax.tree.map(lambda x: x[None], metrics)
    else:
        state, series = _update_in_parts(agent, count, axis, state, batch)
    metrics = reduce_metrics(batch.edges.episodes, state.fault, series, request[0], axis)
    return state, agent.actor_params(state.learner), metrics


def _update_in_parts(
    agent: Agent, count: int, axis: str | None, state: TrainState, batch: Batch
) -> tuple[TrainState, Metrics]:
    """`count` updates of equal parts of the environments, one after the other."""

    def step(state: TrainState, piece: Any) -> tuple[TrainState, tuple[PyTree, Metrics]]:
        part, local, batch = piece
        whole = dataclasses.replace(state, learner=LearnerState(state.learner.shared, local))
        trajectory, key = batch.trajectory, learn_key(whole, axis, part)
        learner, metrics = agent.learn(whole.learner, trajectory, key, axis)
        whole, metrics = apply_if_finite(whole, learner, trajectory, metrics, axis)
        learner = LearnerState(whole.learner.shared)
        new = dataclasses.replace(whole, learner=learner, update=state.update)
        return new, (whole.learner.local, metrics)

    def parts(axis: int, x: jax.Array) -> jax.Array:
        split = x.reshape(*x.shape[:axis], count, -1, *x.shape[axis + 1 :])
        return jnp.moveaxis(split, axis, 0)

    local = jax.tree.map(partial(parts, 0), state.learner.local)
    start = dataclasses.replace(state, learner=LearnerState(state.learner.shared))
    pieces = (jnp.arange(count), local, over_rows(parts, batch))
    end, (local, series) = jax.lax.scan(step, start, pieces)
    local = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), local)
    learner = LearnerState(end.learner.shared, local)
    return dataclasses.replace(end, learner=learner, update=state.update + 1), series


def on_mesh(mesh: Mesh, shards: list[Batch]) -> Batch:
    """One thread's pieces, each on a learner of this host, as arrays over all learners."""

    def join(axis: int, *parts: jax.Array) -> jax.Array:
        shape = list(parts[0].shape)
        shape[axis] *= mesh.size
        sharding = NamedSharding(mesh, PartitionSpec(*[None] * axis, DATA))
        return jax.make_array_from_single_device_arrays(tuple(shape), sharding, list(parts))

    return over_rows(join, *shards)


def abstract_on_mesh(mesh: Mesh, shard: Batch) -> Batch:
    """Shapes and shardings of `on_mesh`, from those of one piece."""

    def spread(axis: int, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        shape = list(x.shape)
        shape[axis] *= mesh.size
        sharding = NamedSharding(mesh, PartitionSpec(*[None] * axis, DATA))
        return jax.ShapeDtypeStruct(tuple(shape), x.dtype, sharding=sharding)

    return over_rows(spread, shard)
