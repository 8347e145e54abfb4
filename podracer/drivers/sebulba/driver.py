"""The driver: actors are started, and their trajectories are learned from as they come."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Generator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.agent import Agent, check_policy
from podracer.checks import check_agent
from podracer.drivers.common import Progress, Request, TrainState, to_progress
from podracer.drivers.sebulba.actor import STAGES, Actor, Parameters, Place, Rollout
from podracer.drivers.sebulba.config import SebulbaConfig, Split, environment_indices
from podracer.drivers.sebulba.learner import abstract_on_mesh, make_update, on_mesh
from podracer.drivers.sebulba.queue import Closed
from podracer.drivers.sebulba.supervisor import Stages, Supervisor
from podracer.drivers.sebulba.trajectory import (
    Batch,
    Opening,
    Programs,
    Slot,
    blank,
    empty_slot,
    make_programs,
)
from podracer.environment import HostEnvironments, call_environment
from podracer.mesh import SHARDED, on_one_device, shardings
from podracer.rollout import ActorState, zero_episode_stats
from podracer.types import ConfigError, EnvironmentSpec, Metrics, Params, PyTree

WATCH_SECONDS = 0.5  # how often a wait for trajectories looks for threads that hang


def check(agent: Agent, env: HostEnvironments, config: SebulbaConfig, split: Split) -> None:
    """Reject what cannot run, before any compile or thread. Raises `ConfigError`."""
    if not isinstance(env, HostEnvironments):
        raise ConfigError(
            f"{type(env).__name__} is not made of host environments: it needs `spec` and `make`."
        )
    rows = split.num_envs * split.threads // len(split.learners)
    if rows % config.updates_per_batch:
        raise ConfigError(
            f"updates_per_batch is {config.updates_per_batch}, which does not divide the {rows} "
            "environments of each learner."
        )
    batch = rows // config.updates_per_batch
    check_agent(agent, num_envs=batch, length=config.rollout_length)
    check_policy(agent, "take --arch anakin")


def sebulba(
    agent: Agent,
    env: HostEnvironments,
    split: Split,
    config: SebulbaConfig,
    state: TrainState,
    *,
    seed: int,
    num_updates: int,
    request: Callable[[], int] = lambda: 0,
    boundary: Callable[[int], bool] = lambda updates: False,
) -> Generator[Progress]:
    """Train from `state` (consumed) until `num_updates` updates are done.

    `seed` is the run's, which the environments are reset with. A state with `actor` set, for
    lock-step in environments that can say where they stand (see `envs/served.py`), goes on from
    there, exactly. Progress comes every `updates_per_chunk` updates and is a boundary, with
    `Progress.state` set, as in `anakin`; a single host that is asked to stop does so after the
    update at hand. Close the iterator to stop: when that returns, no thread, process or memory of
    it is left.

    Raises what the component met that failed first, with its name in the exception's `component`:
    `EnvironmentFault` for environments, `NonFiniteError` as Anakin does.
    """
    began = time.perf_counter()
    with contextlib.ExitStack() as made, Supervisor(config.step_seconds) as supervisor:
        team = Team(agent, env, split, config, state, seed, supervisor, made)
        learner = Learner(agent, split, config, team, state, request)
        compile_seconds = time.perf_counter() - began
        team.start()
        made.pop_all()  # from now on each thread closes its own
        state = dataclasses.replace(state, actor=())
        several = jax.process_count() > 1
        updates, asked = team.first_update, 0
        while updates < num_updates:
            rollouts = team.collect(
                give_up=lambda: learner.has_news and not several and request() == Request.STOP
            )
            if rollouts is not None:
                state = learner.update(state, rollouts)
                updates += 1
            asked = max(asked, learner.agreed) if several else request()
            if (
                asked != Request.STOP
                and updates % config.updates_per_chunk
                and updates < num_updates
            ):
                continue
            progress = dataclasses.replace(learner.report(updates), compile_seconds=compile_seconds)
            if asked or updates >= num_updates or boundary(updates):
                whole = dataclasses.replace(state, actor=team.standing())
                progress = dataclasses.replace(progress, request=asked, state=whole)
            compile_seconds, asked = 0.0, 0
            yield progress
            learner.resume()


def native_threads(config: SebulbaConfig, split: Split) -> int:
    """Threads or processes that step the environments of one actor thread."""
    return config.env_threads or max(1, (os.cpu_count() or 1) // split.threads)


class Team:
    """The actors of this host."""

    def __init__(
        self,
        agent: Agent,
        env: HostEnvironments,
        split: Split,
        config: SebulbaConfig,
        state: TrainState,
        seed: int,
        supervisor: Supervisor,
        made: contextlib.ExitStack,
    ) -> None:
        self._env, self._split, self._config = env, split, config
        self._supervisor = supervisor
        self._latest: list[Rollout] = []
        self._taken: list[Rollout] = []
        self._filled: list[Any] = []
        self.first_update = int(jax.device_get(state.update))
        # Copied, or the first update would donate them away.
        copied = jax.jit(lambda learner: jax.tree.map(jnp.copy, agent.actor_params(learner)))
        self._params = on_one_device(copied(state.learner))
        empty = partial(
            empty_slot, agent, env.spec, num_envs=split.num_envs, length=config.rollout_length
        )
        slot = jax.jit(empty)(self._params)
        carry = jax.tree.map(np.asarray, jax.jit(partial(agent.carry, config.num_envs))())
        programs = make_programs(agent, len(split.learners))
        key = jax.random.wrap_key_data(on_one_device(jax.random.key_data(state.key)))
        self.shard = _compiled(programs, self._params, slot, env.spec, split)
        host, hosts = jax.process_index(), jax.process_count()
        self._offset = config.num_envs // hosts * host
        self._exact = config.lag == 0 and bool(jax.tree.leaves(state.actor))
        standing = _own_rows(state.actor) if self._exact else None
        self._actors: list[Actor] = []
        for number in range(split.threads):
            name = f"actor {number}"
            threads = native_threads(config, split)
            try:
                batch = call_environment(name, partial(env.make, split.num_envs, threads))
            except Exception as error:
                supervisor.fail(name, error)
                raise
            made.callback(batch.close)
            indices = environment_indices(split, number, host, hosts)
            rows = indices - self._offset
            place = Place(
                name=name,
                device=split.actors[number // config.threads],
                learners=split.learners,
                indices=indices,
                first_rollout=self.first_update,
                seed=seed,
                carry=jax.tree.map(lambda x, indices=indices: x[indices], carry),
                standing=jax.tree.map(lambda x, rows=rows: x[rows], standing),
            )
            self._actors.append(Actor(batch, env.spec, place, programs, slot, key, config))

    def start(self) -> None:
        """One thread for each batch of environments."""
        for actor in self._actors:
            self._supervisor.owns(actor.parameters)
            self._supervisor.owns(actor.rollouts)
            self._supervisor.start(actor.place.name, actor.stages, actor.run, actor.close)
        # Without a lag the first rollout needs these; each update of lag, one rollout more.
        for _ in range((self._config.lag or 0) + 1):
            self.publish(self._params, self.first_update)

    def publish(self, params: Params, version: int) -> None:
        """Send parameters, on a device of this host, to every actor device."""
        by_device = {d: jax.device_put(params, d) for d in {a.place.device for a in self._actors}}
        for actor in self._actors:
            with contextlib.suppress(Closed):  # a fault, which `collect` raises
                actor.parameters.put_newest(Parameters(by_device[actor.place.device], version))

    def collect(self, give_up: Callable[[], bool]) -> list[Rollout] | None:
        """The next trajectory of every actor, in their order; None if it is time to give up.

        Raises the first fault of any thread.
        """
        self._filled.append(np.mean([len(actor.rollouts) for actor in self._actors]))
        for actor in self._actors[len(self._taken) :]:  # some, if it was given up before
            rollout = self._next(actor, give_up)
            if rollout is None:
                return None
            self._taken.append(rollout)
        taken, self._taken = self._taken, []
        self._latest = taken if self._exact else []  # a trajectory is large
        return taken

    def _next(self, actor: Actor, give_up: Callable[[], bool]) -> Rollout | None:
        while True:
            self._supervisor.check()
            with contextlib.suppress(TimeoutError, Closed):
                return actor.rollouts.get(WATCH_SECONDS)
            if give_up():
                return None

    def occupancy(self) -> float:
        """Mean share of the queues that was full when the learner came, since the last call."""
        filled, self._filled = self._filled, []
        return float(np.mean(filled)) / self._config.queue_depth

    @property
    def collected(self) -> int:
        """Steps in all trajectories that this host's actors finished."""
        steps = self._split.num_envs * self._config.rollout_length
        return steps * sum(actor.finished for actor in self._actors)

    def standing(self) -> PyTree:
        """Where acting stands after the update at hand, as Anakin keeps it, over all learners.

        () for a run whose state had nothing of acting at first: it begins new episodes when it
        goes on.
        """
        rollouts = self._latest
        if not self._exact:
            return ()
        rows = self._split.num_envs * self._split.threads

        def gather(*parts: Any) -> jax.Array:
            parts = tuple(np.asarray(part) for part in parts)
            whole = np.empty((rows, *parts[0].shape[1:]), parts[0].dtype)
            for actor, part in zip(self._actors, parts, strict=True):
                whole[actor.place.indices - self._offset] = part
            return jax.make_array_from_process_local_data(
                shardings(self._split.mesh, SHARDED), whole
            )

        def joined(rollout: Rollout) -> ActorState:
            edges = jax.tree.map(
                lambda *x: np.concatenate(x), *(shard.edges for shard in rollout.shards)
            )
            past = edges.episodes
            episodes = dataclasses.replace(
                jax.tree.map(np.asarray, zero_episode_stats(self._split.num_envs)),
                running_return=past.running_return,
                running_length=past.running_length,
            )
            return ActorState(rollout.env_state, edges.final, edges.final_carry, episodes)

        return jax.tree.map(gather, *(joined(rollout) for rollout in rollouts))


class Learner:
    """The learners of all hosts, as this one sees them; it lives in the caller's thread."""

    def __init__(
        self,
        agent: Agent,
        split: Split,
        config: SebulbaConfig,
        team: Team,
        state: TrainState,
        request: Callable[[], int],
    ) -> None:
        self._split, self._config, self._team, self._request = split, config, team, request
        self._several = jax.process_count() > 1
        self._placement = shardings(split.mesh, SHARDED)
        self._nothing = self._asked(0)
        batch = abstract_on_mesh(split.mesh, team.shard)
        update = make_update(agent, split.mesh, split.threads, config.updates_per_batch)
        self._update = update.lower(  # type: ignore[attr-defined]
            dataclasses.replace(state, actor=()), [batch] * split.threads, self._nothing
        ).compile()
        self._version = team.first_update
        self._stages = Stages("collect", "learn", "report")
        self._waiting: list[Metrics] = []  # of updates that may still run
        self._values: list[Any] = []  # fetched, since the last report
        self._travels: list[Travel] = []
        self.agreed = 0

    def _asked(self, what: int) -> jax.Array:
        share = np.full(len(self._split.learners), what, np.int32)
        return jax.make_array_from_process_local_data(self._placement, share)

    @property
    def has_news(self) -> bool:
        """Whether anything was learned since the last report."""
        return bool(self._travels)

    def update(self, state: TrainState, rollouts: list[Rollout]) -> TrainState:
        """Learn from a trajectory of every actor, and send them the new parameters."""
        self._stages.enter("learn")
        asked = self._asked(self._request()) if self._several else self._nothing
        batches = [on_mesh(self._split.mesh, rollout.shards) for rollout in rollouts]
        state, params, metrics = self._update(state, batches, asked)
        self._travels += [
            Travel(self._version - rollout.versions, rollout.seconds, rollout.faults)
            for rollout in rollouts
        ]
        self._version += 1
        self._team.publish(on_one_device(params), self._version)
        self._waiting.append(metrics)
        if len(self._waiting) > 1:
            self._fetch()
        self._stages.enter("collect")
        return state

    def _fetch(self) -> None:
        """Wait for the oldest update. Raises what it met."""
        values = jax.device_get(self._waiting.pop(0))
        self.agreed = to_progress(self._version - len(self._waiting), values).request
        self._values.append(values)

    def report(self, updates: int) -> Progress:
        """Everything since the last report; all of it is done then."""
        self._stages.enter("learn")
        while self._waiting:
            self._fetch()
        self._stages.enter("report")
        progress = to_progress(updates, _total(self._values))
        own = self._stages.take()
        metrics = {**progress.metrics, **_who_waits(self._travels, own, self._split.threads)}
        metrics["queue_occupancy"] = self._team.occupancy()
        latest = self._travels[-self._split.threads :]  # each counts since its actor began
        metrics["environment_faults"] = sum(sum(travel.faults.values()) for travel in latest)
        self._values, self._travels = [], []
        return dataclasses.replace(progress, metrics=metrics, collected=self._team.collected)

    def resume(self) -> None:
        """The report was taken; collecting begins again."""
        self._stages.enter("collect")


@dataclasses.dataclass(frozen=True)
class Travel:
    """How a trajectory came to be learned from."""

    lags: np.ndarray  # i64 [T], updates that the parameters of each step were behind
    seconds: dict[str, float]  # of each stage of its actor
    faults: dict[str, int]


def _who_waits(
    travels: list[Travel], learner: dict[str, float], threads: int
) -> dict[str, float | None]:
    """Policy lag, and how actors and learner spent their time.

    Idle is who waits for the other: an actor for parameters or for room in its queue, the learner
    for trajectories. Seconds are of one actor thread, the mean over all.
    """
    lags = np.stack([travel.lags for travel in travels])
    actor = {stage: sum(travel.seconds[stage] for travel in travels) / threads for stage in STAGES}
    waits = actor["parameters"] + actor["queue"]
    works = learner["collect"] + learner["learn"]
    return {
        "lag_mean": float(lags.mean()),
        "lag_max": int(lags.max()),
        "actor_idle": waits / max(sum(actor.values()), 1e-9),
        "learner_idle": learner["collect"] / max(works, 1e-9),
        **{f"actor_time_{stage}": seconds for stage, seconds in actor.items()},
        **{f"learner_time_{stage}": seconds for stage, seconds in learner.items()},
    }


def _total(values: list[Any]) -> Any:
    """The metrics of several updates as those of one."""
    last = values[-1]
    summed = ("frames", "episodes", "episode_return", "episode_length")
    return {
        **last,
        **{name: sum(value[name] for value in values) for name in summed},
        "mean": jax.tree.map(lambda *x: np.mean(x), *(value["mean"] for value in values)),
    }


def _own_rows(tree: PyTree) -> PyTree:
    """The rows of this host of arrays that are sharded over all learners, numpy."""

    def rows(x: jax.Array) -> np.ndarray:
        shards = sorted(x.addressable_shards, key=lambda shard: shard.index[0].start or 0)
        return np.concatenate([np.asarray(shard.data) for shard in shards])

    return jax.tree.map(rows, tree)


def _compiled(
    programs: Programs, params: Params, slot: Slot, spec: EnvironmentSpec, split: Split
) -> Batch:
    """Compile what actors run, on each of their devices; the shapes of one learner's piece."""
    shapes: Any = None
    for device in split.actors:
        put = partial(jax.device_put, device=device)
        keys = put(jax.random.split(jax.random.key(0), split.num_envs))
        copy = jax.tree.map(jnp.copy, put(slot))
        observation, signals = blank(spec, split.num_envs)
        opening = put(
            Opening(jax.tree.map(jnp.copy, slot.carry), zero_episode_stats(split.num_envs))
        )
        copy, _ = programs.infer(put(params), copy, keys, observation, signals)
        _, shards = programs.finish(copy, opening, observation, signals)
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shards[0])
    return shapes
