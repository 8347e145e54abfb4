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
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, PartitionSpec

from podracer.agent import Agent, FusedAgent, check_agent
from podracer.environment import Environment, check_environment
from podracer.mesh import (
    DATA,
    LEARNER_SPEC,
    REPLICATED,
    SHARDED,
    check_divisible,
    global_grad,
    shardings,
)
from podracer.rollout import (
    ActorState,
    Purpose,
    environment_keys,
    init_actor,
    no_episodes,
    purpose_key,
    rollout,
)
from podracer.types import (
    ConfigError,
    LearnerState,
    Metrics,
    NonFiniteError,
    PyTree,
    Trajectory,
    struct,
)

SAVE, STOP = 1, 2  # what a host may ask of all; the larger counts
FAULTS = ("observation", "reward", "loss", "gradient", "restart")


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


@struct
class TrainState:
    """Everything a run is: what a checkpoint holds and what a resumed run continues from."""

    learner: LearnerState
    actor: ActorState
    update: jax.Array  # u32 scalar, updates done
    fault: jax.Array  # u32 [2]: bits of FAULTS, and the update that met the first
    key: jax.Array  # the run's key; all others are folded from it


TRAIN_SPEC = TrainState(LEARNER_SPEC, SHARDED, REPLICATED, REPLICATED, REPLICATED)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class Progress:
    """What a driver yields for each chunk. `state` is given at boundaries only, see `anakin`."""

    updates: int  # updates done at the end of the chunk
    frames: int  # valid transitions within the chunk
    metrics: dict[str, float | None]  # means over the chunk; None where no episode ended
    compile_seconds: float = 0.0  # spent before the first chunk
    request: int = 0  # the largest of all hosts
    state: TrainState | None = None


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


def init_state(
    agent: Agent, env: Environment, mesh: Mesh, config: AnakinConfig, key: jax.Array
) -> TrainState:
    """The state before the first update, placed on the mesh."""
    placed = jax.tree.map(lambda x: x.sharding, abstract_state(agent, env, mesh, config))
    return jax.jit(partial(_init, agent, env, config), out_shardings=placed)(key)


def abstract_state(agent: Agent, env: Environment, mesh: Mesh, config: AnakinConfig) -> TrainState:
    """Shape, dtype and sharding of every leaf of a state, for restoring one."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    state = jax.eval_shape(partial(_init, agent, env, config), key)
    placed = shardings(mesh, _broadcast(TRAIN_SPEC, state))
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), state, placed
    )


def _init(agent: Agent, env: Environment, config: AnakinConfig, key: jax.Array) -> TrainState:
    indices = jnp.arange(config.num_envs, dtype=jnp.uint32)
    start = jnp.zeros(1, jnp.uint32)
    reset_keys = environment_keys(purpose_key(key, Purpose.RESET), indices, start)[0]
    return TrainState(
        learner=agent.init(purpose_key(key, Purpose.INIT), config.num_envs),
        actor=init_actor(agent, env, reset_keys),
        update=jnp.uint32(0),
        fault=jnp.zeros(2, jnp.uint32),
        key=key,
    )


def _broadcast(prefix: PyTree, tree: PyTree) -> PyTree:
    return jax.tree.map(
        lambda spec, subtree: jax.tree.map(lambda _: spec, subtree),
        prefix,
        tree,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )


def make_chunk(
    agent: Agent, env: Environment, mesh: Mesh, config: AnakinConfig
) -> Callable[[TrainState, jax.Array], tuple[TrainState, Metrics]]:
    """The compiled program: `(state, request) -> (state, metrics)`, state donated.

    `request`, i32 `[devices]`, is 0, `SAVE` or `STOP` from every host; the largest comes back in
    the metrics, which is how hosts agree to save or stop at the same update.
    """
    axis = DATA if mesh.size > 1 else None
    chunk = jax.shard_map(
        partial(_chunk, agent, env, config, axis),
        mesh=mesh,
        in_specs=(TRAIN_SPEC, SHARDED),
        out_specs=(TRAIN_SPEC, REPLICATED),
        check_vma=False,
    )
    return jax.jit(chunk, donate_argnums=0)


def _chunk(
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
    metrics = _reduced(state, series, request[0], axis)
    episodes = state.actor.episodes
    fresh = no_episodes(episodes.count.shape[0])
    episodes = dataclasses.replace(
        fresh,
        running_return=episodes.running_return,
        running_length=episodes.running_length,
    )
    actor = dataclasses.replace(state.actor, episodes=episodes)
    return dataclasses.replace(state, actor=actor), metrics


def _reduced(state: TrainState, series: Metrics, request: jax.Array, axis: str | None) -> Metrics:
    """A chunk's metrics over all shards, in two all-reduces: integers, then floats.

    Reductions that do not depend on each other may overtake each other on a CPU and mix their
    numbers (decision 0012). So the integers wait for the last update, and the floats wait for the
    number of shards.
    """
    episodes = state.actor.episodes
    integers = jnp.stack([
        jnp.int32(1),
        jnp.sum(series["frames"]),
        jnp.sum(episodes.count),
        jnp.sum(episodes.total_length),
        jnp.int32(request == SAVE),
        jnp.int32(request == STOP),
    ])  # fmt: skip
    integers = jax.lax.psum(integers, axis) if axis else integers
    shards, frames, count, length, save, stop = integers
    means = {name: jnp.mean(series[name]) / shards for name in series if name != "frames"}
    floats, unravel = ravel_pytree((means, jnp.sum(episodes.total_return)))
    means, total_return = unravel(jax.lax.psum(floats, axis) if axis else floats)
    return {
        "mean": means,
        "frames": frames,
        "episodes": count,
        "episode_return": total_return,
        "episode_length": length,
        "request": jnp.where(stop > 0, STOP, jnp.where(save > 0, SAVE, 0)),
        "fault": state.fault,
    }


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
    learn_key = purpose_key(state.key, Purpose.LEARN)
    learn_key = jax.random.fold_in(jax.random.fold_in(learn_key, state.update), shard)

    run = partial(rollout, agent, env, act_keys=act_keys, step_keys=step_keys)
    params = agent.actor_params(state.learner)
    if config.fused:
        actor, trajectory, learner, metrics = _fused(
            cast(FusedAgent, agent), run, params, state, axis
        )
    else:
        actor, trajectory = run(params, state.actor)
        learner, metrics = agent.learn(state.learner, trajectory, learn_key, axis)

    bits = _faults(trajectory, learner, metrics, axis)
    healthy = (bits == 0) & (state.fault[0] == 0)
    shared = jax.tree.map(
        lambda new, old: jnp.where(healthy, new, old), learner.shared, state.learner.shared
    )
    first = (bits != 0) & (state.fault[0] == 0)
    fault = jnp.where(first, jnp.stack([bits, state.update]), state.fault)
    metrics = {**metrics, "frames": jnp.sum(trajectory.valid(), dtype=jnp.int32)}
    new = TrainState(
        learner=LearnerState(shared, learner.local),
        actor=actor,
        update=state.update + 1,
        fault=fault,
        key=state.key,
    )
    return new, metrics


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


def _finite(tree: PyTree) -> jax.Array:
    """Whether every float of a tree is finite."""
    floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.all(jnp.stack([jnp.bool_(True), *(jnp.all(jnp.isfinite(x)) for x in floats)]))


def _faults(
    trajectory: Trajectory, learner: LearnerState, metrics: Metrics, axis: str | None
) -> jax.Array:
    """Bits of FAULTS that any shard met in this update."""
    final, steps = trajectory.final, trajectory.steps.timestep
    gradient = {name: metrics[name] for name in metrics if name == "gradient_norm"}
    losses = {name: metrics[name] for name in metrics if name != "gradient_norm"}
    good = jnp.stack([
        _finite((steps.observation, final.observation)),
        _finite((steps.reward, final.reward)),
        _finite(losses),
        _finite((gradient, learner.shared)),
        jnp.all(trajectory.after().first | trajectory.valid()),
    ])  # fmt: skip
    bad = (~good).astype(jnp.float32)
    bad = jax.lax.psum(bad, axis) if axis else bad
    return jnp.sum(jnp.where(bad > 0, jnp.asarray([1, 2, 4, 8, 16], jnp.uint32), jnp.uint32(0)))


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
    chunk = make_chunk(agent, env, mesh, config)
    several = jax.process_count() > 1
    placement = shardings(mesh, SHARDED)
    share = np.zeros(len(mesh.local_devices), np.int32)

    def ask() -> jax.Array:
        return jax.make_array_from_process_local_data(placement, share + request())

    updates = int(jax.device_get(state.update))
    began = time.perf_counter()
    compiled = chunk.lower(state, ask()).compile()  # type: ignore[attr-defined]
    compile_seconds = time.perf_counter() - began
    waiting: tuple[int, Metrics] | None = None
    agreed = 0
    while updates < num_updates:
        asked = ask()
        with jax.transfer_guard("disallow"):
            state, metrics = compiled(state, asked)
        updates += config.updates_per_chunk
        if waiting is not None:
            progress, agreed = _fetch(*waiting)
            yield dataclasses.replace(progress, compile_seconds=compile_seconds)
            compile_seconds = 0.0
        waiting = (updates, metrics)
        wanted = agreed if several else request()
        if wanted or updates >= num_updates or boundary(updates):
            progress, agreed = _fetch(*waiting)
            waiting = None
            yield dataclasses.replace(
                progress, compile_seconds=compile_seconds, request=wanted, state=state
            )
            compile_seconds = 0.0


def _fetch(updates: int, metrics: PyTree) -> tuple[Progress, int]:
    """Wait for a chunk's metrics, and put them in the terms of a run; and the hosts' request."""
    values = jax.device_get(metrics)
    bits, at = (int(x) for x in values["fault"])
    if bits:
        met = [name for i, name in enumerate(FAULTS) if bits >> i & 1]
        if "restart" in met:
            raise ConfigError(
                f"update {at + 1}: an episode ended and the environment did not restart: "
                "wrap it in podracer.auto_reset."
            )
        raise NonFiniteError(
            f"update {at + 1}: not finite: {', '.join(met)}. The update was not applied."
        )
    episodes = int(values["episodes"])
    shown: dict[str, float | None] = {
        "episodes": episodes,
        "episode_return": float(values["episode_return"]) / episodes if episodes else None,
        "episode_length": float(values["episode_length"]) / episodes if episodes else None,
        **{name: float(value) for name, value in values["mean"].items()},
    }
    return Progress(updates, int(values["frames"]), shown), int(values["request"])
