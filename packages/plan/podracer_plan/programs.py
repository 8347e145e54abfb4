"""The programs of a run on devices that need not be here, and the state that they work on."""

from __future__ import annotations

import dataclasses
import math
from functools import cached_property
from typing import Any

import jax
from jax.sharding import Mesh, PartitionSpec

from podracer.agent import Blueprint
from podracer.config.experiment import Experiment
from podracer.devices.mesh import make_mesh
from podracer.drivers import anakin, population, sebulba
from podracer.drivers.anakin import AnakinConfig
from podracer.drivers.progress import abstract_request
from podracer.drivers.sebulba import SebulbaConfig
from podracer.drivers.sebulba.trajectory import ActorFunctions, flatten_params
from podracer.drivers.sebulba.update import abstract_arguments, make_update
from podracer.drivers.state import TrainState, abstract_leaves, abstract_state, with_shardings
from podracer.environment import HostEnvironments
from podracer.envs.host.device import to_host_environments
from podracer.errors import ConfigError
from podracer.run.setup import build
from podracer.types import PyTree
from podracer_plan.targets import Target

_OTHERS = "data set, hyperparameters, other inputs"


@dataclasses.dataclass(frozen=True)
class Program:
    """A program of a run. Bytes and steps are those of one device."""

    role: str  # `learner`, `actor`, or `device` for everything
    devices: int  # number on each host that run it
    function: Any  # jitted
    arguments: tuple[Any, ...]  # shapes with their sharding
    steps: int  # environment steps of a call, of Anakin in one update
    length: int  # steps of the rollout within it
    parts: dict[str, int]  # bytes of the large arguments
    waiting: dict[str, int] = dataclasses.field(default_factory=dict)
    """Bytes of arrays that wait beside a call: other batches of trajectories."""
    copies: int = 1  # number of calls that run at once

    @cached_property
    def state(self) -> dict[str, int]:
        """Bytes of all arguments by part, without padding."""
        size = _device_bytes(self.arguments)
        return {**self.parts, _OTHERS: size - sum(self.parts.values())}


def programs_of(experiment: Experiment, target: Target) -> list[Program]:
    """Return the programs of a run on a target, checked as training checks them.

    Raises `ConfigError` where the run is impossible there.
    """
    blueprint, env = build(experiment)
    if experiment.pods:
        return [_population(experiment, blueprint, env, target)]
    if isinstance(experiment.run_driver, AnakinConfig):
        return [_anakin(experiment.run_driver, blueprint, env, target)]
    return _sebulba(experiment.run_driver, blueprint, env, target)


def _anakin(config: AnakinConfig, blueprint: Blueprint, env: Any, target: Target) -> Program:
    if isinstance(env, HostEnvironments):
        raise ConfigError(
            f"{env.spec.name} runs on the host: take `driver=podracer.SebulbaConfig()`."
        )
    mesh = make_mesh(target.devices)
    anakin.check(blueprint, env, config, mesh.size)
    agent, state = abstract_leaves(blueprint, mesh), abstract_state(blueprint, env, mesh, config)
    chunk, steps = anakin.make_chunk(env, mesh, config), config.steps_per_update
    return _on_every_device(chunk, agent, state, mesh, steps, config.rollout_length)


def _population(experiment: Experiment, blueprint: Blueprint, env: Any, target: Target) -> Program:
    pods, exchange = experiment.pods, experiment.exchange
    config: Any = experiment.run_driver
    mesh = population.population_mesh(target.devices, len(pods))
    states = population.abstract_states(blueprint, pods, env, mesh, config, exchange)
    agents = population.stack_agents(blueprint, pods)
    agents = with_shardings(agents, mesh, population.agent_specs(agents))
    chunk = population.make_chunk(env, mesh, config, exchange)
    steps = config.steps_per_update * len(pods)
    return _on_every_device(chunk, agents, states, mesh, steps, config.rollout_length)


def _on_every_device(
    chunk: Any, agent: Any, state: TrainState, mesh: Mesh, steps: int, length: int
) -> Program:
    return Program(
        "device",
        len(mesh.local_devices),
        chunk,
        (agent, state, abstract_request(mesh)),
        steps // mesh.size,
        length,
        state_parts(state),
    )


def _sebulba(
    config: SebulbaConfig, blueprint: Blueprint, env: Any, target: Target
) -> list[Program]:
    host_env = to_host_environments(env)
    config = sebulba.with_threads(config, host_env)
    split = sebulba.split_devices(target.devices, config)
    if target.kind is not None:  # a compiler without devices numbers the learners from 0
        mesh = make_mesh(target.devices[: split.mesh.size])
        split = dataclasses.replace(split, mesh=mesh)
    sebulba.check(blueprint, host_env, config, split)
    state = abstract_state(blueprint, None, split.mesh, config)
    rows, length = split.envs_per_thread, config.rollout_length
    functions = ActorFunctions(blueprint.build(), rows, length, state.learner)
    arguments = abstract_arguments(blueprint, split, functions, state)
    buffer, _ = functions.begin_shapes
    rollouts, buffer_bytes = _device_bytes(arguments[2]), _device_bytes(buffer)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), rows))
    params = jax.eval_shape(flatten_params, functions.params)
    keys = jax.eval_shape(jax.random.key_data, keys)
    inputs = (params, buffer, keys, *functions.layout.zeros(rows))
    learner = Program(
        "learner",
        len(split.learners),
        make_update(split.mesh, split.threads, config.updates_per_batch),
        arguments,
        config.steps_per_update // split.mesh.size,
        1,
        {**state_parts(state), "rollouts": rollouts},
        {"rollouts that wait": config.queue_depth * rollouts},
    )
    actor = Program(
        "actor",
        len(split.actors),
        jax.jit(functions.infer, donate_argnums=1),
        with_shardings(inputs, make_mesh(split.actors[:1]), PartitionSpec()),
        split.envs_per_thread,
        1,
        {"parameters of actors": _device_bytes(params), "buffer of an actor": buffer_bytes},
        # Each thread fills a buffer while the copy that it finished travels.
        {"other buffers of actors": (2 * config.num_threads - 1) * buffer_bytes},
        copies=config.num_threads,
    )
    return [learner, actor]


def state_parts(state: TrainState) -> dict[str, int]:
    """Return the bytes of a training state on one device, by part."""
    return {
        "parameters and optimizer": _device_bytes(state.learner.shared),
        "replay and other state of environments": _device_bytes(state.learner.local),
        "environments": _device_bytes(state.actor),
    }


def _device_bytes(tree: PyTree) -> int:
    """Return the bytes of one device's share of arrays, or of their shapes."""
    total = 0
    for x in jax.tree.leaves(tree):
        sharding = getattr(x, "sharding", None)
        shape = sharding.shard_shape(x.shape) if sharding else x.shape
        total += math.prod(shape) * x.dtype.itemsize
    return total
