"""Trajectories under construction: the two programs that run on an actor's device.

`infer` does inference, sampling and the storage of the step in one program: each step sends a
timestep to the device, gets the actions back, and nothing else. The trajectory stays on the device,
in a buffer that is donated from step to step. `finish` closes it and splits it over the learners.

Each array that a program takes costs 1 to 2 microseconds a call on a CPU (decision 0014), and each
array that it writes costs a GPU a kernel. So all small numbers of a timestep are one array, and
only its pictures are apart; of a stack of frames the newest alone goes up (`TimestepLayout`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Int32, PyTree, Shaped, UInt8, UInt32

from podracer.agent import Agent
from podracer.drivers.state import reset_episode_totals
from podracer.fields import struct
from podracer.frames import CONTINUED, first_source, stack_frames
from podracer.rollout import ActorState, EpisodeStats, count_episodes
from podracer.types import (
    Carry,
    EnvironmentSpec,
    LearnerState,
    Params,
    Step,
    TimeStep,
    Trajectory,
)

LARGE = 256  # numbers of an observation from which on it is an array of its own


@dataclasses.dataclass(frozen=True)
class TimestepLayout:
    """Timesteps on their way to a device: large arrays `[b, ...]` and `columns`, u32 `[b, C]`.

    The columns are the bits of reward, discount, `first`, `last`, the number of the step, the
    source of each stack of frames, and the small leaves of the observation.
    """

    spec: EnvironmentSpec

    @functools.cached_property
    def leaves(self) -> list[Any]:
        """Specifications of the observation's leaves."""
        return jax.tree.leaves(self.spec.observation)

    @functools.cached_property
    def shapes(self) -> list[Any]:
        """Shape and dtype of one row of each array in the columns."""
        scalars = [np.float32, np.float32, np.bool_, np.bool_, np.uint32]
        scalars += [np.uint8 for leaf in self.leaves if leaf.frame_stack]
        small = [leaf for leaf in self.leaves if not _is_large(leaf)]
        return [jax.ShapeDtypeStruct((), dtype) for dtype in scalars] + small

    def pack(
        self, xp: Any, timestep: TimeStep, unmasked: TimeStep, step: int | jax.Array
    ) -> tuple[list[Any], Any]:
        """Return a timestep `[b, ...]` as large arrays and columns; `xp` is `numpy` or its like.

        Frames are those of the `unmasked` timestep, so that stacks go on behind masked rows.
        """
        large, sources, small = [], [], []
        first = unmasked.first
        for spec, leaf, frames in zip(
            self.leaves,
            jax.tree.leaves(timestep.observation),
            jax.tree.leaves(unmasked.observation),
            strict=True,
        ):
            if spec.frame_stack:
                large.append(frames[..., -1])
                sources.append(_sources(xp, frames, first))
            elif _is_large(spec):
                large.append(leaf)
            else:
                small.append(leaf)
        scalars = [timestep.reward, timestep.discount, timestep.first, timestep.last]
        steps = xp.full(len(first), step, np.uint32)
        return large, to_columns(xp, [*scalars, steps, *sources, *small])

    def unpack(
        self, large: Sequence[Any], columns: UInt32[Array, "*t b C"]
    ) -> tuple[TimeStep, list[UInt8[Array, "*t b"]], UInt32[Array, "*t b"]]:
        """Return timesteps with the newest frame of each stack, the stacks' sources, and steps."""
        reward, discount, first, last, step, *rest = from_columns(columns, self.shapes)
        num_stacks = sum(leaf.frame_stack for leaf in self.leaves)
        arrays, small = iter(large), iter(rest[num_stacks:])
        leaves = [next(arrays) if _is_large(leaf) else next(small) for leaf in self.leaves]
        observation = jax.tree.unflatten(jax.tree.structure(self.spec.observation), leaves)
        return TimeStep(observation, reward, discount, first, last), rest[:num_stacks], step

    def with_stacks(self, timestep: TimeStep, masked: jax.Array, stacks: list[Any]) -> TimeStep:
        """Return timesteps with these stacks in place of frames, zeros where a row is masked."""
        leaves, whole = jax.tree.leaves(timestep.observation), iter(stacks)
        leaves = [
            _zero_where(masked, next(whole)) if spec.frame_stack else leaf
            for spec, leaf in zip(self.leaves, leaves, strict=True)
        ]
        structure = jax.tree.structure(self.spec.observation)
        return dataclasses.replace(timestep, observation=jax.tree.unflatten(structure, leaves))

    def stacks_of(self, observation: PyTree) -> list[Any]:
        """Return the leaves that are stacks of frames."""
        pairs = zip(self.leaves, jax.tree.leaves(observation), strict=True)
        return [leaf for spec, leaf in pairs if spec.frame_stack]

    def zeros(self, num_envs: int) -> tuple[list[np.ndarray], UInt32[np.ndarray, "b C"]]:
        """Return a packed timestep of zeros, to compile with."""
        shapes = [
            spec.shape[:-1] if spec.frame_stack else spec.shape
            for spec in self.leaves
            if _is_large(spec)
        ]
        dtypes = [spec.dtype for spec in self.leaves if _is_large(spec)]
        pairs = zip(shapes, dtypes, strict=True)
        large = [np.zeros((num_envs, *shape), dtype) for shape, dtype in pairs]
        width = sum(math.prod(x.shape) for x in self.shapes)
        return large, np.zeros((num_envs, width), np.uint32)


def _is_large(spec: Any) -> bool:
    return spec.frame_stack or math.prod(spec.shape) > LARGE


def _zero_where(masked: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.where(jnp.expand_dims(masked, range(masked.ndim, x.ndim)), jnp.zeros_like(x), x)


def _sources(xp: Any, stack: Any, first: Any) -> UInt8[Array | np.ndarray, " b"]:
    """Return the sources of stacks `[b, ..., K]`, which go on where no episode begins."""
    if xp is not np:
        return xp.where(first, first_source(xp, stack), CONTINUED)
    sources, rows = np.full(len(first), CONTINUED, np.uint8), np.flatnonzero(first)
    if rows.size:
        sources[rows] = first_source(np, stack[rows])
    return sources


def to_columns(xp: Any, arrays: Sequence[Any]) -> UInt32[Array | np.ndarray, "b C"]:
    """Return the bits of arrays `[b, ...]` side by side, a number in each column."""
    parts = []
    for x in arrays:
        x = x.reshape(len(x), -1)
        x = x.astype(np.uint8) if x.dtype == bool else x
        parts.append(x.view(f"u{x.dtype.itemsize}").astype(np.uint32))
    return xp.concatenate(parts, axis=1)


def from_columns(
    columns: UInt32[Array, "*t b C"], shapes: Sequence[Any]
) -> list[Shaped[Array, "*t b ..."]]:
    """Return the arrays of `to_columns`; `shapes` has shape and dtype of a row of each."""
    arrays, start = [], 0
    for shape in shapes:
        dtype, end = np.dtype(shape.dtype), start + math.prod(shape.shape)
        part = columns[..., start:end]
        is_bool = dtype.kind == "b"
        part = part > 0 if is_bool else part.astype(f"u{dtype.itemsize}").view(dtype)
        arrays.append(part.reshape(*columns.shape[:-1], *shape.shape))
        start = end
    return arrays


@struct
class TrajectoryBuffer:
    """Rings of the newest R timesteps, the unfinished trajectory among them, and state of acting.

    A step is at its number modulo R, see `Recorder.ring_size`.
    """

    large: list[Shaped[Array, "R b ..."]]
    columns: UInt32[Array, "R b C"]  # the timesteps' columns, then actions and extras
    carry: PyTree[Shaped[Array, "b ..."]]  # the agent's recurrent state at the next step


@struct
class RolloutStart:
    """State `[b, ...]` before the first step of a trajectory."""

    carry: Carry
    episodes: EpisodeStats  # running sums; the totals are zero
    stacks: list[Shaped[Array, "b ... K"]]  # of the timestep before


@struct
class TrajectoryShard:
    """One learner's rows of an actor's trajectory; `complete` has its stacks of frames."""

    trajectory: Trajectory  # steps [T, b, ...], with frames in place of stacks, the rest [b, ...]
    episodes: EpisodeStats  # [b], of the episodes that ended within the trajectory
    stacks: list[Shaped[Array, "b ... K"]]  # of the timestep before the first
    sources: list[UInt8[Array, "T b"]]  # of each stack
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
    layout, steps = TimestepLayout(spec), shard.trajectory.steps
    length = shard.masked.shape[0]
    frames = layout.stacks_of(steps.timestep.observation)
    stacks = []
    for stack, new, source in zip(shard.stacks, frames, shard.sources, strict=True):
        size = stack.shape[-1]
        series = jnp.concatenate([jnp.moveaxis(stack[..., 1:], -1, 0), new])
        sources = jnp.pad(source, ((size - 1, 0), (0, 0)), constant_values=CONTINUED)

        def at(age: int, x: jax.Array, size: int = size) -> jax.Array:
            return jax.lax.slice_in_dim(x, size - 1 - age, size - 1 - age + length)

        stacks.append(stack_frames(size, partial(at, x=series), partial(at, x=sources)))
    timestep = layout.with_stacks(steps.timestep, shard.masked, stacks)
    steps = dataclasses.replace(steps, timestep=timestep)
    return dataclasses.replace(shard.trajectory, steps=steps)


@dataclasses.dataclass(frozen=True)
class Recorder:
    """The programs of an actor's device, for `num_envs` rows and trajectories of `length` steps."""

    agent: Agent
    num_envs: int
    length: int
    params: Params  # shapes of the actor's parameters

    @functools.cached_property
    def layout(self) -> TimestepLayout:
        return TimestepLayout(self.agent.spec)

    @functools.cached_property
    def outputs(self) -> PyTree:
        """Shapes `[b, ...]` of `(action, extras)`, without a program that acts."""
        large, columns = self.layout.zeros(self.num_envs)
        stacks = self.layout.stacks_of(self.agent.spec.observation)
        stacks = [jnp.zeros((self.num_envs, *x.shape), x.dtype) for x in stacks]

        def act(params: Params) -> PyTree:
            keys = jax.random.split(jax.random.key(0), self.num_envs)
            timestep, _, _ = self.layout.unpack(large, jnp.asarray(columns))
            timestep = self.layout.with_stacks(timestep, timestep.first, stacks)
            carry = self.agent.carry(self.num_envs)
            return self.agent.act(params, carry, timestep, keys, True)[:2]

        return jax.eval_shape(act, self.params)

    @functools.cached_property
    def ring_size(self) -> int:
        """Whole trajectories, at least one, in which the frames before the newest one fit."""
        sizes = [x.shape[-1] for x in self.layout.stacks_of(self.agent.spec.observation)]
        return -(-max(self.length, *sizes, 1) // self.length) * self.length

    def begin(self, start: ActorState, step: ArrayLike) -> tuple[TrajectoryBuffer, RolloutStart]:
        """Return an empty buffer and the start of a rollout, whose first step has this number.

        The step shows the timestep of `start`, or a reset's if that is None.
        """
        large, columns = self.layout.zeros(self.num_envs)
        width = sum(x.size for x in jax.tree.leaves(self.outputs)) // self.num_envs
        shape = (self.ring_size, self.num_envs, columns.shape[1] + width)
        rings = [jnp.zeros((self.ring_size, *x.shape), x.dtype) for x in large]
        stacks = []
        for i, spec in enumerate(leaf for leaf in self.layout.leaves if _is_large(leaf)):
            if not spec.frame_stack:
                continue
            stack = jnp.zeros((self.num_envs, *spec.shape), spec.dtype)
            if start.timestep is not None:
                stack = self.layout.stacks_of(start.timestep.observation)[len(stacks)]
            stacks.append(jnp.roll(stack, 1, axis=-1))  # that of the timestep before
            older = jnp.moveaxis(stacks[-1][..., 1:], -1, 0)  # oldest first
            first = jnp.asarray(step % self.ring_size, jnp.int32)
            places = (first + jnp.arange(-len(older), 0)) % self.ring_size
            rings[i] = rings[i].at[places].set(older)
        buffer = TrajectoryBuffer(rings, jnp.zeros(shape, jnp.uint32), start.carry)
        return buffer, RolloutStart(start.carry, reset_episode_totals(start.episodes), stacks)

    def infer(
        self,
        params: list[Any],
        buffer: TrajectoryBuffer,
        keys: UInt32[Array, "b ..."],
        large: list[Any],
        columns: UInt32[Array, "b C"],
    ) -> tuple[TrajectoryBuffer, PyTree]:
        """Choose actions for a packed timestep and write both into the buffer.

        `params` are the leaves of the parameters, as their tree takes long to compare. `keys`, the
        bits of the rows' keys, are folded with the step here.
        """
        columns = jnp.asarray(columns)
        timestep, sources, step = self.layout.unpack(large, columns)
        place = self._place(step)

        def write(ring: jax.Array, value: Any) -> jax.Array:
            return jax.lax.dynamic_update_index_in_dim(ring, jnp.asarray(value), place, 0)

        rings = [write(ring, x) for ring, x in zip(buffer.large, large, strict=True)]
        stacks = self._stacks(rings, buffer.columns, place, sources)
        timestep = self.layout.with_stacks(timestep, timestep.first & timestep.last, stacks)
        keys = jax.vmap(jax.random.fold_in)(jax.random.wrap_key_data(keys), step)
        tree = jax.tree.unflatten(jax.tree.structure(self.params), params)
        action, extras, carry = self.agent.act(tree, buffer.carry, timestep, keys, True)
        outputs = to_columns(jnp, jax.tree.leaves((action, extras)))
        ring = write(buffer.columns, jnp.concatenate([columns, outputs], axis=1))
        return TrajectoryBuffer(rings, ring, carry), action

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
        columns = jnp.asarray(columns)
        final, final_sources, step = self.layout.unpack(large, columns)
        place = self._place(step)  # of the final timestep, which is not in the ring

        def whole(ring: jax.Array) -> jax.Array:
            if self.ring_size == self.length:
                return ring
            first = (place - self.length) % self.ring_size
            return jax.lax.dynamic_slice_in_dim(ring, first, self.length)

        rows = whole(buffer.columns)
        timesteps, sources, _ = self.layout.unpack([whole(x) for x in buffer.large], rows)
        newest = (place - 1) % self.ring_size
        stacks = self._stacks(buffer.large, buffer.columns, newest, [x[-1] for x in sources])
        frames = self.layout.stacks_of(final.observation)
        final_stacks = map(push_frame, stacks, frames, final_sources)
        final = self.layout.with_stacks(final, final.first & final.last, list(final_stacks))
        leaves, structure = jax.tree.flatten(self.outputs)
        shapes = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in leaves]
        outputs = from_columns(rows[..., columns.shape[1] :], shapes)
        steps = Step(timesteps, *jax.tree.unflatten(structure, outputs))
        trajectory = Trajectory(steps, final, start.carry, buffer.carry)
        masked = timesteps.first & timesteps.last
        episodes = count_episodes(start.episodes, trajectory)
        is_lost = trajectory.next_timesteps().begins_after_loss(timesteps.last)
        timesteps = dataclasses.replace(timesteps, last=timesteps.last | is_lost)
        steps = dataclasses.replace(steps, timestep=timesteps)
        trajectory = dataclasses.replace(trajectory, steps=steps)
        all_rows = TrajectoryShard(trajectory, episodes, start.stacks, sources, masked)
        width = self.num_envs // num_learners

        def shard(index: int) -> TrajectoryShard:
            def rows_of(axis: int, x: jax.Array) -> jax.Array:
                return jax.lax.slice_in_dim(x, index * width, (index + 1) * width, axis=axis)

            return map_over_rows(rows_of, all_rows)

        next_start = RolloutStart(buffer.carry, reset_episode_totals(episodes), stacks)
        return next_start, [shard(index) for index in range(num_learners)]

    def _place(self, step: UInt32[Array, " b"]) -> Int32[Array, ""]:
        """Return the place of a timestep in the rings, signed, as others lie before it."""
        return (step[0] % self.ring_size).astype(jnp.int32)

    def _stacks(
        self, rings: list[jax.Array], columns: jax.Array, place: jax.Array, sources: list[jax.Array]
    ) -> list[Shaped[Array, "b ... K"]]:
        """Return the stacks of the timestep at a place of the rings, whose sources are given."""

        def before(ring: jax.Array, age: int) -> jax.Array:
            return jax.lax.dynamic_index_in_dim(ring, (place - age) % self.ring_size, 0, False)

        stacks, large = [], (leaf for leaf in self.layout.leaves if _is_large(leaf))
        for spec, ring in zip(large, rings, strict=True):
            if spec.frame_stack:
                number = len(stacks)

                def source(age: int, number: int = number) -> jax.Array:
                    if age == 0:
                        return sources[number]
                    return self.layout.unpack(rings, before(columns, age))[1][number]

                stacks.append(stack_frames(spec.shape[-1], partial(before, ring), source))
        return stacks


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


@dataclasses.dataclass(frozen=True)
class ActorPrograms:
    """Jitted programs of the actors, which all runs of a driver share."""

    copy_params: Callable[[LearnerState], Params]  # actor parameters that no update takes away
    begin: Callable[[ActorState, ArrayLike], tuple[TrajectoryBuffer, RolloutStart]]
    carry: Callable[[], Carry]  # the first of every environment
    infer: Callable[..., tuple[TrajectoryBuffer, PyTree]]  # donates the buffer
    finish: Callable[..., tuple[RolloutStart, list[TrajectoryShard]]]  # donates the start


def make_actor_programs(recorder: Recorder, num_learners: int, num_envs: int) -> ActorPrograms:
    """Return the programs of actors in a run with `num_envs` environments."""
    agent = recorder.agent
    return ActorPrograms(
        jax.jit(lambda learner: jax.tree.map(jnp.copy, agent.actor_params(learner))),
        jax.jit(recorder.begin),
        jax.jit(partial(agent.carry, num_envs)),
        jax.jit(recorder.infer, donate_argnums=1),
        jax.jit(partial(recorder.finish, num_learners), donate_argnums=1),
    )


@jax.jit
def copy_tree(tree: PyTree) -> PyTree:
    """Return copies of arrays, by one program; a copy alone compiles one for each shape."""
    return jax.tree.map(jnp.copy, tree)
