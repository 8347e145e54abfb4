"""Rollouts of an agent in a device environment, as one `scan`.

Also the tree of random keys, which gives an agent and an environment the same randomness under
every driver, and statistics of episodes.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32, Key, UInt32

from podracer.agent import Agent
from podracer.devices.fused import scan
from podracer.environment import Environment
from podracer.fields import struct, unchecked
from podracer.ops.sums import compensated_sum
from podracer.types import Carry, EnvState, Params, PyTree, Step, TimeStep, Trajectory


class Purpose(enum.IntEnum):
    """Purpose of a key: the first branch of the tree run, purpose, environment or shard, step."""

    INIT = 0
    RESET = 1
    ACT = 2
    STEP = 3
    LEARN = 4
    EVALUATE = 5
    EXPLORE = 6
    SELECT = 7
    START_ROUND = 8


def purpose_key(run_key: Key[Array, ""], purpose: Purpose) -> Key[Array, ""]:
    """Return the key of one purpose within a run."""
    return jax.random.fold_in(run_key, purpose)


def environment_keys(
    key: Key[Array, ""], indices: UInt32[Array, "B"], steps: UInt32[Array, "T"]
) -> Key[Array, "T B"]:
    """Return keys for environments with global `indices` at global `steps`.

    They depend on nothing else, so the number of devices changes no random number.
    """
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(indices)
    return jax.vmap(lambda t: jax.vmap(lambda k: jax.random.fold_in(k, t))(keys))(steps)


@unchecked
@struct
class EpisodeStats:
    """Episode statistics of each environment; returns are undiscounted sums that stay exact."""

    running_return: Float32[Array, "B"]
    """Return of the current episode so far."""
    running_error: Float32[Array, "B"]
    """Rounding error of `running_return`."""
    running_length: Int32[Array, "B"]
    """Valid transitions of the current episode so far."""
    count: Int32[Array, "B"]
    """Number of episodes that ended."""
    total_return: Float32[Array, "B"]
    """Sum of the returns of the episodes that ended."""
    total_error: Float32[Array, "B"]
    """Rounding error of `total_return`."""
    total_length: Int32[Array, "B"]
    """Sum of the lengths of the episodes that ended."""


def zero_episode_stats(num_envs: int) -> EpisodeStats:
    """Return statistics before the first step; each leaf is its own buffer, for donation."""
    return EpisodeStats(
        running_return=jnp.zeros(num_envs),
        running_error=jnp.zeros(num_envs),
        running_length=jnp.zeros(num_envs, jnp.int32),
        count=jnp.zeros(num_envs, jnp.int32),
        total_return=jnp.zeros(num_envs),
        total_error=jnp.zeros(num_envs),
        total_length=jnp.zeros(num_envs, jnp.int32),
    )


def update_episode_stats(
    episodes: EpisodeStats, timestep: TimeStep, next_timestep: TimeStep
) -> EpisodeStats:
    """Return the statistics after the transition between two timesteps `[B, ...]`.

    An episode that was lost to a fault (`TimeStep.begins_after_loss`) does not count.
    """
    running = compensated_sum(episodes.running_return, episodes.running_error, next_timestep.reward)
    length = episodes.running_length + (~timestep.last).astype(jnp.int32)
    ended = next_timestep.ends_episode(timestep.last)
    begins = ended | next_timestep.first
    ended_return = jnp.where(ended, running[0], 0.0)
    total = compensated_sum(episodes.total_return, episodes.total_error, ended_return)
    return EpisodeStats(
        running_return=jnp.where(begins, 0.0, running[0]),
        running_error=jnp.where(begins, 0.0, running[1]),
        running_length=jnp.where(begins, 0, length),
        count=episodes.count + ended.astype(jnp.int32),
        total_return=total[0],
        total_error=total[1],
        total_length=episodes.total_length + jnp.where(ended, length, 0),
    )


def count_episodes(episodes: EpisodeStats, trajectory: Trajectory) -> EpisodeStats:
    """Return the statistics after all transitions of a trajectory."""

    def count(episodes: EpisodeStats, pair: tuple[TimeStep, TimeStep]) -> tuple[EpisodeStats, None]:
        return update_episode_stats(episodes, *pair), None

    timesteps = dataclasses.replace(trajectory.steps.timestep, observation=())
    pairs = jax.lax.stop_gradient((timesteps, trajectory.next_timesteps()))
    return scan(count, episodes, pairs)[0]


@unchecked
@struct
class ActorState:
    """State of acting in B environments; leaves are `[B, ...]`."""

    env_state: EnvState
    timestep: TimeStep
    """The newest timestep, on which the next action is chosen."""
    carry: Carry
    """The agent's recurrent state."""
    episodes: EpisodeStats


def init_actor(agent: Agent, env: Environment, keys: Key[Array, "B"]) -> ActorState:
    """Return the state after a reset of one environment for each key."""
    env_state, timestep = jax.vmap(env.reset)(keys)
    num_envs = keys.shape[0]
    return ActorState(env_state, timestep, agent.carry(num_envs), zero_episode_stats(num_envs))


def interact(
    agent: Agent,
    env: Environment,
    params: Params,
    actor: ActorState,
    act_keys: Key[Array, "B"],
    step_keys: Key[Array, "B"],
    explore: bool = True,
) -> tuple[ActorState, Step]:
    """Act once in each environment, without statistics of episodes."""
    with jax.named_scope("inference"):
        action, extras, carry = agent.act(params, actor.carry, actor.timestep, act_keys, explore)
    step = Step(actor.timestep, action, extras)
    with jax.named_scope("environment"):
        env_state, timestep = jax.vmap(env.step)(step_keys, actor.env_state, action)
    return ActorState(env_state, timestep, carry, actor.episodes), step


def step_environments(
    env: Environment, actor: ActorState, action: PyTree, carry: Carry, keys: Key[Array, "B"]
) -> ActorState:
    """Return the state after one action in each environment; `carry` is the agent's new one."""
    env_state, timestep = jax.vmap(env.step)(keys, actor.env_state, action)
    episodes = update_episode_stats(actor.episodes, actor.timestep, timestep)
    return ActorState(env_state, timestep, carry, episodes)


def rollout(
    agent: Agent,
    env: Environment,
    params: Params,
    actor: ActorState,
    act_keys: Key[Array, "T B"],
    step_keys: Key[Array, "T B"],
) -> tuple[ActorState, Trajectory]:
    """Act T times in each environment."""

    def body(actor: ActorState, keys: tuple[jax.Array, jax.Array]) -> tuple[ActorState, Any]:
        return interact(agent, env, params, actor, *keys)

    with jax.named_scope("rollout"):
        final, steps = scan(body, actor, (act_keys, step_keys))
    trajectory = Trajectory(steps, final.timestep, actor.carry, final.carry)
    # Not in the loop, where XLA computes the environment's step again for each of the statistics.
    episodes = count_episodes(actor.episodes, trajectory)
    return dataclasses.replace(final, episodes=episodes), trajectory
