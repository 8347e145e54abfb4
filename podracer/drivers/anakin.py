"""Anakin: environment, agent and update as one compiled program on every device.

    jit(shard_map(scan(rollout, learn)))

One dispatch runs a *chunk* of many updates. State is donated from chunk to chunk, metrics are
reduced on the device and fetched one chunk late, so the device never waits for Python.
Source: Hessel et al. 2021, section 3 (arXiv 2104.06272).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from podracer.agent import Agent, FusedAgent
from podracer.checks import check_agent, check_environment
from podracer.drivers.common import (
    TRAIN_SPEC,
    Progress,
    TrainState,
    apply_if_finite,
    learn_if_finite,
    reduce_metrics,
    to_progress,
)
from podracer.environment import Environment
from podracer.mesh import (
    DATA,
    REPLICATED,
    SHARDED,
    check_divisible,
    check_program_memory,
    global_grad,
    shardings,
)
from podracer.rollout import (
    ActorState,
    Purpose,
    environment_keys,
    purpose_key,
    rollout,
    zero_episode_stats,
)
from podracer.types import ConfigError, LearnerState, Metrics, PyTree, Trajectory


@dataclasses.dataclass(frozen=True)
class AnakinConfig:
    """How Anakin runs an agent."""

    num_envs: int = 128
    """Environments in all, shared evenly by the devices."""
    rollout_length: int = 16
    """T: interactions of each environment before each update."""
    updates_per_chunk: int = 100
    """Updates in one dispatch: longer chunks cost less, shorter ones report and stop sooner."""
    fused: bool = False
    """Let the gradient go through the rollout and reuse its forward pass (the paper's minimal
    unit), for agents that can."""

    @property
    def steps_per_update(self) -> int:
        return self.num_envs * self.rollout_length


def check(agent: Agent, env: Environment, config: AnakinConfig, num_devices: int) -> None:
    """Reject what cannot run, before any compile. Raises `ConfigError`."""
    for name in ("num_envs", "rollout_length", "updates_per_chunk"):
        if getattr(config, name) < 1:
            raise ConfigError(f"{name} must be at least 1, but it is {getattr(config, name)}.")
    check_divisible("num_envs", config.num_envs, num_devices)
    check_environment(env)
    check_agent(agent, num_envs=config.num_envs // num_devices, length=config.rollout_length)
    if config.fused and not isinstance(agent, FusedAgent):
        raise ConfigError(
            f"{type(agent).__name__} has no fused form: its loss needs more than acting computes. "
            "Run it with --no-fused."
        )


def make_chunk(
    agent: Agent, env: Environment, mesh: Mesh, config: AnakinConfig
) -> Callable[[TrainState, jax.Array], tuple[TrainState, Metrics]]:
    """The compiled program: `(state, request) -> (state, metrics)`, state donated.

    `request`, i32 `[devices]`, is 0, `SAVE` or `STOP` from every host; the largest comes back in
    the metrics, which is how hosts agree to save or stop at the same update.
    """
    axis = DATA if mesh.size > 1 else None
    program = jax.shard_map(
        partial(chunk, agent, env, config, axis),
        mesh=mesh,
        in_specs=(TRAIN_SPEC, SHARDED),
        out_specs=(TRAIN_SPEC, REPLICATED),
        check_vma=False,
    )
    return jax.jit(program, donate_argnums=0)


def chunk(
    agent: Agent,
    env: Environment,
    config: AnakinConfig,
    axis: str | None,
    state: TrainState,
    request: jax.Array,
) -> tuple[TrainState, Metrics]:
    """One shard's chunk: many updates, then one reduction of their metrics."""

    def body(state: TrainState, _: None) -> tuple[TrainState, Metrics]:
        return _update(agent, env, config, axis, state)

    state, series = jax.lax.scan(body, state, length=config.updates_per_chunk)
    episodes = state.actor.episodes
    metrics = reduce_metrics(episodes, state.fault, series, request[0], axis)
    fresh = zero_episode_stats(episodes.count.shape[0])
    episodes = dataclasses.replace(
        fresh,
        running_return=episodes.running_return,
        running_length=episodes.running_length,
    )
    actor = dataclasses.replace(state.actor, episodes=episodes)
    return dataclasses.replace(state, actor=actor), metrics


def _update(
    agent: Agent, env: Environment, config: AnakinConfig, axis: str | None, state: TrainState
) -> tuple[TrainState, Metrics]:
    """One shard's rollout and update."""
    shard = jax.lax.axis_index(axis) if axis else jnp.uint32(0)
    num_envs = state.actor.timestep.reward.shape[0]
    indices = shard.astype(jnp.uint32) * num_envs + jnp.arange(num_envs, dtype=jnp.uint32)
    length = config.rollout_length
    steps = state.update * jnp.uint32(length) + jnp.arange(length, dtype=jnp.uint32)
    act_keys = environment_keys(purpose_key(state.key, Purpose.ACT), indices, steps)
    step_keys = environment_keys(purpose_key(state.key, Purpose.STEP), indices, steps)

    run = partial(rollout, agent, env, act_keys=act_keys, step_keys=step_keys)
    params = agent.actor_params(state.learner)
    if config.fused:
        actor, trajectory, learner, metrics = _fused(
            cast(FusedAgent, agent), run, params, state, axis
        )
        state, metrics = apply_if_finite(state, learner, trajectory, metrics, axis)
    else:
        actor, trajectory = run(params, state.actor)
        state, metrics = learn_if_finite(agent, state, trajectory, axis)
    return dataclasses.replace(state, actor=actor), metrics


def _fused(
    agent: FusedAgent, run: Any, params: PyTree, state: TrainState, axis: str | None
) -> tuple[ActorState, Trajectory, LearnerState, Metrics]:
    """Differentiate through the rollout: acting's forward pass is the loss's forward pass."""

    def loss(params: PyTree) -> tuple[jax.Array, Any]:
        actor, trajectory = run(params, state.actor)
        value, metrics = agent.loss(params, trajectory, reuse=True)
        return value, (actor, trajectory, metrics)

    grads, (actor, trajectory, metrics) = global_grad(loss, params, axis=axis)
    learner, more = agent.apply_gradients(state.learner, grads)
    return actor, trajectory, learner, {**metrics, **more}


def anakin(
    agent: Agent,
    env: Environment,
    mesh: Mesh,
    config: AnakinConfig,
    state: TrainState,
    *,
    num_updates: int,
    request: Callable[[], int] = lambda: 0,
    boundary: Callable[[int], bool] = lambda updates: False,
) -> Iterator[Progress]:
    """Train from `state` (consumed) until `num_updates` updates are done, a multiple of the chunk.

    A chunk is a boundary if `boundary(updates)` says so, if a host asked for one by a `request()`
    of `SAVE` or `STOP` (on several hosts seen one chunk later, by all at the same chunk), or if it
    is the last. There metrics are fetched at once and `Progress.state` is set; it is donated to the
    next chunk when the iterator moves on. At every other chunk metrics come one chunk late.
    Raises `NonFiniteError` naming the update; neither it nor any later one was applied.
    """
    program = make_chunk(agent, env, mesh, config)
    yield from run_chunks(
        lambda *args: check_program_memory(program.lower(*args).compile(), mesh),  # type: ignore[attr-defined]
        state,
        mesh,
        config,
        to_progress,
        num_updates=num_updates,
        request=request,
        boundary=boundary,
    )


def run_chunks(
    compile: Callable[[TrainState, jax.Array], Callable[..., tuple[TrainState, Metrics]]],
    state: TrainState,
    mesh: Mesh,
    config: AnakinConfig,
    report: Callable[[int, Any], Progress],
    *,
    num_updates: int,
    request: Callable[[], int],
    boundary: Callable[[int], bool],
) -> Iterator[Progress]:
    """The loop of `anakin` around any compiled `(state, request) -> (state, metrics)`."""
    several = jax.process_count() > 1
    placement = shardings(mesh, PartitionSpec(mesh.axis_names))
    share = np.zeros(len(mesh.local_devices), np.int32)

    def ask() -> jax.Array:
        return jax.make_array_from_process_local_data(placement, share + request())

    updates = int(np.max(jax.device_get(state.update)))
    began = time.perf_counter()
    compiled = compile(state, ask())
    compile_seconds = time.perf_counter() - began
    waiting: tuple[int, Metrics] | None = None
    agreed = 0
    while updates < num_updates:
        asked = ask()
        with jax.transfer_guard("disallow"):
            state, metrics = compiled(state, asked)
        updates += config.updates_per_chunk
        if waiting is not None:
            progress = report(waiting[0], jax.device_get(waiting[1]))
            agreed = progress.request
            yield dataclasses.replace(progress, compile_seconds=compile_seconds)
            compile_seconds = 0.0
        waiting = (updates, metrics)
        wanted = agreed if several else request()
        if wanted or updates >= num_updates or boundary(updates):
            progress = report(waiting[0], jax.device_get(waiting[1]))
            agreed = progress.request
            waiting = None
            yield dataclasses.replace(
                progress, compile_seconds=compile_seconds, request=wanted, state=state
            )
            compile_seconds = 0.0
