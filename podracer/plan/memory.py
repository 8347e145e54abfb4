"""Memory of one device by part, as XLA lays out the run's own program."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from podracer.agent import Blueprint
from podracer.devices.host_memory import host_leaves
from podracer.devices.mesh import make_mesh
from podracer.devices.reductions import traced_for
from podracer.drivers.anakin import AnakinConfig, make_chunk
from podracer.drivers.common import TrainState, abstract_request, abstract_state, place_agent
from podracer.drivers.sebulba import SebulbaConfig
from podracer.drivers.sebulba.trajectory import actor_shapes, infer
from podracer.drivers.sebulba.update import abstract_on_mesh, make_update
from podracer.environment import Environment
from podracer.rollout import init_actor, rollout
from podracer.types import EnvironmentSpec, PyTree

_TRIES = 4  # compilations of a proposed batch that may turn out too large


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes on one device by part."""

    role: str
    """What the device does: `actor`, `learner`, or `device` for everything."""
    devices: int
    """Number of devices of each host in this role."""
    parts: dict[str, int]
    host_bytes: int = 0
    """Bytes of the host's memory that one of its devices uses beside its own."""

    @property
    def total(self) -> int:
        """Sum of the parts."""
        return sum(self.parts.values())


def anakin_memory(
    agent: Blueprint, env: Environment, config: AnakinConfig, platform: str, devices: int = 1
) -> Memory:
    """Return the memory of each of a host's devices, with `config.num_envs` for itself."""
    mesh = make_mesh(jax.devices()[:1])
    state = abstract_state(agent, env, mesh, config)
    with traced_for(platform):
        chunk = make_chunk(env, mesh, config).lower(
            place_agent(agent, mesh), state, abstract_request(mesh)
        )
    temporary = _temporary(chunk)
    keys = _keys_of(config.rollout_length, config.num_envs)
    built = agent.build()
    actor = jax.eval_shape(partial(init_actor, built, env), _keys_of(config.num_envs))
    params = jax.eval_shape(built.actor_params, state.learner)
    _, trajectory = jax.eval_shape(partial(rollout, built, env), params, actor, keys, keys)
    rollout_bytes, host_bytes = min(size_of(trajectory), temporary), bytes_on_host(state, platform)
    parts = {
        "parameters and optimizer": size_of(state.learner.shared),
        "replay and other state of environments": size_of(state.learner.local) - host_bytes,
        "environments": size_of(state.actor),
        "rollout": rollout_bytes,
        "activations and temporaries": temporary - rollout_bytes,
    }
    return Memory("device", devices, parts, host_bytes)


def sebulba_memory(
    agent: Blueprint,
    spec: EnvironmentSpec,
    config: SebulbaConfig,
    platform: str,
    *,
    actors: int,
    learners: int,
    shares_device: bool,
) -> list[Memory]:
    """Return the memory of an actor's and of a learner's device, or of the one that is both.

    `actors` and `learners` devices share the `config.num_envs` environments of a host.
    """
    threads = actors * config.threads_per_actor
    mesh = make_mesh(jax.devices()[:1])
    num_envs = config.num_envs // threads
    rows = dataclasses.replace(config, num_envs=config.num_envs // learners)
    state = abstract_state(agent, None, mesh, rows)
    shapes = actor_shapes(
        agent,
        spec,
        state.learner,
        num_envs=num_envs,
        length=config.rollout_length,
        num_learners=learners,
    )
    shards = [abstract_on_mesh(mesh, shapes.shard)] * threads
    with traced_for(platform):
        update = make_update(mesh, threads, config.updates_per_batch).lower(
            place_agent(agent, mesh), state, shards, abstract_request(mesh)
        )
        act = jax.jit(partial(infer, agent.build()), donate_argnums=1).lower(
            shapes.params, shapes.buffer, _keys_of(num_envs), *shapes.timestep
        )
    host_bytes = bytes_on_host(state, platform)
    learner = {
        "parameters and optimizer": size_of(state.learner.shared),
        "replay and other state of environments": size_of(state.learner.local) - host_bytes,
        # One batch of trajectories is learned from while others wait.
        "rollouts": (1 + config.queue_depth) * size_of(shards),
        "activations and temporaries": _temporary(update),
    }
    local = config.threads_per_actor
    actor = {
        "parameters of actors": size_of(shapes.params),
        # A thread fills its buffer while the copy that it finished travels.
        "buffers of actors": 2 * local * size_of(shapes.buffer),
        "activations of actors": local * _temporary(act),
    }
    if shares_device:
        return [Memory("device", 1, {**learner, **actor}, host_bytes)]
    return [Memory("actor", actors, actor), Memory("learner", learners, learner, host_bytes)]


def _keys_of(*shape: int) -> jax.ShapeDtypeStruct:
    """Return the shape and the type of random keys."""
    return jax.ShapeDtypeStruct(shape, jax.eval_shape(lambda: jax.random.key(0)).dtype)


def size_of(tree: PyTree) -> int:
    """Return the bytes of arrays, or of their shapes and types."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def bytes_on_host(state: TrainState, platform: str) -> int:
    """Return the bytes in host memory; a CPU has no other, so there they are the device's."""
    return 0 if platform == "cpu" else size_of(host_leaves(state))


def _temporary(lowered: Any) -> int:
    """Return the bytes that a program needs beside its arguments and results."""
    return lowered.compile().memory_analysis().temp_size_in_bytes


def largest_batch(
    memory_of: Callable[[int], int], num_envs: int, multiple: int, limit: int
) -> int | None:
    """Return the largest number of environments whose memory fits, 0 where none does.

    `memory_of` compiles, so it is asked for `num_envs`, which do not fit, for a quarter of them,
    and for what the line through both proposes. None where that finds no number.
    """
    small = max(multiple, num_envs // 4 // multiple * multiple)
    if small >= num_envs:
        return 0
    small_size, size = memory_of(small), memory_of(num_envs)
    if size <= small_size:
        return small if small_size <= limit else 0
    slope = (size - small_size) / (num_envs - small)
    proposed = max(0, math.floor((small + (limit - small_size) / slope) / multiple) * multiple)
    for _ in range(_TRIES):
        if proposed == 0 or memory_of(proposed) <= limit:
            return proposed
        proposed = int(0.9 * proposed) // multiple * multiple
    return None
