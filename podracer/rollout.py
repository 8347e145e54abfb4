"""One scan: an agent and an environment to a `Trajectory`.

Also the key tree, so that both drivers give the same agent and environment the same randomness.
"""

from __future__ import annotations

import enum
from typing import Any

import jax
import jax.numpy as jnp

from podracer.agent import Agent
from podracer.environment import Environment
from podracer.types import Carry, EnvState, Params, Step, TimeStep, Trajectory, struct


class Purpose(enum.IntEnum):
    """The first branch of the key tree: run, purpose, environment (or shard), step."""

    INIT = 0
    RESET = 1
    ACT = 2
    STEP = 3
    LEARN = 4
    EVALUATE = 5


def purpose_key(run_key: jax.Array, purpose: Purpose) -> jax.Array:
    """The key of one purpose within a run."""
    return jax.random.fold_in(run_key, purpose)


def environment_keys(key: jax.Array, indices: jax.Array, steps: jax.Array) -> jax.Array:
    """Keys `[T, B]` for environments with global `indices [B]` at global `steps [T]`.

    They depend on nothing else, so the number of devices changes no random number.
    """
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(indices)
    return jax.vmap(lambda t: jax.vmap(lambda k: jax.random.fold_in(k, t))(keys))(steps)


@struct
class EpisodeStats:
    """Episode statistics of each environment, all `[B]`: running sums, and totals of what ended."""

    running_return: jax.Array  # f32, undiscounted
    running_length: jax.Array  # i32, valid transitions
    count: jax.Array  # i32, episodes ended
    total_return: jax.Array  # f32, of the episodes that ended
    total_length: jax.Array  # i32


def zero_episode_stats(num_envs: int) -> EpisodeStats:
    """Statistics before the first step. Each leaf is its own buffer, for donation."""
    return EpisodeStats(
        running_return=jnp.zeros(num_envs),
        running_length=jnp.zeros(num_envs, jnp.int32),
        count=jnp.zeros(num_envs, jnp.int32),
        total_return=jnp.zeros(num_envs),
        total_length=jnp.zeros(num_envs, jnp.int32),
    )


def update_episode_stats(episodes: EpisodeStats, before: TimeStep, after: TimeStep) -> EpisodeStats:
    """Count the transition between two timesteps `[B, ...]`.

    An episode that begins without an end before it was lost, and does not count.
    """
    reward = episodes.running_return + after.reward
    length = episodes.running_length + (~before.last).astype(jnp.int32)
    ended = (after.last & ~after.first) | ((after.discount == 0) & ~before.last)
    return EpisodeStats(
        running_return=jnp.where(ended | after.first, 0.0, reward),
        running_length=jnp.where(ended | after.first, 0, length),
        count=episodes.count + ended.astype(jnp.int32),
        total_return=episodes.total_return + jnp.where(ended, reward, 0.0),
        total_length=episodes.total_length + jnp.where(ended, length, 0),
    )


@struct
class ActorState:
    """Where acting stands, all `[B, ...]`: environments, what they showed last, the memory."""

    env_state: EnvState
    timestep: TimeStep
    carry: Carry
    episodes: EpisodeStats


def init_actor(agent: Agent, env: Environment, keys: jax.Array) -> ActorState:
    """Reset one environment for each key `[B]`."""
    env_state, timestep = jax.vmap(env.reset)(keys)
    num_envs = keys.shape[0]
    return ActorState(env_state, timestep, agent.carry(num_envs), zero_episode_stats(num_envs))


def interact(
    agent: Agent,
    env: Environment,
    params: Params,
    actor: ActorState,
    act_keys: jax.Array,
    step_keys: jax.Array,
    explore: bool = True,
) -> tuple[ActorState, Step]:
    """One action of each environment, with keys `[B]`."""
    action, extras, carry = agent.act(params, actor.carry, actor.timestep, act_keys, explore)
    env_state, timestep = jax.vmap(env.step)(step_keys, actor.env_state, action)
    episodes = update_episode_stats(actor.episodes, actor.timestep, timestep)
    step = Step(actor.timestep, action, extras)
    return ActorState(env_state, timestep, carry, episodes), step


def rollout(
    agent: Agent,
    env: Environment,
    params: Params,
    actor: ActorState,
    act_keys: jax.Array,
    step_keys: jax.Array,
) -> tuple[ActorState, Trajectory]:
    """T interactions, with keys `[T, B]`."""

    def body(actor: ActorState, keys: tuple[jax.Array, jax.Array]) -> tuple[ActorState, Any]:
        return interact(agent, env, params, actor, *keys)

    after, steps = jax.lax.scan(body, actor, (act_keys, step_keys))
    return after, Trajectory(steps, after.timestep, actor.carry, after.carry)
