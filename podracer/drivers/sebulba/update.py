"""Program of the learner devices: an update from the trajectories of all actor threads."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from podracer.agent import Blueprint
from podracer.devices.memory import check_program_memory
from podracer.devices.mesh import DATA, REPLICATED, SHARDED
from podracer.devices.ordering import shard_in_order
from podracer.devices.pieces import lower_in_pieces
from podracer.drivers.faults import apply_unless_fault
from podracer.drivers.progress import abstract_request, reduce_metrics
from podracer.drivers.sebulba.config import DeviceSplit, SebulbaConfig
from podracer.drivers.sebulba.trajectory import (
    ROW_AXES,
    ActorFunctions,
    TrajectoryShard,
    complete,
    flatten_params,
    map_over_rows,
)
from podracer.drivers.state import TRAIN_SPEC, TrainState, abstract_leaves, learn_key, place_leaves
from podracer.types import LearnerState, Metrics, PyTree

UpdateProgram = partial[tuple[TrainState, list[jax.Array], Metrics]]
"""Compiled update `(state, shards, request) -> (state, params, metrics)`, with its blueprint, see
`make_update`."""

_ROW_SPECS = jax.tree.map(lambda axis: PartitionSpec(*[None] * axis, DATA), ROW_AXES)


def update_of_mesh(mesh: Mesh, num_threads: int, updates_per_batch: int) -> tuple[Any, ...]:
    """Return the update of a shard, the mesh, and its specifications, see `shard_in_order`.

    It is `(blueprint, state, shards, request) -> (state, params, metrics)`. `shards` has one item
    for each actor thread of a host, see `on_mesh`. The state is to be donated. The actors'
    parameters are an output of their own, so that they can be sent during the next update.
    """
    axis = DATA if mesh.size > 1 else None
    in_specs = (REPLICATED, TRAIN_SPEC, [_ROW_SPECS] * num_threads, SHARDED)
    out_specs = (TRAIN_SPEC, REPLICATED, REPLICATED)
    return partial(update_of_learner, updates_per_batch, axis), mesh, in_specs, out_specs


def make_update(mesh: Mesh, num_threads: int, updates_per_batch: int) -> jax.stages.Wrapped:
    """Return the jitted program of `update_of_mesh`."""
    parts = update_of_mesh(mesh, num_threads, updates_per_batch)
    return jax.jit(shard_in_order(*parts), donate_argnums=1)


def abstract_arguments(
    blueprint: Blueprint, split: DeviceSplit, functions: ActorFunctions, state: TrainState
) -> tuple[Any, ...]:
    """Return the arguments of the update of a state or its shapes; the others are shapes."""
    finish = partial(functions.finish, len(split.learners))
    inputs = functions.layout.zeros(functions.num_envs)
    _, shards = jax.eval_shape(finish, *functions.begin_shapes, *inputs)
    return (
        abstract_leaves(blueprint, split.mesh),
        dataclasses.replace(state, actor=()),
        [on_mesh(split.mesh, shards[:1])] * split.threads,
        abstract_request(split.mesh),
    )


def lower_update(
    blueprint: Blueprint, split: DeviceSplit, config: SebulbaConfig, state: TrainState
) -> Callable[[], UpdateProgram]:
    """Trace the update for a state, or its shapes and shardings; return a function to compile it.

    The returned function raises `ConfigError` if the program's memory exceeds the mesh's.
    """
    rows, length = split.envs_per_thread, config.rollout_length
    functions = ActorFunctions(blueprint.build(), rows, length, state.learner)
    arguments = abstract_arguments(blueprint, split, functions, state)
    parts = (split.mesh, split.threads, config.updates_per_batch)
    if config.update_pieces:
        lowered = lower_in_pieces(config.update_pieces, *update_of_mesh(*parts), *arguments)
    else:
        lowered = make_update(*parts).lower(*arguments)
    blueprint = place_leaves(blueprint, split.mesh)
    return lambda: partial(check_program_memory(lowered.compile(), split.mesh), blueprint)


def update_of_learner(
    num_parts: int,
    axis: str | None,
    blueprint: Blueprint,
    state: TrainState,
    shards: list[TrajectoryShard],
    request: jax.Array,
) -> tuple[TrainState, list[jax.Array], Metrics]:
    """Learn from the rows of all actors on one learner, in one update or in several parts."""
    agent = blueprint.build()
    batch = map_over_rows(lambda axis, *rows: jnp.concatenate(rows, axis), *shards)

    def learn(
        state: TrainState, shard: TrajectoryShard, part: jax.Array | None = None
    ) -> tuple[TrainState, Metrics]:
        trajectory = complete(agent.spec, shard)
        key = learn_key(state, axis, part)
        learner, metrics = agent.learn(state.learner, trajectory, key, axis)
        return apply_unless_fault(agent, state, learner, trajectory, metrics, axis)

    if num_parts == 1:  # without a scan, which would copy a replay
        state, metrics = learn(state, batch)
    else:
        state, series = _update_in_parts(learn, num_parts, state, batch)
        metrics = jax.tree.map(partial(jnp.sum, axis=0), series)
    metrics = reduce_metrics(batch.episodes, state.fault, metrics, num_parts, request[0, 0], axis)
    return state, flatten_params(agent.actor_params(state.learner)), metrics


def _update_in_parts(
    learn: Callable[..., tuple[TrainState, Metrics]],
    num_parts: int,
    state: TrainState,
    batch: TrajectoryShard,
) -> tuple[TrainState, Metrics]:
    """Make one update from each of `num_parts` equal parts of the rows, one after the other."""

    def with_local(state: TrainState, local: PyTree) -> TrainState:
        return dataclasses.replace(state, learner=LearnerState(state.learner.shared, local))

    def step(state: TrainState, part: Any) -> tuple[TrainState, tuple[PyTree, Metrics]]:
        number, local, shard = part
        new_state, metrics = learn(with_local(state, local), shard, number)
        outputs = (new_state.learner.local, metrics)
        return dataclasses.replace(with_local(new_state, ()), update=state.update), outputs

    def split(axis: int, x: jax.Array) -> jax.Array:
        parts = x.reshape(*x.shape[:axis], num_parts, -1, *x.shape[axis + 1 :])
        return jnp.moveaxis(parts, axis, 0)

    local = jax.tree.map(partial(split, 0), state.learner.local)
    parts = (jnp.arange(num_parts), local, map_over_rows(split, batch))
    with jax.named_scope("parts"):
        final, (local, series) = jax.lax.scan(step, with_local(state, ()), parts)
    local = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), local)
    return dataclasses.replace(with_local(final, local), update=state.update + 1), series


def on_mesh(mesh: Mesh, shards: Sequence[TrajectoryShard]) -> TrajectoryShard:
    """Return one actor's shards, each on a learner of this host, as arrays over all learners.

    Of shapes, those of one shard, it returns the shapes, with their sharding.
    """

    def join(axis: int, *rows: Any) -> Any:
        shape = list(rows[0].shape)
        shape[axis] *= mesh.size
        sharding = NamedSharding(mesh, PartitionSpec(*[None] * axis, DATA))
        if isinstance(rows[0], jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(shape, rows[0].dtype, sharding=sharding)
        return jax.make_array_from_single_device_arrays(tuple(shape), sharding, list(rows))

    return map_over_rows(join, *shards)
