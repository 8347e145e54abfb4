"""A trajectory in the making: the programs that an actor's device runs.

Inference, sampling and the writing of the trajectory are one program: each step sends a timestep to
the device and gets the actions back, and nothing else. The trajectory stays on the device, in
buffers that are donated from step to step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.agent import Agent
from podracer.rollout import EpisodeStats, update_episode_stats, zero_episode_stats
from podracer.types import (
    Carry,
    EnvironmentSpec,
    Params,
    PyTree,
    Step,
    TimeStep,
    Trajectory,
    struct,
)


@struct
class Edges:
    """What a trajectory has once for each row, all `[b, ...]`."""

    final: TimeStep
    carry: Carry
    final_carry: Carry
    episodes: EpisodeStats  # those within the trajectory


@struct
class Batch:
    """What an actor gives to a learner: its rows of a trajectory."""

    steps: Step  # [T, b, ...]
    edges: Edges

    @property
    def trajectory(self) -> Trajectory:
        """As agents learn from it."""
        edges = self.edges
        return Trajectory(self.steps, edges.final, edges.carry, edges.final_carry)


def over_rows(function: Callable[..., Any], *batches: Batch) -> Batch:
    """`function(axis, *leaves)` on the leaves of batches, `axis` being that of the rows."""
    return Batch(
        jax.tree.map(partial(function, 1), *(batch.steps for batch in batches)),
        jax.tree.map(partial(function, 0), *(batch.edges for batch in batches)),
    )


@struct
class Slot:
    """A trajectory in the making, on the actor's device; few leaves, as each costs every step."""

    observation: PyTree  # [T, b, ...]
    signals: jax.Array  # f32 [T, 4, b], the rest of each timestep, see `packed`
    action: PyTree  # [T, b, ...]
    extras: PyTree  # [T, b, ...]
    carry: Carry  # [b, ...], the agent's memory now
    moment: jax.Array  # u32, the number of the next step in the run

    @property
    def steps(self) -> Step:
        """Of the whole trajectory, once it is complete."""
        return Step(unpacked(self.observation, self.signals), self.action, self.extras)


@struct
class Opening:
    """Where a trajectory began, all `[b, ...]`."""

    carry: Carry
    episodes: EpisodeStats  # running sums


def empty_slot(
    agent: Agent, spec: EnvironmentSpec, params: Params, num_envs: int, length: int
) -> Slot:
    """A slot of zeros for `num_envs` rows, the memory empty."""
    observation, signals = blank(spec, num_envs)
    keys = jax.random.split(jax.random.key(0), num_envs)
    carry = agent.carry(num_envs)
    action, extras, _ = agent.act(params, carry, unpacked(observation, signals), keys, True)
    columns = jax.tree.map(
        lambda x: jnp.zeros((length, *x.shape), x.dtype), (observation, signals, action, extras)
    )
    return Slot(*columns, carry=carry, moment=jnp.uint32(0))


def blank(spec: EnvironmentSpec, num_envs: int) -> tuple[PyTree, np.ndarray]:
    """Observations and signals of zeros, to compile with."""
    observation = jax.tree.map(lambda x: np.zeros((num_envs, *x.shape), x.dtype), spec.observation)
    return observation, np.zeros((4, num_envs), np.float32)


def packed(timestep: TimeStep) -> tuple[PyTree, np.ndarray]:
    """A host timestep as its observation and one array f32 `[4, b]` of all the rest."""
    rest = (timestep.reward, timestep.discount, timestep.first, timestep.last)
    signals = np.empty((4, timestep.reward.shape[0]), np.float32)
    for row, values in zip(signals, rest, strict=True):
        row[:] = values
    return timestep.observation, signals


def unpacked(observation: PyTree, signals: jax.Array | np.ndarray) -> TimeStep:
    """The inverse of `packed`, on the device, for signals f32 `[*b, 4, b]`."""
    reward, discount, first, last = jnp.moveaxis(jnp.asarray(signals), -2, 0)
    observation = jax.tree.map(jnp.asarray, observation)
    return TimeStep(observation, reward, discount, first > 0, last > 0)


def infer(
    agent: Agent,
    params: Params,
    slot: Slot,
    keys: jax.Array,
    observation: PyTree,
    signals: jax.Array,
) -> tuple[Slot, jax.Array]:
    """Choose actions for a timestep and write both into the slot. `keys [b]` are the rows' own."""
    now = jax.vmap(lambda key: jax.random.fold_in(key, slot.moment))(keys)
    timestep = unpacked(observation, signals)
    action, extras, carry = agent.act(params, slot.carry, timestep, now, True)
    position = slot.moment % slot.signals.shape[0]  # runs begin at whole trajectories

    def write(buffer: jax.Array, value: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(buffer, value, position, 0)

    columns = (slot.observation, slot.signals, slot.action, slot.extras)
    columns = jax.tree.map(write, columns, (observation, signals, action, extras))
    return Slot(*columns, carry=carry, moment=slot.moment + 1), action


def finish(
    num_shards: int, slot: Slot, opening: Opening, observation: PyTree, signals: jax.Array
) -> tuple[Opening, list[Batch]]:
    """Close a trajectory with its final timestep and split its rows; and where the next begins.

    An episode that begins without an end before it was lost to a fault: the transition that leads
    there is cut, as if the timestep before it had been a time-out, and the episode is not counted.
    """
    steps, final = slot.steps, unpacked(observation, signals)
    before = dataclasses.replace(steps.timestep, observation=())
    after = Trajectory(steps, final, (), ()).next_timesteps()

    def count(episodes: EpisodeStats, pair: tuple[TimeStep, TimeStep]) -> tuple[EpisodeStats, None]:
        return update_episode_stats(episodes, *pair), None

    episodes, _ = jax.lax.scan(count, opening.episodes, (before, after))
    broken = after.first & ~before.last & (after.discount > 0)
    timestep = dataclasses.replace(steps.timestep, last=before.last | broken)
    steps = dataclasses.replace(steps, timestep=timestep)
    whole = Batch(steps, Edges(final, opening.carry, slot.carry, episodes))
    num_envs = final.reward.shape[0]
    width = num_envs // num_shards

    def piece(index: int) -> Batch:
        return over_rows(
            lambda axis, x: jax.lax.slice_in_dim(x, index * width, (index + 1) * width, axis=axis),
            whole,
        )

    running = dataclasses.replace(
        zero_episode_stats(num_envs),
        running_return=episodes.running_return,
        running_length=episodes.running_length,
    )
    return Opening(slot.carry, running), [piece(index) for index in range(num_shards)]


@dataclasses.dataclass(frozen=True)
class Programs:
    """The compiled programs of the actors of one device."""

    infer: Callable[..., tuple[Slot, jax.Array]]
    finish: Callable[..., tuple[Opening, list[Batch]]]


def make_programs(agent: Agent, num_shards: int) -> Programs:
    """Programs for actors whose rows are split over `num_shards` learner devices."""
    return Programs(
        jax.jit(partial(infer, agent), donate_argnums=1),
        jax.jit(partial(finish, num_shards), donate_argnums=1),
    )
