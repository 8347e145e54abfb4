"""An actor: one thread that acts in one batch of host environments on one device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from podracer.drivers.sebulba.config import SebulbaConfig
from podracer.drivers.sebulba.queue import ClosableQueue
from podracer.drivers.sebulba.supervisor import Stages
from podracer.drivers.sebulba.trajectory import Batch, Opening, Programs, Slot, packed
from podracer.drivers.sebulba.validator import Inspector
from podracer.environment import HostEnvironment, ReportsFaults, Resumable, call_environment
from podracer.mesh import Device
from podracer.rollout import ActorState, Purpose, purpose_key, zero_episode_stats
from podracer.types import Carry, EnvironmentSpec, Params, PyTree, TimeStep


@dataclasses.dataclass(frozen=True)
class Parameters:
    """What acting needs, on an actor's device."""

    params: Params
    version: int  # updates done


@dataclasses.dataclass(frozen=True)
class Rollout:
    """A finished trajectory, as handles to arrays on the learners' devices."""

    shards: list[Batch]  # one for each learner device of this host
    versions: np.ndarray  # i64 [T], updates that the parameters of each step had seen
    seconds: dict[str, float]  # of each stage of the actor
    faults: dict[str, int]  # rows of bad data by kind, since the actor began
    env_state: PyTree  # where the environments stand, () if they cannot say


@dataclasses.dataclass(frozen=True)
class Place:
    """Where an actor stands in the run."""

    name: str
    device: Device
    learners: list[Device]  # of this host
    indices: np.ndarray  # u32 [b], its environments' numbers in the run
    first_rollout: int  # updates done when the run began or went on
    seed: int
    carry: Carry  # the empty memory of its environments, [b, ...], numpy
    standing: ActorState | None  # where its environments go on from, numpy; None: from a reset


class Actor:
    """`run` and `close` are the thread's body."""

    def __init__(
        self,
        env: HostEnvironment,
        spec: EnvironmentSpec,
        place: Place,
        programs: Programs,
        slot: Slot,
        run_key: jax.Array,
        config: SebulbaConfig,
    ) -> None:
        self.place, self.stages = place, Stages(*STAGES)
        self.parameters: ClosableQueue[Parameters] = ClosableQueue((config.lag or 0) + 1)
        self.rollouts: ClosableQueue[Rollout] = ClosableQueue(config.queue_depth)
        self.finished = 0  # rollouts
        self._env, self._programs, self._config = env, programs, config
        self._inspector = Inspector(spec, len(place.indices))
        begun = jax.device_put(_begun(slot, place, config.rollout_length), place.device)
        # Donated, so no leaf may be another's.
        self._slot, self._opening = jax.tree.map(jnp.copy, begun)
        self._keys = jax.device_put(_row_keys(run_key, place.indices), place.device)

    def run(self) -> None:
        """Roll out until a queue is closed, which ends it with `Closed`, or until a fault."""
        self.stages.enter("environment")
        timestep = self._asked(self._begin)
        newest: Parameters | None = None
        rollout = self.place.first_rollout
        while True:
            self.stages.enter("parameters")
            newest = self._refreshed(newest, rollout)
            versions = np.empty(self._config.rollout_length, np.int64)
            for t in range(len(versions)):
                self.stages.enter("inference")
                if t and self._config.refresh == "step":
                    newest = self.parameters.get_newest() or newest
                versions[t] = newest.version
                self._slot, action = self._programs.infer(
                    newest.params, self._slot, self._keys, *packed(timestep)
                )
                chosen = np.asarray(action)
                self.stages.enter("environment")
                timestep = self._asked(lambda chosen=chosen: self._env.step(chosen))
            self.stages.enter("transfer")
            self._opening, shards = self._programs.finish(
                self._slot, self._opening, *packed(timestep)
            )
            shards = [
                jax.device_put(shard, device)
                for shard, device in zip(shards, self.place.learners, strict=True)
            ]
            # The final timestep may lie in memory that the environments' next step writes.
            jax.block_until_ready(shards)
            self.finished += 1
            self.stages.enter("environment")
            env_state, faults = call_environment(self.place.name, self._aside)
            self.stages.enter("queue")
            self.rollouts.put(Rollout(shards, versions, self.stages.take(), faults, env_state))
            rollout += 1

    def close(self) -> None:
        """Close the environments."""
        self.stages.enter("environment")
        call_environment(self.place.name, self._env.close)

    def _begin(self) -> TimeStep:
        """The first timestep, after a reset or where the environments stood."""
        place = self.place
        start = place.first_rollout * self._config.rollout_length
        if place.standing is None:
            return self._env.reset(place.seed, place.indices, start)
        assert isinstance(self._env, Resumable), "its state came from a snapshot"
        self._env.restore(place.seed, place.indices, start, place.standing.env_state)
        return place.standing.timestep

    def _refreshed(self, newest: Parameters | None, rollout: int) -> Parameters:
        """The parameters to begin a rollout with.

        Each update puts one set into the queue. With a lag each rollout takes one out, so its
        parameters are exactly `lag` updates old, and two runs with one seed are equal.
        """
        lag = self._config.lag
        if lag is not None and self._config.refresh == "rollout":
            newest = self.parameters.get()
        else:
            newest = self.parameters.get_newest() or newest
            while newest is None or (lag is not None and newest.version < rollout - lag):
                newest = self.parameters.get()
        # Or the first inference would wait for them, and be blamed for it.
        jax.block_until_ready(newest.params)
        return newest

    def _asked(self, question: Callable[[], TimeStep]) -> TimeStep:
        """The timestep that the environments answer with, inspected."""
        return self._inspector.inspect(call_environment(self.place.name, question))

    def _aside(self) -> tuple[PyTree, dict[str, int]]:
        """Where the environments stand, and rows of bad data by kind."""
        env_state = self._env.snapshot() if isinstance(self._env, Resumable) else ()
        total = dict(self._inspector.faults)
        faults = self._env.faults if isinstance(self._env, ReportsFaults) else {}
        for kind, count in faults.items():
            total[kind] = total.get(kind, 0) + count
        return env_state, total


STAGES = ("environment", "inference", "transfer", "parameters", "queue")


def _begun(slot: Slot, place: Place, length: int) -> tuple[Slot, Opening]:
    """An empty slot and its opening, where this actor begins."""
    moment = jnp.uint32(place.first_rollout * length)
    slot = dataclasses.replace(slot, carry=place.carry, moment=moment)
    opening = Opening(slot.carry, zero_episode_stats(len(place.indices)))
    if place.standing is None:
        return slot, opening
    carry, past = place.standing.carry, place.standing.episodes
    episodes = dataclasses.replace(
        opening.episodes, running_return=past.running_return, running_length=past.running_length
    )
    return dataclasses.replace(slot, carry=carry), Opening(carry, episodes)


def _row_keys(run_key: jax.Array, indices: np.ndarray) -> jax.Array:
    """Each row's key `[b]` for acting, before it is folded with the step."""
    key = purpose_key(run_key, Purpose.ACT)
    return jax.vmap(lambda index: jax.random.fold_in(key, index))(jnp.asarray(indices))
