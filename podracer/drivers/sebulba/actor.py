"""Actor: one thread that acts in one batch of host environments on one device."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int64, UInt32

from podracer.devices.mesh import Device
from podracer.drivers.sebulba import trajectory
from podracer.drivers.sebulba.config import SebulbaConfig
from podracer.drivers.sebulba.intake import DeviceIntake, HostIntake
from podracer.drivers.sebulba.queue import ClosableQueue
from podracer.drivers.sebulba.supervisor import StageTimer
from podracer.drivers.state import reset_episode_totals
from podracer.environment import HostEnvironment, call_environment, features
from podracer.rollout import ActorState, Purpose, purpose_key
from podracer.types import EnvironmentSpec, Params, PyTree, TimeStep

STAGES = ("environment", "inference", "transfer", "parameters", "queue")


@dataclasses.dataclass(frozen=True)
class Parameters:
    """Actor parameters on an actor's device."""

    params: Params
    version: int  # number of updates that produced them


@dataclasses.dataclass(frozen=True)
class Rollout:
    """Finished trajectory of one actor: handles to arrays on the learners' devices."""

    actor: str  # its name
    shards: list[trajectory.TrajectoryShard]  # one for each learner device of this host
    versions: Int64[np.ndarray, " T"]  # versions of the parameters at each step
    seconds: dict[str, float]  # seconds in each stage of the actor
    faults: dict[str, int]  # rows of bad data by kind, since the actor started
    first_faults: dict[str, str]  # a line on the first of each kind
    env_state: PyTree  # snapshot of the environments, () if they cannot be saved


@dataclasses.dataclass(frozen=True)
class ActorContext:
    """Device, environments and initial state of one actor within the run."""

    name: str
    device: Device
    learners: list[Device]  # devices of this host
    indices: UInt32[np.ndarray, " b"]  # numbers of its environments within the run
    first_rollout: int  # number of updates done when the run began or was resumed
    seed: int
    start: ActorState  # [b, ...], numpy; a timestep of None begins with a reset


class Actor:
    """Body of an actor thread: `run`, then `close`."""

    def __init__(
        self,
        env: HostEnvironment,
        spec: EnvironmentSpec,
        context: ActorContext,
        programs: trajectory.ActorPrograms,
        buffer: trajectory.TrajectoryBuffer,
        run_key: jax.Array,
        config: SebulbaConfig,
        rollouts: ClosableQueue[Rollout],
        on_device: bool,
    ) -> None:
        self.context = context
        self.timer = StageTimer(*STAGES)
        self.parameters: ClosableQueue[Parameters] = ClosableQueue((config.policy_lag or 0) + 1)
        self.rollouts = rollouts
        self.num_rollouts = 0  # finished
        self._env, self._programs, self._config = env, programs, config
        # Checkpoints hold states of environments in JAX alone. Copies of others may be expensive.
        is_stored = context.start.timestep is not None
        self._is_saved = features(env).snapshot is not None and (is_stored or not on_device)
        num_envs = len(context.indices)
        on_host = HostIntake(spec, num_envs)
        self._intake = DeviceIntake(spec, num_envs, context.device) if on_device else on_host
        start, global_step = context.start, context.first_rollout * config.rollout_length
        buffer = dataclasses.replace(buffer, carry=start.carry, global_step=jnp.uint32(global_step))
        parts = (
            self._intake.begin(buffer, start.timestep),
            trajectory.RolloutStart(start.carry, reset_episode_totals(start.episodes)),
        )
        # Copied, as both are donated: no leaf may be a leaf of the other.
        self._buffer, self._start = trajectory.copy_tree(jax.device_put(parts, context.device))
        self._keys = jax.device_put(row_keys(run_key, context.indices), context.device)

    def run(self) -> None:
        """Act until a queue is closed (raises `Closed`) or a fault occurs."""
        timer, infer, finish = self.timer, self._programs.infer, self._programs.finish
        timer.start("environment")
        inputs = self._first_inputs()
        parameters: Parameters | None = None
        rollout = self.context.first_rollout
        while True:
            timer.start("parameters")
            parameters = self._next_parameters(parameters, rollout)
            versions = np.empty(self._config.rollout_length, np.int64)
            for t in range(self._config.rollout_length):
                timer.start("inference")
                self.parameters.check_open()  # a rollout may take minutes
                if t and self._config.refresh_params == "step":
                    parameters = self.parameters.get_newest() or parameters
                versions[t] = parameters.version
                self._buffer, device_action = infer(
                    parameters.params, self._buffer, self._keys, *inputs
                )
                action = self._intake.action(device_action)  # waits for the device
                timer.start("environment")
                inputs = self._call_environment(lambda action=action: self._env.step(action))
            timer.start("transfer")
            self._start, shards, *faults_on_device = finish(self._buffer, self._start, *inputs)
            placed = zip(shards, self.context.learners, strict=True)
            shards = [jax.device_put(shard, device) for shard, device in placed]
            # The final timestep may lie in memory that the environments' next step overwrites.
            jax.block_until_ready(shards)
            self._intake.count(*faults_on_device)
            self.num_rollouts += 1
            timer.start("environment")
            name = self.context.name
            env_state, faults, first_faults = call_environment(name, self._snapshot_and_faults)
            timer.start("queue")
            seconds = timer.collect()
            self.rollouts.put(
                Rollout(name, shards, versions, seconds, faults, first_faults, env_state)
            )
            rollout += 1

    def close(self) -> None:
        self.timer.start("environment")
        call_environment(self.context.name, self._env.close)

    def _first_inputs(self) -> tuple[Any, ...]:
        context, start = self.context, self.context.start
        steps = context.first_rollout * self._config.rollout_length
        seeds = (context.seed, context.indices, steps)
        if start.timestep is None:
            return self._call_environment(lambda: self._env.reset(*seeds))
        restore = features(self._env).restore  # there is one, as its state came from a snapshot
        call_environment(context.name, partial(restore, *seeds, start.env_state))
        return self._intake.resume(start.timestep)

    def _next_parameters(self, parameters: Parameters | None, rollout: int) -> Parameters:
        """Return the parameters of the next rollout; `parameters` are those of the previous one.

        Each update puts one set into the queue. With a lag each rollout takes one out, so its
        parameters are exactly `lag` updates old, and two runs with the same seed are equal.
        """
        lag = self._config.policy_lag
        if lag is not None and self._config.refresh_params == "rollout":
            parameters = self.parameters.get()
        else:
            parameters = self.parameters.get_newest() or parameters
            while parameters is None or (lag is not None and parameters.version < rollout - lag):
                parameters = self.parameters.get()
        # Otherwise the first inference would wait for them, and its stage would count that time.
        jax.block_until_ready(parameters.params)
        return parameters

    def _call_environment(self, function: Callable[[], TimeStep]) -> tuple[Any, ...]:
        return self._intake.take(call_environment(self.context.name, function))

    def _snapshot_and_faults(self) -> tuple[PyTree, dict[str, int], dict[str, str]]:
        """Return a snapshot of the environments, the rows of bad data by kind, and the first."""
        env_state, optional = (), features(self._env)
        if self._is_saved and optional.snapshot is not None:
            env_state = self._intake.snapshot(optional.snapshot())
        faults = Counter(self._intake.validator.faults)
        faults.update(optional.faults)
        first_faults = {**optional.first_faults, **self._intake.validator.first_faults}
        return env_state, dict(faults), first_faults


@jax.jit
def row_keys(run_key: jax.Array, indices: UInt32[Array, " b"]) -> jax.Array:
    """Return each row's key `[b]` for acting, before it is folded with the step."""
    key = purpose_key(run_key, Purpose.ACT)
    return jax.vmap(lambda index: jax.random.fold_in(key, index))(indices)
