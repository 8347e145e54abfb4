"""What agents with a replay share: a rollout goes in, then some updates from what is drawn."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from podracer.agents.common import actor_critic
from podracer.mesh import num_shards
from podracer.networks import Network
from podracer.ops.returns import n_step_returns
from podracer.replay import Buffer, Replay, Sample
from podracer.types import (
    Carry,
    ConfigError,
    EnvironmentSpec,
    LearnerState,
    Metrics,
    PyTree,
    TimeStep,
    Trajectory,
    struct,
)

# From shared state, sample and key: new shared state, metrics, priorities [N].
Update = Callable[[PyTree, Sample, jax.Array], tuple[PyTree, Metrics, jax.Array]]


def buffer(replay: Replay, spec: EnvironmentSpec | None, n_step: int) -> Buffer:
    """For samples of `n_step` transitions."""
    return Buffer(replay, actor_critic.require_spec(spec), n_step + 1)


def without_memory(network: Network) -> Network:
    """The network, or `ConfigError` where it has a memory, which single transitions lack."""
    if jax.tree.leaves(network.carry(1)):
        raise ConfigError("the agent's network has a memory: of agents with a replay R2D2 has one.")
    return network


def learn(
    buffer: Buffer,
    update: Update,
    state: LearnerState,
    trajectory: Trajectory,
    key: jax.Array,
    axis: str | None,
    carry: Carry = (),
) -> tuple[LearnerState, Metrics]:
    """Keep a rollout, then update as often as the replay's settings say.

    Nothing is learned, and metrics are 0, until `warmup` timesteps were kept.
    """
    settings = buffer.config
    shards = num_shards(axis)
    if settings.batch_size % shards:
        raise ConfigError(
            f"replay.batch_size is {settings.batch_size}, which {shards} devices cannot share "
            "evenly."
        )
    memory = buffer.add(state.local, trajectory.steps, carry)

    def step(now: tuple[PyTree, Any], key: jax.Array) -> tuple[tuple[PyTree, Any], Metrics]:
        shared, chances = now
        sample_key, update_key = jax.random.split(key)
        known = dataclasses.replace(memory, priorities=chances)
        sample = buffer.sample(known, sample_key, settings.batch_size // shards)
        shared, metrics, priorities = update(shared, sample, update_key)
        return (shared, buffer.update_priorities(chances, sample, priorities)), metrics

    def updates(now: tuple[PyTree, Any]) -> tuple[tuple[PyTree, Any], Metrics]:
        now, metrics = jax.lax.scan(step, now, jax.random.split(key, settings.updates_per_rollout))
        return now, jax.tree.map(jnp.mean, metrics)

    now = (state.shared, memory.priorities)
    shapes = jax.eval_shape(updates, now)[1]
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    kept = memory.num_added[0] * memory.num_added.shape[0] * shards
    ready = (kept >= settings.warmup) & (buffer.size(memory) > 0)
    (shared, chances), metrics = jax.lax.cond(ready, updates, lambda now: (now, zeros), now)
    return LearnerState(shared, dataclasses.replace(memory, priorities=chances)), metrics


@struct
class Transition:
    """From one timestep to a later one of the same episode, both `[N, ...]`."""

    first: TimeStep
    action: jax.Array  # taken at `first`
    returns: jax.Array  # f32 [N], discounted, of what came until `then`
    discounts: jax.Array  # f32 [N], of what comes after `then`
    then: TimeStep
    mask: jax.Array  # f32 [N], 0 where the episode was cut at `first`


def transition(sample: Sample, discount: float | jax.Array) -> Transition:
    """From the first timestep of each sample to its last, or to where a time-out cut it."""
    trajectory = sample.trajectory
    after, valid = trajectory.next_timesteps(), trajectory.valid()
    returns, discounts, k = n_step_returns(after.reward, discount * after.discount, valid)
    columns = jnp.arange(k.shape[0])
    return Transition(
        first=jax.tree.map(lambda x: x[0], trajectory.steps.timestep),
        action=trajectory.steps.action[0],
        returns=returns,
        discounts=discounts,
        then=jax.tree.map(lambda x: x[k, columns], trajectory.timesteps()),
        mask=valid[0].astype(jnp.float32),
    )


def explored(shared: PyTree, trajectory: Trajectory, frames: int, axis: str | None) -> PyTree:
    """With the share of `frames` that was seen after this rollout, for what exploration depends
    on: `shared["explored"]`, from 0 to 1."""
    if not frames:
        return shared
    shards = num_shards(axis)
    share = trajectory.steps.timestep.reward.size * shards / frames
    return {**shared, "explored": jnp.minimum(1.0, shared["explored"] + share)}
