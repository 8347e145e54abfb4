"""Actor: one thread that acts in one batch of host environments on one device."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jaxtyping import Array, Int64, UInt32

from podracer.devices.mesh import Device, noted_program
from podracer.drivers.sebulba.config import SebulbaConfig
from podracer.drivers.sebulba.intake import DeviceIntake, HostIntake
from podracer.drivers.sebulba.layout import Packed
from podracer.drivers.sebulba.queue import ClosableQueue
from podracer.drivers.sebulba.supervisor import StageTimer
from podracer.drivers.sebulba.trajectory import ActorPrograms, TrajectoryShard, copy_tree
from podracer.environment import HostEnvironment, call_environment, features
from podracer.rollout import ActorState, Purpose, purpose_key
from podracer.types import EnvironmentSpec, PyTree, TimeStep

T = TypeVar("T")
STAGES = ("environment", "inference", "transfer", "device", "parameters", "queue")


@dataclasses.dataclass(frozen=True)
class Parameters:
    """Actor parameters on an actor's device."""

    params: list[jax.Array]  # see `trajectory.flatten_params`
    version: int  # number of updates that produced them


@dataclasses.dataclass(frozen=True)
class Rollout:
    """Finished trajectory of one actor: handles to arrays on the learners' devices."""

    actor: str  # its name
    shards: list[TrajectoryShard]  # one for each learner device of this host
    versions: Int64[np.ndarray, " T"]  # versions of the parameters at each step
    seconds: dict[str, float]  # seconds in each stage of the actor
    faults: dict[str, int]  # rows of bad data by kind, since the actor started
    first_faults: dict[str, str]  # a line on the first of each kind
    env_state: PyTree  # snapshot of the environments, () where no checkpoint holds it


@dataclasses.dataclass(frozen=True)
class ActorContext:
    """Device, environments and initial state of one actor within the run."""

    name: str
    device: Device
    learners: list[Device]  # devices of this host
    indices: UInt32[np.ndarray, " b"]  # numbers of its environments within the run
    first_update: int  # number of updates done when the run began or was resumed
    seed: Any  # for environments in JAX the run's key, else the last word of it
    start: ActorState  # [b, ...], numpy; a timestep of None begins with a reset


class Actor:
    """Body of an actor thread: `run`, then `close`."""

    def __init__(
        self,
        env: HostEnvironment,
        spec: EnvironmentSpec,
        context: ActorContext,
        programs: ActorPrograms,
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
        step = context.first_update * config.rollout_length
        timestep = context.start.timestep
        # Checkpoints hold states of environments in JAX alone. Copies of others may be expensive.
        self._is_saved = timestep is not None
        masked = np.zeros(len(context.indices), bool)
        self._masked = masked if timestep is None else np.asarray(timestep.first & timestep.last)
        intake = DeviceIntake if on_device else HostIntake
        self._intake = intake(spec, self._masked, step, context.device)
        start = dataclasses.replace(context.start, env_state=())
        parts = programs.begin(start, np.uint32(step))
        # Copied, as both are donated: no leaf may be a leaf of the other.
        self._buffer, self._start = copy_tree(jax.device_put(parts, context.device))
        self._keys = jax.device_put(row_keys(run_key, context.indices), context.device)

    def compile(self, params: list[jax.Array]) -> None:
        """Compile the programs for this actor's device, by one call of each."""
        params, inputs = jax.device_put(params, self.context.device), self._intake.zeros()
        buffer, start = copy_tree((self._buffer, self._start))
        buffer, _ = self._programs.infer(params, buffer, self._keys, *inputs)
        self._programs.finish(buffer, start, *inputs)

    def run(self) -> None:
        """Act until a queue is closed (raises `Closed`) or a fault occurs."""
        timer, infer, finish = self.timer, self._programs.infer, self._programs.finish
        name, length = self.context.name, self._config.rollout_length
        timer.start("environment")
        rollout = self.context.first_update
        inputs = self._take(self._first_timestep)
        parameters: Parameters | None = None
        while True:
            timer.start("parameters")
            parameters = self._next_parameters(parameters, rollout)
            versions = np.empty(length, np.int64)
            for t in range(length):
                timer.start("inference")
                self.parameters.check_open()  # a rollout may take minutes
                if t and self._config.refresh_params == "step":
                    parameters = self.parameters.get_newest() or parameters
                versions[t] = parameters.version
                state = parameters.params, self._buffer, self._keys
                self._buffer, device_action = self._call(infer, *state, *inputs)
                action = self._intake.action(device_action)  # waits for the device
                timer.start("environment")
                inputs = self._take(self._env.step, action)
            timer.start("transfer")
            self._start, shards = self._call(finish, self._buffer, self._start, *inputs)
            placed = zip(shards, self.context.learners, strict=True)
            shards = [jax.device_put(shard, device) for shard, device in placed]
            # The final timestep may lie in memory that the environments' next step overwrites.
            jax.block_until_ready(shards)
            self._intake.count_faults()
            self.num_rollouts += 1
            timer.start("environment")
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

    def _first_timestep(self) -> TimeStep:
        context, start = self.context, self.context.start
        steps = context.first_update * self._config.rollout_length
        seeds = (context.seed, context.indices, steps)
        if start.timestep is None:
            return self._env.reset(*seeds)
        features(self._env).restore(*seeds, start.env_state)  # its state came from a snapshot
        timestep, shown = start.timestep, ~self._masked  # `take` masks the others again
        return dataclasses.replace(
            timestep, first=timestep.first & shown, last=timestep.last & shown
        )

    def _take(self, function: Callable[..., TimeStep], *args: Any) -> Packed:
        """Call the environments; return their timestep as the inputs of the programs."""
        return self._intake.take(call_environment(self.context.name, function, *args))

    def _call(self, program: Callable[..., T], *args: Any) -> T:
        """Call a program; wait, in a stage of its own, for what the learner gave the device before.

        The program itself may still run.
        """
        earlier_output = noted_program(self.context.device)
        outputs = program(*args)
        if earlier_output is not None:
            stage, _ = self.timer.current
            self.timer.start("device")
            earlier_output.block_until_ready()
            self.timer.start(stage)
        return outputs

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

    def _snapshot_and_faults(self) -> tuple[PyTree, dict[str, int], dict[str, str]]:
        """Return a snapshot of the environments, the rows of bad data by kind, and the first."""
        env_state, optional = (), features(self._env)
        if self._is_saved and optional.snapshot is not None:
            env_state = optional.snapshot()
        faults = self._intake.validator.faults + Counter(optional.faults)
        first_faults = {**optional.first_faults, **self._intake.validator.first_faults}
        return env_state, dict(faults), first_faults


@jax.jit
def row_keys(run_key: jax.Array, indices: UInt32[Array, " b"]) -> UInt32[Array, "b ..."]:
    """Return the bits of each row's key for acting, before it is folded with the step."""
    key = purpose_key(run_key, Purpose.ACT)
    keys = jax.vmap(lambda index: jax.random.fold_in(key, index))(indices)
    return jax.random.key_data(keys)
