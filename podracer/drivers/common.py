"""What both drivers share: the state of a run, what they yield, and the guard around an update."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh, PartitionSpec

from podracer.agent import Agent
from podracer.environment import Environment
from podracer.mesh import LEARNER_SPEC, REPLICATED, SHARDED, shardings
from podracer.rollout import EpisodeStats, Purpose, environment_keys, init_actor, purpose_key
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


@struct
class TrainState:
    """Everything a run is: what a checkpoint holds and what a resumed run continues from."""

    learner: LearnerState
    actor: PyTree  # `rollout.ActorState`, or () where environments cannot be saved
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
    pods: dict[str, np.ndarray] | None = None  # of a population: metrics of each pod [P]
    collected: int | None = None  # steps that actors finished since the driver began


class HasNumEnvs(Protocol):
    """A driver's configuration, as far as a state depends on it."""

    @property
    def num_envs(self) -> int: ...


def init_state(
    agent: Agent, env: Environment | None, mesh: Mesh, config: HasNumEnvs, key: jax.Array
) -> TrainState:
    """The state before the first update, on the mesh; without an environment, nothing of acting."""
    where = jax.tree.map(lambda x: x.sharding, abstract_state(agent, env, mesh, config))
    return jax.jit(partial(make_initial_state, agent, env, config), out_shardings=where)(key)


def abstract_state(
    agent: Agent, env: Environment | None, mesh: Mesh, config: HasNumEnvs
) -> TrainState:
    """Shape, dtype and sharding of every leaf of a state, for restoring one."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    return with_shardings(
        jax.eval_shape(partial(make_initial_state, agent, env, config), key), mesh, TRAIN_SPEC
    )


def with_shardings(state: PyTree, mesh: Mesh, specs: PyTree) -> PyTree:
    """Shapes with the shardings that a prefix of partition specs gives them on this mesh."""
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        state,
        shardings(mesh, _broadcast(specs, state)),
    )


def make_initial_state(
    agent: Agent, env: Environment | None, config: HasNumEnvs, key: jax.Array
) -> TrainState:
    """The state before the first update, for tracing; `init_state` also places it."""
    indices = jnp.arange(config.num_envs, dtype=jnp.uint32)
    start = jnp.zeros(1, jnp.uint32)
    reset_keys = environment_keys(purpose_key(key, Purpose.RESET), indices, start)[0]
    return TrainState(
        learner=agent.init(purpose_key(key, Purpose.INIT), config.num_envs),
        actor=() if env is None else init_actor(agent, env, reset_keys),
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


def learn_if_finite(
    agent: Agent,
    state: TrainState,
    trajectory: Trajectory,
    axis: str | None,
    part: jax.Array | None = None,
) -> tuple[TrainState, Metrics]:
    """One shard's update; it leaves the shared state as it was from the first fault on.

    `part` tells the updates apart that are made in turn from one trajectory.
    """
    learn_key = purpose_key(state.key, Purpose.LEARN)
    shard = jax.lax.axis_index(axis) if axis else jnp.uint32(0)
    learn_key = jax.random.fold_in(jax.random.fold_in(learn_key, state.update), shard)
    learn_key = learn_key if part is None else jax.random.fold_in(learn_key, part)
    learner, metrics = agent.learn(state.learner, trajectory, learn_key, axis)
    return apply_if_finite(state, learner, trajectory, metrics, axis)


def apply_if_finite(
    state: TrainState,
    learner: LearnerState,
    trajectory: Trajectory,
    metrics: Metrics,
    axis: str | None,
) -> tuple[TrainState, Metrics]:
    """Take an update over, unless it or one before met something that is not finite."""
    bits = _faults(trajectory, learner, metrics, axis)
    healthy = (bits == 0) & (state.fault[0] == 0)
    shared = jax.tree.map(
        lambda new, old: jnp.where(healthy, new, old), learner.shared, state.learner.shared
    )
    first = (bits != 0) & (state.fault[0] == 0)
    new = dataclasses.replace(
        state,
        learner=LearnerState(shared, learner.local),
        update=state.update + 1,
        fault=jnp.where(first, jnp.stack([bits, state.update]), state.fault),
    )
    return new, {**metrics, "frames": jnp.sum(trajectory.valid(), dtype=jnp.int32)}


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
        jnp.all(trajectory.next_timesteps().first | trajectory.valid()),
    ])  # fmt: skip
    bad = (~good).astype(jnp.float32)
    bad = jax.lax.psum(bad, axis) if axis else bad
    return jnp.sum(jnp.where(bad > 0, jnp.asarray([1, 2, 4, 8, 16], jnp.uint32), jnp.uint32(0)))


def reduce_metrics(
    episodes: EpisodeStats, fault: jax.Array, series: Metrics, request: jax.Array, axis: str | None
) -> Metrics:
    """Metrics of some updates `[updates]` over all shards, in two all-reduces: integers, floats.

    Reductions that do not depend on each other may overtake each other on a CPU and mix their
    numbers (decision 0012). So the integers wait for the last update's faults, and the floats wait
    for the number of shards.
    """
    integers = jnp.stack([
        jnp.int32(fault[1] < jnp.uint32(2**32 - 1)),  # 1, once the faults are known
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
        "fault": fault,
    }


def to_progress(updates: int, values: Any) -> Progress:
    """Fetched metrics in the terms of a run. Raises what the updates met, see `FAULTS`."""
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
    return Progress(updates, int(values["frames"]), shown, request=int(values["request"]))
