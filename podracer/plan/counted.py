"""Work of the parts of an update on one device, counted in the traces of the run's own programs."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType

from podracer.agent import Blueprint
from podracer.drivers.anakin import AnakinConfig, make_chunk
from podracer.drivers.common import TrainState, make_initial_state
from podracer.drivers.sebulba import SebulbaConfig
from podracer.drivers.sebulba.trajectory import (
    ActorShapes,
    actor_shapes,
    infer,
    map_over_rows,
)
from podracer.drivers.sebulba.update import make_update
from podracer.environment import Environment
from podracer.mesh import DATA
from podracer.plan.work import Work, count
from podracer.rollout import init_actor, rollout
from podracer.types import EnvironmentSpec, PyTree, TimeStep


@dataclasses.dataclass(frozen=True)
class AnakinWork:
    """Work of one update on one device."""

    simulator: Work
    acting: Work
    learning: Work


@dataclasses.dataclass(frozen=True)
class SebulbaWork:
    """Work of one update; a step is that of one actor thread, with all its environments."""

    acting: Work  # of one step
    learning: Work  # of one update, on one learner
    step_bytes: int  # from the host to an actor's device, in one step
    shard_bytes: int  # from an actor to one learner, in one rollout


def abstract_mesh(devices: int) -> Any:
    """Return a mesh of devices that need not exist, for tracing."""
    return AbstractMesh((devices,), (DATA,), axis_types=(AxisType.Auto,))


def keys_of(*shape: int) -> jax.ShapeDtypeStruct:
    """Return the shape and the type of random keys."""
    return jax.ShapeDtypeStruct(shape, jax.eval_shape(lambda: jax.random.key(0)).dtype)


def size_of(tree: PyTree) -> int:
    """Return the bytes of arrays, or of their shapes and types."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def anakin_work(
    blueprint: Blueprint, env: Environment, config: AnakinConfig, num_devices: int
) -> AnakinWork:
    """Count an update on one of `num_devices` devices, which share `config.num_envs`."""
    num_envs, length = config.num_envs // num_devices, config.rollout_length
    one = dataclasses.replace(config, num_envs=num_envs)
    chunk = make_chunk(
        env, abstract_mesh(num_devices), dataclasses.replace(config, updates_per_chunk=1)
    )
    state = jax.eval_shape(partial(make_initial_state, blueprint, env, config), keys_of())
    total = count(chunk, blueprint, state, jax.ShapeDtypeStruct((num_devices, 2), jnp.int32))
    local = jax.eval_shape(partial(make_initial_state, blueprint, env, one), keys_of())
    agent = blueprint.build()
    actor = jax.eval_shape(partial(init_actor, agent, env), keys_of(num_envs))
    params = jax.eval_shape(agent.actor_params, local.learner)
    keys = keys_of(length, num_envs)
    both = count(partial(rollout, agent, env), params, actor, keys, keys)
    total = dataclasses.replace(total, is_bounded=both.is_bounded)  # its loop makes one update
    step = agent_action(agent, params, actor.carry, actor.timestep)
    simulator = count(jax.vmap(env.step), keys_of(num_envs), actor.env_state, step) * length
    return AnakinWork(simulator, both - simulator, total - both)


def agent_action(agent: Any, params: PyTree, carry: PyTree, timestep: TimeStep) -> PyTree:
    """Return the shapes of the actions in a batch of environments."""
    keys = keys_of(timestep.reward.shape[0])
    act: Any = partial(cast(Any, agent.build().act), explore=True)
    return jax.eval_shape(act, params, carry, timestep, keys)[0]


def sebulba_work(
    agent: Blueprint,
    spec: EnvironmentSpec,
    config: SebulbaConfig,
    *,
    threads: int,
    learners: int,
    num_learners: int,
) -> SebulbaWork:
    """Count an update of `num_learners` learners in all, `learners` of them on each host.

    `threads` is the number of actor threads of a host.
    """  # fmt: skip
    hosts = num_learners // learners
    num_envs = config.num_envs // hosts // threads
    shapes = thread_shapes(agent, spec, config, num_envs, learners)
    acting = count(
        partial(infer, agent.build()),
        shapes.params,
        shapes.buffer,
        keys_of(num_envs),
        *shapes.timestep,
    )
    shards = [map_over_rows(partial(_widen, num_learners), shapes.shard)] * threads
    update = make_update(abstract_mesh(num_learners), threads, config.updates_per_batch)
    state = learner_state(agent, config)
    request = jax.ShapeDtypeStruct((num_learners, 2), jnp.int32)
    learning = count(update, agent, state, shards, request)
    return SebulbaWork(acting, learning, size_of(shapes.timestep), size_of(shapes.shard))


def learner_state(agent: Blueprint, config: SebulbaConfig) -> TrainState:
    """Return the shapes of the training state without its actor."""
    return jax.eval_shape(partial(make_initial_state, agent, None, config), keys_of())


def thread_shapes(
    agent: Blueprint, spec: EnvironmentSpec, config: SebulbaConfig, num_envs: int, learners: int
) -> ActorShapes:
    """Return the shapes of one actor thread with `num_envs` environments."""
    state = learner_state(agent, dataclasses.replace(config, num_envs=num_envs))
    return actor_shapes(
        agent, spec, state.learner,
        num_envs=num_envs, length=config.rollout_length, num_learners=learners,
    )  # fmt: skip


def _widen(times: int, axis: int, x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Return the shape over all learners of an array of which each has a shard."""
    shape = (*x.shape[:axis], times * x.shape[axis], *x.shape[axis + 1 :])
    return jax.ShapeDtypeStruct(shape, x.dtype)
