"""Trajectories under construction: the two programs that run on an actor's device.

`infer` does inference, sampling and the storage of the step in one program: each step sends a
timestep to the device, gets the actions back, and nothing else. The trajectory stays on the device,
in a buffer that is donated from step to step. `finish` closes it and splits it over the learners.

Each array that a program takes costs 1 to 2 microseconds a call on a CPU (decision 0014). So a
timestep is sent as its observation and one array of all its scalars, and the state that `infer`
needs (`TrajectoryBuffer`) is separate from the rest (`RolloutStart`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, PyTree, Shaped, UInt32

from podracer.agent import Agent
from podracer.drivers.state import reset_episode_totals
from podracer.fields import struct
from podracer.rollout import EpisodeStats, count_episodes
from podracer.types import Carry, EnvironmentSpec, LearnerState, Params, Step, TimeStep, Trajectory


@struct
class TrajectoryBuffer:
    """Steps of an unfinished trajectory and the state of acting, on the actor's device."""

    observation: PyTree[Shaped[Array, "T b ..."]]
    scalars: Float32[Array, "T 4 b"]  # the scalars of each timestep, see `pack_timestep`
    action: PyTree[Shaped[Array, "T b ..."]]
    extras: PyTree[Shaped[Array, "T b ..."]]
    carry: PyTree[Shaped[Array, "b ..."]]  # the agent's recurrent state at the next step
    global_step: UInt32[Array, ""]  # number of the next step within the run

    @property
    def steps(self) -> Step:
        """Steps `[T, b, ...]` of the trajectory, once it is complete."""
        timesteps = unpack_timestep(self.observation, self.scalars)
        return Step(timesteps, self.action, self.extras)


@struct
class RolloutStart:
    """Recurrent state and episode statistics `[b, ...]` at the first step of a trajectory."""

    carry: Carry
    episodes: EpisodeStats  # running sums; the totals are zero


@struct
class TrajectoryShard:
    """One learner's rows of an actor's trajectory."""

    trajectory: Trajectory  # steps [T, b, ...], the rest [b, ...]
    episodes: EpisodeStats  # [b], of the episodes that ended within the trajectory


# The axis of the rows, the environments of one actor, in each part of a shard.
ROW_AXES: Any = TrajectoryShard(
    Trajectory(steps=1, final=0, carry=0, final_carry=0),  # type: ignore[arg-type]
    episodes=0,  # type: ignore[arg-type]
)


def map_over_rows(function: Callable[..., Any], *shards: TrajectoryShard) -> TrajectoryShard:
    """Return the shard of `function(axis, *leaves)`, where `axis` is the leaves' axis of rows."""

    def map_part(axis: int, *parts: PyTree) -> PyTree:
        return jax.tree.map(partial(function, axis), *parts)

    return jax.tree.map(map_part, ROW_AXES, *shards)


def empty_buffer(
    agent: Agent, spec: EnvironmentSpec, params: Params, num_envs: int, length: int
) -> TrajectoryBuffer:
    """Return a buffer of zeros for `num_envs` rows and `length` steps, with the initial carry."""
    observation, scalars = zero_timestep(spec, num_envs)
    carry = agent.carry(num_envs)

    def act(params: Params) -> tuple[jax.Array, PyTree]:
        keys = jax.random.split(jax.random.key(0), num_envs)
        timestep = unpack_timestep(observation, scalars)
        action, extras, _ = agent.act(params, carry, timestep, keys, True)
        return action, extras

    # Shapes alone: a program that also acts takes as long to compile as one that acts.
    action, extras = jax.eval_shape(act, params)
    columns = jax.tree.map(
        lambda x: jnp.zeros((length, *x.shape), x.dtype), (observation, scalars, action, extras)
    )
    return TrajectoryBuffer(*columns, carry=carry, global_step=jnp.uint32(0))


def zero_timestep(spec: EnvironmentSpec, num_envs: int) -> tuple[PyTree, np.ndarray]:
    """Return a packed timestep of zeros, to compile with."""
    observation = jax.tree.map(lambda x: np.zeros((num_envs, *x.shape), x.dtype), spec.observation)
    return observation, np.zeros((4, num_envs), np.float32)


def pack_timestep(timestep: TimeStep) -> tuple[PyTree, Float32[np.ndarray, "4 b"]]:
    """Return the observation of a host timestep, and one array of all its scalars."""
    rows = (timestep.reward, timestep.discount, timestep.first, timestep.last)
    scalars = np.empty((4, timestep.reward.shape[0]), np.float32)
    for target, values in zip(scalars, rows, strict=True):
        target[:] = values
    return timestep.observation, scalars


def unpack_timestep(
    observation: PyTree, scalars: Float32[Array | np.ndarray, "*t 4 b"]
) -> TimeStep:
    """Return the timesteps of `pack_timestep`, on the device."""
    reward, discount, first, last = jnp.moveaxis(jnp.asarray(scalars), -2, 0)
    observation = jax.tree.map(jnp.asarray, observation)
    return TimeStep(observation, reward, discount, first > 0, last > 0)


def infer(
    agent: Agent,
    params: Params,
    buffer: TrajectoryBuffer,
    keys: jax.Array,
    observation: PyTree,
    scalars: jax.Array,
) -> tuple[TrajectoryBuffer, jax.Array]:
    """Choose actions for a packed timestep and write both into the buffer.

    `keys [b]` belong to the rows; they are folded with the step here.
    """
    step_keys = jax.vmap(lambda key: jax.random.fold_in(key, buffer.global_step))(keys)
    timestep = unpack_timestep(observation, scalars)
    action, extras, carry = agent.act(params, buffer.carry, timestep, step_keys, True)
    position = buffer.global_step % buffer.scalars.shape[0]  # runs begin at whole trajectories

    def write(column: jax.Array, value: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(column, value, position, 0)

    columns = (buffer.observation, buffer.scalars, buffer.action, buffer.extras)
    columns = jax.tree.map(write, columns, (observation, scalars, action, extras))
    return TrajectoryBuffer(*columns, carry=carry, global_step=buffer.global_step + 1), action


def finish(
    num_learners: int,
    buffer: TrajectoryBuffer,
    start: RolloutStart,
    observation: PyTree,
    scalars: jax.Array,
) -> tuple[RolloutStart, list[TrajectoryShard]]:
    """Close a trajectory with its final timestep, packed, and split its rows over the learners.

    Returns the start of the next rollout too. An episode that begins without an end before it was
    lost to a fault: the transition into it is cut, as if the previous timestep had been a
    time-out, and the lost episode is not counted.
    """
    steps, final = buffer.steps, unpack_timestep(observation, scalars)
    timesteps = dataclasses.replace(steps.timestep, observation=())
    trajectory = Trajectory(steps, final, start.carry, buffer.carry)
    next_timesteps = trajectory.next_timesteps()
    episodes = count_episodes(start.episodes, trajectory)
    is_lost = next_timesteps.begins_after_loss(timesteps.last)
    timestep = dataclasses.replace(steps.timestep, last=timesteps.last | is_lost)
    steps = dataclasses.replace(steps, timestep=timestep)
    all_rows = TrajectoryShard(dataclasses.replace(trajectory, steps=steps), episodes)
    width = final.reward.shape[0] // num_learners

    def shard(index: int) -> TrajectoryShard:
        return map_over_rows(
            lambda axis, x: jax.lax.slice_in_dim(x, index * width, (index + 1) * width, axis=axis),
            all_rows,
        )

    next_start = RolloutStart(buffer.carry, reset_episode_totals(episodes))
    return next_start, [shard(index) for index in range(num_learners)]


@dataclasses.dataclass(frozen=True)
class ActorPrograms:
    """Jitted programs of the actors, which all runs of a driver share."""

    copy_params: Callable[[LearnerState], Params]  # actor parameters that no update takes away
    buffer: Callable[[Params], TrajectoryBuffer]  # empty
    carry: Callable[[], Carry]  # the first of every environment
    infer: Callable[..., tuple[Any, jax.Array]]  # donates the buffer
    finish: Callable[..., Any]  # donates the rollout's start


@jax.jit
def copy_tree(tree: PyTree) -> PyTree:
    """Return copies of arrays, by one program; a copy alone compiles one for each shape."""
    return jax.tree.map(jnp.copy, tree)
