"""Replay on the device: what the environments showed, kept to be learned from again.

Every environment has a ring of its newest timesteps, `[B, C, ...]` with B first because that is the
axis which is sharded: each device draws from its own environments. A sample is a `Trajectory`, so
losses look the same as on a fresh rollout. Observations whose last axis is a stack of frames
(`Array.stacked`) are kept one frame at a time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp

from podracer.environment import action_struct
from podracer.ops import sum_tree
from podracer.types import (
    ArraySpec,
    Carry,
    ConfigError,
    EnvironmentSpec,
    PyTree,
    Step,
    TimeStep,
    Trajectory,
    struct,
)

CONTINUES, COPIES, BLANK = 0, 1, 2  # how a stack of frames follows from the one before


@dataclasses.dataclass(frozen=True)
class Replay:
    """How much an agent remembers, and how it draws from that."""

    capacity: int = 100_000
    """Timesteps of all environments together."""
    batch_size: int = 256
    """Samples in an update, over all devices."""
    updates: int = 1
    """Updates for each rollout."""
    warmup: int = 1_000
    """Timesteps to collect before the first update."""
    prioritized: bool = False
    """Draw by the size of the last error (Schaul et al. 2016, arXiv 1511.05952), or uniformly."""
    priority_exponent: float = 0.6
    """0 draws uniformly, 1 in proportion to the error."""
    importance_exponent: float = 0.4
    """How far importance weights undo that: 0 not at all, 1 fully."""


@struct
class Priorities:
    """How likely each start is to be drawn, by priorities."""

    priorities: sum_tree.SumTree  # [B, C / stride], 0 where no sample may start
    highest: jax.Array  # f32 [B], of all priorities so far


@struct
class ReplayState:
    """What is kept. Leaves lead with B, the number of environments."""

    steps: Step  # [B, C, ...]; of stacked observations the newest frame alone
    follows: PyTree  # u8 [B, C] for each stacked observation, else ()
    newest: PyTree  # of each stacked observation the last stack, [B, ..., K], else ()
    carry: Carry  # [B, C / stride, ...], the agent's memory at each start
    added: jax.Array  # i32 [B], timesteps ever added, the same for all
    chances: Priorities | tuple[()]  # () where all are alike


@struct
class Sample:
    """What was drawn, and where it lies."""

    trajectory: Trajectory  # L - 1 transitions between L timesteps, [L - 1, N, ...]
    weights: jax.Array  # f32 [N], importance weights, at most 1
    rows: jax.Array  # i32 [N]
    starts: jax.Array  # i32 [N]


@dataclasses.dataclass(frozen=True)
class Buffer:
    """Pure functions over a `ReplayState`: samples have `length` timesteps and may start at every
    `stride`-th timestep."""

    settings: Replay
    spec: EnvironmentSpec
    length: int
    stride: int = 1

    def init(self, num_envs: int, *, extras: PyTree = (), carry: Carry = ()) -> ReplayState:
        """Nothing yet. `extras` and `carry` are as `Step` and `Trajectory` have them for one
        environment (shapes and dtypes). Raises `ConfigError` where no sample would fit."""
        if self.length < self.stride:
            raise ConfigError(
                f"samples of {self.length} timesteps, one in {self.stride}, would leave some out."
            )
        columns = self.settings.capacity // num_envs // self.stride * self.stride
        needed = math.ceil((self.length + self._history) / self.stride) * self.stride
        if columns < needed:
            raise ConfigError(
                f"replay.capacity is {self.settings.capacity}, {columns} timesteps for each of the "
                f"{num_envs} environments, but a sample needs {needed}: take at least "
                f"{num_envs * needed}."
            )

        def zeros(*axes: int) -> Any:
            return lambda x: jnp.zeros((*axes, *x.shape), x.dtype)

        flag: Any = ArraySpec((), jnp.bool_)
        number: Any = ArraySpec(())
        frames = self._stacks(
            lambda spec, _: ArraySpec(spec.shape[:-1], spec.dtype),
            lambda x: x,
            self.spec.observation,
        )
        step = Step(TimeStep(frames, number, number, flag, flag), action_struct(self.spec), extras)
        starts = columns // self.stride
        return ReplayState(
            steps=jax.tree.map(zeros(num_envs, columns), step),
            follows=self._stacks(lambda _: jnp.zeros((num_envs, columns), jnp.uint8), lambda: ()),
            newest=self._stacks(zeros(num_envs), lambda: ()),
            carry=jax.tree.map(zeros(num_envs, starts), carry),
            added=jnp.zeros(num_envs, jnp.int32),
            chances=Priorities(sum_tree.empty(num_envs, starts), jnp.ones(num_envs))
            if self.settings.prioritized
            else (),
        )

    def add(self, memory: ReplayState, steps: Step, carry: Carry = ()) -> ReplayState:
        """With the newest T timesteps, `[T, B, ...]`; `carry [B, ...]` at the first of them."""
        T = steps.timestep.reward.shape[0]
        columns, added = memory.steps.timestep.reward.shape[1], memory.added[0]
        most = columns - self.length - self._history - self.stride
        if most < T or T % self.stride:
            raise ConfigError(
                f"a replay of {columns} timesteps for each environment takes rollouts of at most "
                f"{most}, in multiples of {self.stride}, but rollout_length is {T}."
            )
        observation = steps.timestep.observation
        follows = self._follows(memory, observation)
        frames = self._stacks(lambda _, x: x[..., -1], lambda x: x, observation)
        timestep = dataclasses.replace(steps.timestep, observation=frames)
        steps = dataclasses.replace(steps, timestep=timestep)
        now = added % columns

        def write(ring: jax.Array, new: jax.Array) -> jax.Array:
            new = jnp.moveaxis(new, 0, 1)
            if columns % T == 0:  # never crosses the end
                return jax.lax.dynamic_update_slice_in_dim(ring, new, now, 1)
            places = (now + jnp.arange(T)) % columns
            return ring.at[:, places].set(new, mode="promise_in_bounds", unique_indices=True)

        slot = now // self.stride
        memory = dataclasses.replace(
            memory,
            steps=jax.tree.map(write, memory.steps, steps),
            follows=jax.tree.map(write, memory.follows, follows),
            newest=self._stacks(lambda _, x: x[-1], lambda _: (), observation),
            carry=jax.tree.map(lambda ring, x: ring.at[:, slot].set(x), memory.carry, carry),
            added=memory.added + T,
        )
        chances = self._renewed(memory, T) if isinstance(memory.chances, Priorities) else ()
        return dataclasses.replace(memory, chances=chances)

    def size(self, memory: ReplayState) -> jax.Array:
        """How many samples could start somewhere, i32, over all environments of this shard."""
        first, last = self._range(memory)
        starts = jnp.maximum(0, last // self.stride - -(-first // self.stride) + 1)
        return starts * memory.added.shape[0]

    def sample(self, memory: ReplayState, key: jax.Array, num: int) -> Sample:
        """`num` sequences; `size` must be above 0."""
        B, columns = memory.steps.timestep.reward.shape
        slots = columns // self.stride
        if isinstance(memory.chances, Priorities):
            rows, starts, shares = sum_tree.draw(memory.chances.priorities, key, num)
            weights = (shares * self.size(memory)) ** -self.settings.importance_exponent
            weights = weights / jnp.max(weights)
        else:
            row_key, start_key = jax.random.split(key)
            first, last = self._range(memory)
            first, last = -(-first // self.stride), last // self.stride
            rows = jax.random.randint(row_key, (num,), 0, B)
            starts = jax.random.randint(start_key, (num,), first, last + 1) % slots
            weights = jnp.ones(num)
        return Sample(self._trajectory(memory, rows, starts), weights, rows, starts)

    def reweighed(
        self, chances: Priorities | tuple[()], sample: Sample, priorities: jax.Array
    ) -> Priorities | tuple[()]:
        """Chances after what was sampled has new priorities `[N]`, such as absolute errors."""
        if not isinstance(chances, Priorities):
            return chances
        scaled = (priorities + 1e-6) ** self.settings.priority_exponent
        highest = jnp.maximum(jnp.max(chances.highest), jnp.max(scaled))
        return Priorities(
            sum_tree.put(chances.priorities, sample.rows, sample.starts, scaled),
            jnp.full_like(chances.highest, highest),
        )

    # --- where samples may start -----------------------------------------------------------------

    def _range(self, memory: ReplayState) -> tuple[jax.Array, jax.Array]:
        """The oldest and the newest timestep at which a sample may start, counted from the first
        ever added; the newest is the smaller where there is none."""
        columns, added = memory.steps.timestep.reward.shape[1], memory.added[0]
        oldest = jnp.where(added > columns, added - columns + self._history, 0)
        return oldest, added - self.length

    def _renewed(self, memory: ReplayState, T: int) -> Priorities:
        """After T more timesteps: starts whose samples became complete get the highest priority,
        those whose samples were overwritten none."""
        chances = cast(Priorities, memory.chances)
        B, columns = memory.steps.timestep.reward.shape
        slots = columns // self.stride
        newest = self._range(memory)[1]
        oldest = memory.added[0] + self._history - columns
        # From the first that became complete round the ring to the last that was overwritten.
        count = math.ceil((T + self.length + self._history) / self.stride)
        first = newest - T + 1
        times = (-(-first // self.stride) + jnp.arange(count)) * self.stride
        rows = jnp.repeat(jnp.arange(B), count)
        where = jnp.tile(times // self.stride % slots, B)
        times = jnp.tile(times, B)
        before = chances.priorities[0].at[rows, where].get(mode="promise_in_bounds")
        kept = jnp.where(times - columns < oldest, 0.0, before)
        complete = (times >= 0) & (times <= newest)
        values = jnp.where(complete, jnp.max(chances.highest), kept)
        tree = sum_tree.put(chances.priorities, rows, where, values)
        return Priorities(tree, chances.highest)

    # --- what a sample shows ---------------------------------------------------------------------

    def _trajectory(self, memory: ReplayState, rows: jax.Array, starts: jax.Array) -> Trajectory:
        times = (starts * self.stride)[None] + jnp.arange(self.length)[:, None]  # [L, N]
        timestep = memory.steps.timestep
        rest = dataclasses.replace(timestep, observation=())
        rest, action, extras, observation = (
            jax.tree.map(lambda ring: _read(ring, rows, times), kept)
            for kept in (rest, memory.steps.action, memory.steps.extras, timestep.observation)
        )
        observation = self._restacked(memory, observation, rows, times)
        # An episode that begins without an end was lost, see `sebulba.slot.finish`.
        lost = rest.first[1:] & (rest.discount[1:] > 0)
        last = rest.last.at[:-1].set(rest.last[:-1] | lost)
        steps = Step(dataclasses.replace(rest, observation=observation, last=last), action, extras)
        return Trajectory(
            steps=jax.tree.map(lambda x: x[:-1], steps),
            final=jax.tree.map(lambda x: x[-1], steps.timestep),
            carry=jax.tree.map(lambda ring: ring[rows, starts], memory.carry),
            final_carry=(),
        )

    # --- stacks of frames ------------------------------------------------------------------------

    @property
    def _history(self) -> int:
        """How many timesteps before it a sample needs for its stacks of frames."""
        leaves = jax.tree.leaves(self.spec.observation)
        return max((leaf.shape[-1] - 1 for leaf in leaves if leaf.stacked), default=0)

    def _stacks(self, function: Callable[..., Any], otherwise: Any, *trees: PyTree) -> PyTree:
        """`function(spec, *leaves)` of the stacked observations, `otherwise(*leaves)` of others."""

        def one(spec: ArraySpec, *leaves: Any) -> Any:
            return function(spec, *leaves) if spec.stacked else otherwise(*leaves)

        return jax.tree.map(one, self.spec.observation, *trees)

    def _follows(self, memory: ReplayState, observation: PyTree) -> PyTree:
        """How each of the new stacks `[T, B, ..., K]` follows from the one before, u8 `[T, B]`."""

        def one(_: ArraySpec, new: jax.Array, newest: jax.Array) -> jax.Array:
            axes = tuple(range(2, new.ndim))
            before = jnp.concatenate([newest[None], new[:-1]])
            continues = jnp.all(new[..., :-1] == before[..., 1:], axes)
            continues = continues.at[0].set(continues[0] & (memory.added > 0))
            copies = jnp.all(new[..., :-1] == new[..., -1:], axes)
            fresh = jnp.where(copies, COPIES, BLANK)
            return jnp.where(continues, CONTINUES, fresh).astype(jnp.uint8)

        return self._stacks(one, lambda *_: (), observation, memory.newest)

    def _restacked(
        self, memory: ReplayState, newest: PyTree, rows: jax.Array, times: jax.Array
    ) -> PyTree:
        """Whole stacks `[L, N, ..., K]` from their newest frames `[L, N, ...]`."""

        def one(
            spec: ArraySpec, frame: jax.Array, ring: jax.Array, follows: jax.Array
        ) -> jax.Array:
            frames, begun = [frame], jnp.zeros(times.shape, bool)
            for back in range(1, spec.shape[-1]):
                follow = _read(follows, rows, times - back + 1)
                blank = ~begun & (follow == BLANK)
                begun = begun | (follow != CONTINUES)
                keep, none = (_over(flag, frame) for flag in (begun, blank))
                older = jnp.where(keep, frames[-1], _read(ring, rows, times - back))
                frames.append(jnp.where(none, jnp.zeros_like(older), older))
            return _stacked(frames[::-1])

        return self._stacks(
            one, lambda x, *_: x, newest, memory.steps.timestep.observation, memory.follows
        )


def _read(ring: jax.Array, rows: jax.Array, times: jax.Array) -> jax.Array:
    """Of a ring `[B, C, ...]` the rows `[N]` at times `[L, N]`: `[L, N, ...]`."""
    return ring.at[rows[None], times % ring.shape[1]].get(mode="promise_in_bounds")


def _stacked(frames: list[jax.Array]) -> jax.Array:
    """Frames `[...]` along a new last axis."""
    if len(frames) != 4 or frames[0].dtype != jnp.uint8:
        return jnp.stack(frames, axis=-1)
    # Four bytes are written as one word, which a processor does four times as fast.
    words = [frame.astype(jnp.uint32) << (8 * i) for i, frame in enumerate(frames)]
    return jax.lax.bitcast_convert_type(words[0] | words[1] | words[2] | words[3], jnp.uint8)


def _over(flag: jax.Array, x: jax.Array) -> jax.Array:
    """A flag `[L, N]` with as many axes as x."""
    return flag.reshape(*flag.shape, *(1,) * (x.ndim - flag.ndim))
