"""Driver: start the actors, learn from their trajectories, and report."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Generator

import jax
import numpy as np

from podracer.agent import Blueprint, check_policy
from podracer.checks import check_agent
from podracer.devices.memory import format_bytes, free_bytes
from podracer.devices.mesh import DATA
from podracer.drivers.common import Orders, Progress, Request, TrainState
from podracer.drivers.sebulba.actor_pool import make_actor_pool
from podracer.drivers.sebulba.config import DeviceSplit, SebulbaConfig
from podracer.drivers.sebulba.learner import Learner, UpdateProgram, lower_update
from podracer.drivers.sebulba.supervisor import Supervisor
from podracer.environment import HostEnvironments
from podracer.errors import ConfigError
from podracer.fields import check_ranges


def check(
    blueprint: Blueprint,
    env: HostEnvironments,
    config: SebulbaConfig,
    split: DeviceSplit,
) -> None:
    """Raise `ConfigError` if the configuration cannot run, before anything is started."""
    check_ranges(config, "driver")
    if not isinstance(env, HostEnvironments):
        raise ConfigError(
            f"{type(env).__name__} is not made of host environments: it needs `spec` and `make`."
        )
    rows_per_learner = split.num_envs * split.threads // len(split.learners)
    if rows_per_learner % config.updates_per_batch:
        raise ConfigError(
            f"updates_per_batch is {config.updates_per_batch}, which does not divide the "
            f"{rows_per_learner} environments of each learner."
        )
    batch_size = rows_per_learner // config.updates_per_batch
    check_agent(blueprint, num_envs=batch_size, num_devices=split.mesh.shape[DATA])
    check_policy(blueprint.build(), "take `driver=podracer.AnakinConfig()`")
    _check_memory(env, config, split)


def _check_memory(env: HostEnvironments, config: SebulbaConfig, split: DeviceSplit) -> None:
    """Raise `ConfigError` where the observations of two rollouts do not fit into free memory.

    An actor fills one while the learner has the other.
    """
    observations = jax.tree.leaves(env.spec.observation)
    one_step = sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in observations)
    rows = split.num_envs * split.threads // len(split.actors)
    needed, free = 2 * rows * config.rollout_length * one_step, free_bytes(split.mesh)
    if free is not None and needed > free:
        raise ConfigError(
            f"two rollouts of {rows} environments by {config.rollout_length} steps need "
            f"{format_bytes(needed)} on an actor's device, but {format_bytes(free)} are free: take "
            "fewer environments, a shorter rollout or more actors."
        )


def sebulba(
    blueprint: Blueprint,
    env: HostEnvironments,
    split: DeviceSplit,
    config: SebulbaConfig,
    state: TrainState,
    orders: Orders,
    *,
    seed: int,
    compile: Callable[[], UpdateProgram] | None = None,
) -> Generator[Progress]:
    """Train from `state` (consumed) until the updates of `orders` are done, as `anakin` does.

    `seed` is the run's seed, with which the environments are reset. From a state with `actor` set,
    lock-step training in environments that are `Resumable` continues exactly. Progress is reported
    every `updates_per_chunk` updates and may be a boundary, with `Progress.state` set, as in
    `anakin`; a request for the end of the update makes it one there (with several hosts one
    update later). Changed numbers are taken before each update. `compile` returns the
    update's program where a caller has begun to compile it; else it is compiled here. Close the
    iterator to stop: when that returns, its threads and processes have ended.

    Raises the first fault of any component, with its name in the exception's `component`:
    `EnvironmentFault` for environments, and `NonFiniteError` as `anakin` does.
    """
    start = time.perf_counter()
    with contextlib.ExitStack() as stack, Supervisor(config.env_timeout_seconds) as supervisor:
        agent = blueprint.build()
        actors = make_actor_pool(
            agent,
            env,
            split,
            config,
            state,
            seed=seed,
            supervisor=supervisor,
            stack=stack,
        )
        program = (compile or lower_update(blueprint, env.spec, split, config, state))()
        learner = Learner(split, actors, program, orders.request, env.spec, state.learner.shared)
        compile_seconds = time.perf_counter() - start
        actors.start()
        stack.pop_all()  # from now on each thread closes its own environments
        state = dataclasses.replace(state, actor=())
        multi_host = jax.process_count() > 1
        updates, current_request = actors.first_update, Request.NONE.value
        while updates < orders.last_update(updates):
            rollouts = actors.collect(
                lambda: (
                    learner.has_updates
                    and not multi_host
                    and orders.request() == Request.UPDATE_END
                )
            )
            if (changed := orders.change()) is not None:
                learner.change(changed)
            if rollouts is not None:
                state = learner.update(state, rollouts)
                updates += 1
            agreed_request = max(current_request, learner.agreed_request)
            current_request = agreed_request if multi_host else orders.request()
            is_last = updates >= orders.last_update(updates)
            is_within_chunk = not is_last and updates % config.updates_per_chunk
            if is_within_chunk and current_request < Request.UPDATE_END:
                continue
            progress = learner.progress(updates)
            if multi_host:  # where a chunk is an update, only here
                current_request = max(current_request, learner.agreed_request)
            progress = dataclasses.replace(progress, compile_seconds=compile_seconds)
            if current_request or is_last or orders.is_boundary(updates):
                full_state = dataclasses.replace(state, actor=actors.actor_state())
                progress = dataclasses.replace(progress, request=current_request, state=full_state)
            compile_seconds, current_request = 0.0, Request.NONE.value
            yield progress
            learner.resume()
