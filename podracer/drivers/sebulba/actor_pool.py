"""Actors of one host: construction, parameters for them, and rollouts from them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from podracer.devices.machine import num_cores
from podracer.devices.mesh import SHARDED, on_one_device, shardings
from podracer.drivers.sebulba.actor import Actor, ActorContext, Parameters, Rollout
from podracer.drivers.sebulba.config import DeviceSplit, SebulbaConfig, environment_indices
from podracer.drivers.sebulba.queue import ClosableQueue, Closed
from podracer.drivers.sebulba.supervisor import Stragglers, Supervisor
from podracer.drivers.sebulba.trajectory import ActorPrograms
from podracer.drivers.state import TrainState, reset_episode_totals
from podracer.environment import HostEnvironment, HostEnvironments, call_environment, features
from podracer.envs.host.device import DeviceEnvironments
from podracer.rollout import ActorState, zero_episode_stats
from podracer.types import PyTree

POLL_SECONDS = 0.2  # how often a wait for trajectories looks for threads that hang


class ActorPool:
    """Actor threads of this host, as the learner sees them; see `make_actor_pool`."""

    def __init__(
        self,
        actors: list[Actor],
        split: DeviceSplit,
        config: SebulbaConfig,
        supervisor: Supervisor,
        first_update: int,
        keep_actor_state: bool,
    ) -> None:
        self.first_update = first_update  # number of updates done when the run started
        self._actors, self._split = actors, split
        self._config, self._supervisor = config, supervisor
        self._keep_actor_state = keep_actor_state
        self._latest_rollouts: list[Rollout] = []
        self._collected_rollouts: list[Rollout] = []  # for an update that still waits for others
        self._occupancies: list[Any] = []
        self._stragglers = Stragglers()

    def start(self) -> None:
        for actor in self._actors:
            self._supervisor.register(actor.parameters)
            self._supervisor.register(actor.rollouts)
            self._supervisor.start(actor.context.name, actor.timer, actor.run, actor.close)

    def publish(self, params: list[jax.Array], version: int) -> None:
        """Send parameters, on a device of this host, to every actor."""
        devices = {actor.context.device for actor in self._actors}
        copies = {d: Parameters(jax.device_put(params, d), version) for d in devices}
        for actor in self._actors:
            with contextlib.suppress(Closed):  # after a fault, which `collect` raises
                actor.parameters.put_newest(copies[actor.context.device])

    def collect(self, give_up: Callable[[], bool]) -> list[Rollout] | None:
        """Wait for the next rollout of every actor, in order; return None if `give_up()`.

        From a shared queue it takes any actor's next rollout. Raises the first fault of any
        thread.
        """
        self._occupancies.append(np.mean([actor.rollouts.occupancy for actor in self._actors]))
        for actor in self._actors[len(self._collected_rollouts) :]:  # missing after a `give_up`
            rollout: Rollout | None = None
            while rollout is None:
                self._supervisor.check()
                with contextlib.suppress(TimeoutError, Closed):
                    rollout = actor.rollouts.get(POLL_SECONDS)
                if rollout is None and give_up():
                    return None
            self._collected_rollouts.append(rollout)
        rollouts, self._collected_rollouts = self._collected_rollouts, []
        self._latest_rollouts = rollouts if self._keep_actor_state else []  # they are large
        for rollout in rollouts:
            self._stragglers.record(rollout.actor, rollout.seconds["environment"])
        return rollouts

    def queue_occupancy(self) -> float:
        """Return the mean fill level of the queues, at calls of `collect` since the last call."""
        occupancies, self._occupancies = self._occupancies, []
        return float(np.mean(occupancies))

    @property
    def collected_steps(self) -> int:
        """Environment steps in all trajectories that this host's actors finished."""
        steps_per_rollout = self._split.envs_per_thread * self._config.rollout_length
        return steps_per_rollout * sum(actor.num_rollouts for actor in self._actors)

    def actor_state(self) -> PyTree:
        """Return the `ActorState` after the last update, sharded over all learners as Anakin's is.

        () for a run that does not keep it, which starts new episodes when it is resumed.
        """
        if not self._keep_actor_state:
            return ()
        states = list[ActorState]()  # `[b, ...]`, at the ends of the rollouts
        for rollout in self._latest_rollouts:
            ends = [
                (x.trajectory.final, x.trajectory.final_carry, x.episodes) for x in rollout.shards
            ]
            final, carry, episodes = jax.tree.map(lambda *rows: np.concatenate(rows), *ends)
            episodes = jax.tree.map(np.asarray, reset_episode_totals(episodes))
            states.append(ActorState(rollout.env_state, final, carry, episodes))
        num_rows = self._split.envs_per_thread * self._split.threads
        first_row = self._config.num_envs // jax.process_count() * jax.process_index()

        def gather(*leaves: Any) -> jax.Array:
            leaves = tuple(np.asarray(leaf) for leaf in leaves)
            all_rows = np.empty((num_rows, *leaves[0].shape[1:]), leaves[0].dtype)
            for actor, leaf in zip(self._actors, leaves, strict=True):
                all_rows[actor.context.indices - first_row] = leaf
            sharding = shardings(self._split.mesh, SHARDED)
            return jax.make_array_from_process_local_data(sharding, all_rows)

        return jax.tree.map(gather, *states)


def make_actor_pool(
    programs: ActorPrograms,
    env: HostEnvironments,
    split: DeviceSplit,
    config: SebulbaConfig,
    state: TrainState,
    *,
    supervisor: Supervisor,
    stack: contextlib.ExitStack,
) -> ActorPool:
    """Return the actors of this host, with `programs` compiled and the first parameters sent.

    `ActorPool.start` starts them. `stack` closes the environments as long as no threads own them.
    """
    host, num_rows = jax.process_index(), config.num_envs // jax.process_count()
    keep_actor_state = bool(jax.tree.leaves(state.actor))  # in lock-step

    def rows_of_host(x: jax.Array) -> np.ndarray:
        shards = sorted(x.addressable_shards, key=lambda shard: shard.index[0].start or 0)
        return np.concatenate([np.asarray(shard.data) for shard in shards])

    if keep_actor_state:
        start = jax.tree.map(rows_of_host, state.actor)
    else:
        start = ActorState((), None, programs.carry(), zero_episode_stats(config.num_envs))  # type: ignore[arg-type]
        rows = slice(num_rows * host, num_rows * (host + 1))
        start = jax.tree.map(lambda x: np.asarray(x)[rows], start)
    key_data = on_one_device(jax.random.key_data(state.key))
    run_key, last_word = jax.random.wrap_key_data(key_data), jax.device_get(key_data)[-1]
    seed = run_key if isinstance(env, DeviceEnvironments) else int(last_word)
    first_update, actors = int(jax.device_get(state.update)), list[Actor]()
    for thread, queue in enumerate(rollout_queues(config, split.threads, state)):
        indices = environment_indices(split, thread, host)
        own_rows = indices - num_rows * host
        context = ActorContext(
            name=f"actor {thread}",
            device=split.actors[thread // config.num_threads],
            learners=split.learners,
            indices=indices,
            first_update=first_update,
            seed=seed,
            start=jax.tree.map(lambda x, rows=own_rows: x[rows], start),
        )
        batch = make_environments(env, split, config, context.name, supervisor)
        stack.callback(batch.close)
        parts = (programs, run_key, config, queue, features(env).on_device)
        actors.append(Actor(batch, env.spec, context, *parts))
    params = on_one_device(programs.copy_params(state.learner))
    for actor in {actor.context.device: actor for actor in actors}.values():
        actor.compile(params)
    pool = ActorPool(actors, split, config, supervisor, first_update, keep_actor_state)
    # One set for the first rollout, and one more for each update that it may lag behind.
    for _ in range((config.policy_lag or 0) + 1):
        pool.publish(params, first_update)
    return pool


def rollout_queues(
    config: SebulbaConfig, num_threads: int, state: TrainState
) -> list[ClosableQueue[Rollout]]:
    """Return the queue of each actor's rollouts.

    Where the policy's lag has no bound they share one, so that a slow actor costs no more than its
    share; but not where the learner keeps something for each environment, whose rows must stay.
    """
    if config.policy_lag is None and not jax.tree.leaves(state.learner.local):
        return [ClosableQueue(config.queue_depth * num_threads)] * num_threads
    return [ClosableQueue(config.queue_depth) for _ in range(num_threads)]


def make_environments(
    env: HostEnvironments,
    split: DeviceSplit,
    config: SebulbaConfig,
    name: str,
    supervisor: Supervisor,
) -> HostEnvironment:
    """Make the environments of one actor. A failure also ends the run, as a fault of `name`."""
    if (with_deadline := features(env).with_deadline) is not None:
        env = with_deadline(config.env_timeout_seconds)
    make = partial(env.make, split.envs_per_thread, native_threads(config, split))
    try:
        return call_environment(name, make)
    except Exception as error:
        supervisor.fail(name, error)
        raise


def native_threads(config: SebulbaConfig, split: DeviceSplit) -> int:
    """Return the number of threads or processes that step the environments of one actor."""
    # Beside an accelerator actors have two for each core, as they idle while their actor infers.
    times = 1 if split.actors[0].platform == "cpu" else min(2, split.threads)
    return config.env_threads or max(1, times * num_cores() // split.threads)
