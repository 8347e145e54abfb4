"""Trajectories under construction: the two programs that run on an actor's device.

`infer` does inference, sampling and the storage of the step in one program: each step sends a
packed timestep to the device, gets the actions back, and nothing else. The trajectory stays on the
device, in rings that are donated from step to step. `finish` closes it and splits it over the
learners.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int32, PyTree, Shaped, UInt8, UInt32

from podracer.agent import Agent
from podracer.devices.fused import is_for
from podracer.drivers.sebulba.layout import TimestepLayout, from_words, to_words
from podracer.drivers.state import reset_episode_totals
from podracer.fields import struct
from podracer.frames import CONTINUED, stack_frames
from podracer.rollout import ActorState, EpisodeStats, count_episodes, zero_episode_stats
from podracer.types import (
    Carry,
    EnvironmentSpec,
    LearnerState,
    Params,
    Step,
    Trajectory,
    blank_timestep,
)


@struct
class TrajectoryBuffer:
    """Rings of the newest R timesteps, the unfinished trajectory among them, and state of acting.

    A step is at its number modulo R, see `ActorFunctions.ring_size`.
    """

    large: list[Shaped[Array, "R b ..."]]
    columns: UInt32[Array, "R b C"]  # the timesteps' columns, then actions and extras
    carry: PyTree[Shaped[Array, "b ..."]]  # the agent's recurrent state at the next step


@struct
class RolloutStart:
    """State `[b, ...]` before the first step of a trajectory."""

    carry: Carry
    episodes: EpisodeStats  # running sums; the totals are zero
    stacks: list[Shaped[Array, "b ... K"]]  # stacks of frames of the timestep before


@struct
class TrajectoryShard:
    """One learner's rows of an actor's trajectory; `complete` has its stacks of frames."""

    trajectory: Trajectory  # steps [T, b, ...], with frames in place of stacks, the rest [b, ...]
    episodes: EpisodeStats  # [b], of the episodes that ended within the trajectory
    stacks: list[Shaped[Array, "b ... K"]]  # stacks of frames of the timestep before the first
    sources: list[UInt8[Array, "T b"]]  # sources of the stacks of each step
    masked: Bool[Array, "T b"]  # rows that show a fault


# The axis of the rows, the environments of one actor, in each part of a shard.
ROW_AXES: Any = TrajectoryShard(
    Trajectory(steps=1, final=0, carry=0, final_carry=0),  # type: ignore[arg-type]
    episodes=0,  # type: ignore[arg-type]
    stacks=0,  # type: ignore[arg-type]
    sources=1,  # type: ignore[arg-type]
    masked=1,  # type: ignore[arg-type]
)


def map_over_rows(function: Callable[..., Any], *shards: TrajectoryShard) -> TrajectoryShard:
    """Return the shard of `function(axis, *leaves)`, where `axis` is the leaves' axis of rows."""

    def map_part(axis: int, *parts: PyTree) -> PyTree:
        return jax.tree.map(partial(function, axis), *parts)

    return jax.tree.map(map_part, ROW_AXES, *shards)


def complete(spec: EnvironmentSpec, shard: TrajectoryShard) -> Trajectory:
    """Return a shard's trajectory, with whole stacks of frames."""
    layout, steps, length = TimestepLayout(spec), shard.trajectory.steps, len(shard.masked)
    frames, _, _ = layout.split(steps.timestep.observation)
    stacks = []
    for stack, new, source in zip(shard.stacks, frames, shard.sources, strict=True):
        older = jnp.moveaxis(stack[..., 1:], -1, 0)  # oldest first
        series = jnp.concatenate([older, new])
        sources = jnp.pad(source, ((len(older), 0), (0, 0)), constant_values=CONTINUED)

        def before(x: jax.Array, age: int, newest: int = len(older)) -> jax.Array:
            return jax.lax.slice_in_dim(x, newest - age, newest - age + length)

        parts = partial(before, series), partial(before, sources)
        stacks.append(stack_frames(stack.shape[-1], *parts))
    timestep = layout.with_stacks(steps.timestep, shard.masked, stacks)
    final = shard.trajectory.final
    final_stacks, _, _ = layout.split(final.observation)
    final = layout.with_stacks(final, final.first & final.last, final_stacks)
    steps = dataclasses.replace(steps, timestep=timestep)
    return dataclasses.replace(shard.trajectory, steps=steps, final=final)


@dataclasses.dataclass(frozen=True)
class ActorFunctions:
    """What an actor's device computes, for `num_envs` rows and trajectories of `length` steps."""

    agent: Agent
    num_envs: int
    length: int
    learner: LearnerState  # its shapes

    @functools.cached_property
    def params(self) -> Params:
        """Shapes of the actor's parameters."""
        return jax.eval_shape(self.agent.actor_params, self.learner)

    @functools.cached_property
    def layout(self) -> TimestepLayout:
        return TimestepLayout(self.agent.spec)

    @functools.cached_property
    def outputs(self) -> PyTree:
        """Shapes `[b, ...]` of action and extras, without a program that acts."""
        timestep = blank_timestep(self.agent.spec, self.num_envs)
        keys = jax.random.split(jax.random.key(0), self.num_envs)
        inputs = self.agent.carry(self.num_envs), timestep, keys
        return jax.eval_shape(lambda x: self.agent.act(x, *inputs, True)[:2], self.params)

    @functools.cached_property
    def ring_size(self) -> int:
        """Whole trajectories, at least one, in which the frames before the newest one fit."""
        stacks, _, _ = self.layout.split(self.agent.spec.observation)
        steps = max([self.length, *(stack.shape[-1] for stack in stacks)])
        return -(-steps // self.length) * self.length

    @functools.cached_property
    def begin_shapes(self) -> tuple[TrajectoryBuffer, RolloutStart]:
        """Shapes of what `begin` returns."""
        carry, episodes = self.agent.carry(self.num_envs), zero_episode_stats(self.num_envs)
        first = ActorState((), None, carry, episodes)  # type: ignore[arg-type]
        return jax.eval_shape(partial(self.begin, first), 0)

    def begin(self, start: ActorState, step: ArrayLike) -> tuple[TrajectoryBuffer, RolloutStart]:
        """Return an empty buffer and the start of a rollout, whose first step has this number.

        The step shows the timestep of `start`, or a reset's if it is None.
        """
        timestep = start.timestep or blank_timestep(self.agent.spec, self.num_envs)
        stacks, arrays, _ = self.layout.split(timestep.observation)
        stacks = [jnp.roll(stack, 1, axis=-1) for stack in stacks]  # the timestep's before
        place, rings = self._place(step), []
        for x in (*(stack[..., 0] for stack in stacks), *arrays):
            rings.append(jnp.zeros((self.ring_size, *x.shape), x.dtype))
        for i, stack in enumerate(stacks):
            older = jnp.moveaxis(stack[..., 1:], -1, 0)  # oldest first
            places = (place + jnp.arange(-len(older), 0)) % self.ring_size
            rings[i] = rings[i].at[places].set(older)
        width = sum(x.size for x in jax.tree.leaves(self.outputs)) // self.num_envs
        shape = (self.ring_size, self.num_envs, self.layout.width + width)
        buffer = TrajectoryBuffer(rings, jnp.zeros(shape, jnp.uint32), start.carry)
        return buffer, RolloutStart(start.carry, reset_episode_totals(start.episodes), stacks)

    def infer(
        self,
        params: list[jax.Array],
        buffer: TrajectoryBuffer,
        keys: UInt32[Array, "b ..."],
        large: list[Any],
        columns: UInt32[Array, "b C"],
    ) -> tuple[TrajectoryBuffer, PyTree]:
        """Choose actions for a packed timestep and write both into the buffer.

        `params` are those of `flatten_params`. `keys`, the bits of the rows' keys, are folded with
        the step here.
        """
        timestep, sources, step = self.layout.unpack(large, columns)
        place = self._place(step[0])

        def write(ring: jax.Array, value: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_index_in_dim(ring, value, place, 0)

        rings = [write(*pair) for pair in zip(buffer.large, large, strict=True)]
        stacks = self._stacks(rings, buffer.columns, place, sources)
        timestep = self.layout.with_stacks(timestep, timestep.first & timestep.last, stacks)
        keys = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(keys), step)
        tree = unflatten_params(params, self.params)
        action, extras, carry = self.agent.act(tree, buffer.carry, timestep, keys, True)
        words = [columns, *to_words(jax.tree.leaves((action, extras)))]
        row = jnp.concatenate([x.astype(jnp.uint32) for x in words], axis=1)
        return TrajectoryBuffer(rings, write(buffer.columns, row), carry), action

    def finish(
        self,
        num_learners: int,
        buffer: TrajectoryBuffer,
        start: RolloutStart,
        large: list[Any],
        columns: UInt32[Array, "b C"],
    ) -> tuple[RolloutStart, list[TrajectoryShard]]:
        """Close a trajectory with its final timestep, packed, and split its rows over the learners.

        Returns the start of the next rollout too. An episode that begins without an end before it
        was lost to a fault: the transition into it is cut, as if the previous timestep had been a
        time-out, and the lost episode is not counted.
        """
        final, final_sources, step = self.layout.unpack(large, columns)
        end = self._place(step[0])  # the final timestep is not in the rings
        first, newest = ((end - age) % self.ring_size for age in (self.length, 1))
        rings, rows = jax.tree.map(
            lambda ring: jax.lax.dynamic_slice_in_dim(ring, first, self.length),
            (buffer.large, buffer.columns),
        )
        timesteps, sources, _ = self.layout.unpack(rings, rows)
        stacks = self._stacks(buffer.large, buffer.columns, newest, [x[-1] for x in sources])
        frames, _, _ = self.layout.split(final.observation)
        final_stacks = [*map(push_frame, stacks, frames, final_sources)]
        # Masked by `complete`: a resumed run goes on behind masked rows, too.
        final = self.layout.with_stacks(final, jnp.zeros_like(final.first), final_stacks)
        outputs, structure = jax.tree.flatten(self.outputs)
        outputs = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in outputs]
        outputs = from_words(rows[..., self.layout.width :], outputs)
        steps = Step(timesteps, *jax.tree.unflatten(structure, outputs))
        trajectory = Trajectory(steps, final, start.carry, buffer.carry)
        episodes = count_episodes(start.episodes, trajectory)
        is_lost = trajectory.next_timesteps().begins_after_loss(timesteps.last)
        steps = steps.with_timestep(last=timesteps.last | is_lost)
        trajectory = dataclasses.replace(trajectory, steps=steps)
        masked = timesteps.first & timesteps.last
        all_rows = TrajectoryShard(trajectory, episodes, start.stacks, sources, masked)
        width = self.num_envs // num_learners

        def shard(index: int) -> TrajectoryShard:
            def rows_of(axis: int, x: jax.Array) -> jax.Array:
                return jax.lax.slice_in_dim(x, index * width, (index + 1) * width, axis=axis)

            return map_over_rows(rows_of, all_rows)

        next_start = RolloutStart(buffer.carry, reset_episode_totals(episodes), stacks)
        return next_start, [shard(index) for index in range(num_learners)]

    def _place(self, step: ArrayLike) -> Int32[Array, ""]:
        """Return the place of a step in the rings, signed, as others lie before it."""
        return jnp.remainder(step, self.ring_size).astype(jnp.int32)

    def _stacks(
        self, rings: list[jax.Array], columns: jax.Array, place: jax.Array, sources: list[jax.Array]
    ) -> list[Shaped[Array, "b ... K"]]:
        """Return the stacks of the timestep at a place of the rings, whose sources are given."""

        def before(ring: jax.Array, age: int) -> jax.Array:
            return jax.lax.dynamic_index_in_dim(ring, (place - age) % self.ring_size, 0, False)

        def source(number: int, age: int) -> jax.Array:
            if age == 0:
                return sources[number]
            return self.layout.sources(before(columns, age))[number]

        specs, _, _ = self.layout.split(self.agent.spec.observation)
        return [
            stack_frames(spec.shape[-1], partial(before, rings[i]), partial(source, i))
            for i, spec in enumerate(specs)
        ]


def push_frame(
    stack: Shaped[Array, "b ... K"], frame: Shaped[Array, "b ..."], source: UInt8[Array, " b"]
) -> Shaped[Array, "b ... K"]:
    """Return the stacks after one more frame."""
    size, continued = stack.shape[-1], jnp.full_like(source, CONTINUED)
    return stack_frames(
        size,
        lambda age: stack[..., size - age] if age else jnp.asarray(frame),
        lambda age: continued if age else source,
    )


def flatten_params(params: Params) -> list[jax.Array]:
    """Return parameters as actors take them: a list, as their tree takes long to compare.

    A GPU reads the outputs of convolution kernels `[H, W, I, O]` first: they are moved once here,
    not in each step.
    """
    leaves = jax.tree.leaves(params)
    return [jnp.moveaxis(x, -1, 0) if _is_kernel(x) else x for x in leaves]


def unflatten_params(leaves: list[jax.Array], shapes: Params) -> Params:
    """Return the parameters of `flatten_params`."""
    leaves = [jnp.moveaxis(x, 0, -1) if _is_kernel(x) else x for x in leaves]
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def _is_kernel(x: jax.Array) -> bool:
    return is_for("gpu") and x.ndim == 4


class ActorPrograms:
    """Jitted programs of the actors, which all runs of a driver share."""

    def __init__(self, functions: ActorFunctions, num_learners: int, num_envs: int) -> None:
        """`num_envs` is the number of all environments of a run."""
        agent = functions.agent

        def copy_params(learner: LearnerState) -> list[jax.Array]:
            return jax.tree.map(jnp.copy, flatten_params(agent.actor_params(learner)))

        finish = partial(functions.finish, num_learners)
        self.copy_params = jax.jit(copy_params)  # no update donates the copies
        self.begin = jax.jit(functions.begin)
        self.carry = jax.jit(partial(agent.carry, num_envs))  # the first of every environment
        self.infer = jax.jit(functions.infer, donate_argnums=1)  # the buffer
        self.finish = jax.jit(finish, donate_argnums=1)  # the start


@jax.jit
def copy_tree(tree: PyTree) -> PyTree:
    """Return copies of arrays, by one program; a copy alone compiles one for each shape."""
    return jax.tree.map(jnp.copy, tree)
