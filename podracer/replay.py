"""Replay buffer on the device.

Every environment has a ring of its newest C timesteps. Leaves are `[B, C, ...]`, environments
first, because that is the sharded axis: each device samples from its own environments. A sample is
a `Trajectory`, as a rollout is. Of stacks (`ArraySpec.frame_stack`) each frame is stored once.

The timestep after t others lies at t % C, the newest at `(num_added[0] - 1) % C` in all rows, and
`Buffer.trajectory_at` reads it. An agent's `replay` may be a subclass of `Replay` whose `build`
returns a buffer that samples otherwise: its `draw` chooses places, its `sample` also what is there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Float32, Int, Int32, Shaped

from podracer.devices.reductions import global_max
from podracer.devices.tiles import from_stored, to_stored
from podracer.environment import action_struct
from podracer.errors import ConfigError
from podracer.fields import bounded, struct, unchecked
from podracer.frames import BLANK, CONTINUED, COPIED, stack_frames
from podracer.ops import sum_tree
from podracer.schedules import Schedule, value_at
from podracer.types import ArraySpec, Carry, EnvironmentSpec, PyTree, Step, TimeStep, Trajectory

_MANY = 2**30  # timesteps of an environment, whose count then loses whole turns of the ring


@dataclasses.dataclass(frozen=True)
class Replay:
    """Replay buffer configuration."""

    capacity: int = bounded(100_000, low=1)
    """Number of timesteps that the buffer holds, over all environments."""
    batch_size: int = bounded(256, low=1)
    """Number of samples in an update, over all devices that average gradients."""
    updates_per_rollout: int = bounded(1, low=1)
    """Number of updates after each rollout."""
    warmup: int = bounded(1_000)
    """Minimum number of frames to collect before the first update."""
    prioritized: bool = False
    """Sample in proportion to the last TD error to the power of the priority exponent (Schaul et
    al. 2016, arXiv 1511.05952)."""
    priority_exponent: float = bounded(0.6, high=1.0)
    """Exponent alpha of the priorities, in [0, 1]: 0 samples uniformly, 1 in proportion."""
    importance_exponent: Schedule = bounded(0.4)
    """Exponent beta of the importance weights, at least 0: 0 for none, 1 for a full correction."""

    def build(
        self, spec: EnvironmentSpec, length: int, stride: int = 1, *, every_step: bool = False
    ) -> Buffer:
        """Return the buffer of an agent, see the fields of `Buffer`."""
        return Buffer(self, spec, length, stride, every_step)


@unchecked
@struct
class Priorities:
    """Priorities of the starts at which samples may begin."""

    tree: sum_tree.SumTree  # [B, C / stride], 0 where no sample may start
    largest: Float32[Array, "B"]  # the largest priority so far


@unchecked
@struct
class ReplayState:
    """Contents of a replay buffer. Leaves lead with B, the number of environments."""

    steps: Step  # [B, C, ...]; of a stack only the newest frame
    frame_source: PyTree  # u8 [B, C] for each stack of frames, else (): CONTINUED, COPIED or BLANK
    last_stack: PyTree  # [B, ..., K] for each stack of frames, the newest one, else ()
    carry: Carry  # [B, C / stride, ...], the agent's recurrent state at each start
    num_added: Int32[Array, "B"]  # timesteps added (see `_MANY`), the same for all environments
    priorities: Priorities | None  # None where sampling is uniform


@unchecked
@struct
class Sample:
    """Sampled sequences and their positions in the buffer."""

    trajectory: Trajectory  # L - 1 transitions between L timesteps, [L - 1, N, ...]
    weights: Float32[Array, "N"]  # importance weights, at most 1
    rows: Int[Array, "N"]  # environment of each sample
    starts: Int[Array, "N"]  # position of each sample's first timestep in the ring, by the stride


@dataclasses.dataclass(frozen=True)
class Buffer:
    """Pure functions of a `ReplayState`.

    Samples have `length` timesteps and may start at every `stride`-th timestep.
    """

    config: Replay
    spec: EnvironmentSpec
    length: int
    stride: int = 1
    every_step: bool = False  # whether losses are of all timesteps of a sample, or of its first

    def init(self, num_envs: int, *, extras: PyTree = (), carry: Carry = ()) -> ReplayState:
        """Return an empty buffer.

        `extras` and `carry` have the shapes and dtypes of `Step.extras` and `Trajectory.carry` for
        one environment. Raises `ConfigError` where no sample would fit.
        """
        if self.length < self.stride:
            raise ConfigError(
                f"samples of {self.length} timesteps that start at every {self.stride}th would "
                "leave some timesteps out."
            )
        ring_size = self.config.capacity // num_envs // self.stride * self.stride
        needed = self._smallest_ring(self.stride)
        if ring_size < needed:
            raise ConfigError(
                f"replay.capacity is {self.config.capacity}, {ring_size} timesteps for each of the "
                f"{num_envs} environments, but samples need at least {needed}: take at least "
                f"{num_envs * needed}."
            )

        def zeros(*axes: int) -> Any:
            return lambda x: jnp.zeros((*axes, *x.shape), x.dtype)

        flag: Any = ArraySpec((), jnp.bool_)
        number: Any = ArraySpec(())
        timestep = TimeStep(self._frames, number, number, flag, flag)
        step = Step(timestep, action_struct(self.spec), extras)
        num_starts = ring_size // self.stride
        priorities = None
        if self.config.prioritized:
            priorities = Priorities(sum_tree.empty(num_envs, num_starts), jnp.ones(num_envs))
        steps = jax.tree.map(zeros(num_envs, ring_size), step)
        stored = jax.tree.map(to_stored, steps.timestep.observation)
        return ReplayState(
            steps=steps.with_timestep(observation=stored),
            frame_source=self._map_stacks(
                lambda _: jnp.zeros((num_envs, ring_size), jnp.uint8), lambda: ()
            ),
            last_stack=self._map_stacks(zeros(num_envs), lambda: ()),
            carry=jax.tree.map(zeros(num_envs, num_starts), carry),
            num_added=jnp.zeros(num_envs, jnp.int32),
            priorities=priorities,
        )

    def add(self, state: ReplayState, steps: Step, carry: Carry = ()) -> ReplayState:
        """Add a rollout's steps `[T, B, ...]`; `carry [B, ...]` is the state at the first of them.

        The oldest timesteps are overwritten. All rollouts have the same T. Raises `ConfigError`
        where T is too large, or not a multiple of the stride.
        """
        T = steps.timestep.reward.shape[0]
        ring_size = _ring_size(state)
        if ring_size < (needed := self._smallest_ring(T)) or T % self.stride:
            raise ConfigError(
                f"a rollout_length of {T} needs a replay.capacity of {needed} for each environment "
                f"(here {ring_size}), and must be a multiple of {self.stride}."
            )
        observation = steps.timestep.observation
        frame_source = self._frame_source(state, observation)
        frames = self._map_stacks(lambda _, x: x[..., -1], lambda x: x, observation)
        position = state.num_added[0] % ring_size

        def write(ring: Shaped[Array, "B C ..."], new: Shaped[Array, "T B ..."]) -> jax.Array:
            new = jnp.moveaxis(new, 0, 1)
            if ring_size % T == 0:  # never crosses the end
                return jax.lax.dynamic_update_slice_in_dim(ring, new, position, 1)
            positions = (position + jnp.arange(T)) % ring_size
            return ring.at[:, positions].set(new, mode="promise_in_bounds", unique_indices=True)

        start = position // self.stride
        rings = state.steps.timestep.observation
        rings = jax.tree.map(write, rings, jax.tree.map(to_stored, frames))
        without_frames = (x.with_timestep(observation=()) for x in (state.steps, steps))
        num_added, turns = state.num_added + T, _MANY // 2 // ring_size
        state = dataclasses.replace(
            state,
            steps=jax.tree.map(write, *without_frames).with_timestep(observation=rings),
            frame_source=jax.tree.map(write, state.frame_source, frame_source),
            last_stack=self._map_stacks(lambda _, x: x[-1], lambda _: (), observation),
            carry=jax.tree.map(lambda ring, x: ring.at[:, start].set(x), state.carry, carry),
            num_added=jnp.where(num_added < _MANY, num_added, num_added - turns * ring_size),
        )
        if state.priorities is None:
            return state
        priorities = self._refresh_priorities(state, state.priorities, T)
        return dataclasses.replace(state, priorities=priorities)

    def size(self, state: ReplayState) -> Int32[Array, ""]:
        """Return the number of starts of possible samples, over the shard's environments."""
        first, last = self._start_range(state)
        num_starts = jnp.maximum(0, last // self.stride - -(-first // self.stride) + 1)
        return num_starts * state.num_added.shape[0]

    def sample(
        self, state: ReplayState, key: Array, N: int, frames: ArrayLike = 0, axis: str | None = None
    ) -> Sample:
        """Sample N sequences, by priority or uniformly; `size` must be above 0.

        `frames` is the time of the importance exponent's schedule; shards of `axis` share a batch.
        """
        rows, starts, probabilities = self.draw(state, key, N)
        trajectory = self.trajectory_at(state, rows, starts)
        if probabilities is None:
            return Sample(trajectory, jnp.ones(N), rows, starts)
        importance_exponent = value_at(self.config.importance_exponent, jnp.uint32(frames))
        weights = (probabilities * self.size(state)) ** -importance_exponent
        # Scaled by samples that no loss masks as a whole.
        teaches = True if self.every_step else ~trajectory.steps.timestep.last[0]
        largest = global_max(jnp.max(jnp.where(teaches, weights, 0.0)), axis)
        return Sample(trajectory, jnp.minimum(weights / largest, 1.0), rows, starts)

    def draw(
        self, state: ReplayState, key: Array, N: int
    ) -> tuple[Int[Array, "N"], Int[Array, "N"], Float[Array, "N"] | None]:
        """Draw the rows and starts of N samples, and their probabilities, None if all are equal."""
        if state.priorities is not None:
            return sum_tree.sample(state.priorities.tree, key, N)
        row_key, start_key = jax.random.split(key)
        first, last = self._start_range(state)
        first, last = -(-first // self.stride), last // self.stride
        rows = jax.random.randint(row_key, (N,), 0, state.num_added.shape[0])
        starts = jax.random.randint(start_key, (N,), first, last + 1)
        return rows, starts % (_ring_size(state) // self.stride), None

    def update_priorities(
        self, priorities: Priorities | None, sample: Sample, errors: Float[Array, "N"]
    ) -> Priorities | None:
        """Return priorities updated with a sample's absolute errors; None stays None.

        A priority is `(|error| + 1e-6) ** priority_exponent` (Schaul et al. 2016, section 3.3).
        """
        if priorities is None:
            return None
        scaled = (errors + 1e-6) ** self.config.priority_exponent
        largest = jnp.maximum(jnp.max(priorities.largest), jnp.max(scaled))
        return Priorities(
            sum_tree.update(priorities.tree, sample.rows, sample.starts, scaled),
            jnp.full_like(priorities.largest, largest),
        )

    def _start_range(self, state: ReplayState) -> tuple[Int32[Array, ""], Int32[Array, ""]]:
        """Return the oldest and the newest timestep at which a sample may start.

        Timesteps are counted from the first ever added; the newest is the smaller where no sample
        may start.
        """
        ring_size, num_added = _ring_size(state), state.num_added[0]
        oldest = jnp.where(num_added > ring_size, num_added - ring_size + self._history, 0)
        return oldest, num_added - self.length

    def _refresh_priorities(self, state: ReplayState, priorities: Priorities, T: int) -> Priorities:
        """Update the priorities of the starts that the newest T timesteps have changed.

        Starts whose samples became complete get the largest priority so far, and those whose
        samples were overwritten get 0.
        """
        B, ring_size = state.num_added.shape[0], _ring_size(state)
        oldest, newest = self._start_range(state)
        # From the first start that became complete, around the ring, to the last overwritten one.
        count = math.ceil((T + self.length + self._history) / self.stride)
        first = newest - T + 1
        times = (-(-first // self.stride) + jnp.arange(count)) * self.stride
        rows = jnp.repeat(jnp.arange(B), count)
        starts = jnp.tile(times // self.stride % (ring_size // self.stride), B)
        times = jnp.tile(times, B)
        current = priorities.tree[0].at[rows, starts].get(mode="promise_in_bounds")
        old_values = jnp.where(times - ring_size < oldest, 0.0, current)
        complete = (times >= 0) & (times <= newest)
        values = jnp.where(complete, jnp.max(priorities.largest), old_values)
        tree = sum_tree.update(priorities.tree, rows, starts, values)
        return Priorities(tree, priorities.largest)

    # --- from the rings to a trajectory ----------------------------------------------------------

    def trajectory_at(
        self, state: ReplayState, rows: Int[Array, "N"], starts: Int[Array, "N"]
    ) -> Trajectory:
        """Return samples `[L - 1, N, ...]` from the given rows and starts."""
        times = (starts * self.stride)[None] + jnp.arange(self.length)[:, None]  # [L, N]
        observation = self._observation(state, rows, times)
        without_frames = state.steps.with_timestep(observation=())
        steps = jax.tree.map(lambda x: _read(x, rows, times), without_frames)
        signals = steps.timestep
        # Mask the last step of an episode that was lost.
        next_signals = jax.tree.map(lambda x: x[1:], signals)
        is_lost = next_signals.begins_after_loss(signals.last[:-1])
        last = signals.last.at[:-1].set(signals.last[:-1] | is_lost)
        steps = steps.with_timestep(observation=observation, last=last)
        return Trajectory(
            steps=jax.tree.map(lambda x: x[:-1], steps),
            final=jax.tree.map(lambda x: x[-1], steps.timestep),
            carry=jax.tree.map(lambda ring: ring[rows, starts], state.carry),
            final_carry=(),
        )

    def _smallest_ring(self, rollout_length: int) -> int:
        """Return how many timesteps of an environment must fit for samples between two rollouts."""
        timesteps = rollout_length + self.length + self._history + self.stride
        return math.ceil(timesteps / self.stride) * self.stride

    # --- stacks of frames ------------------------------------------------------------------------

    @property
    def _history(self) -> int:
        """Number of timesteps before a sample that its stacks of frames need."""
        leaves = jax.tree.leaves(self.spec.observation)
        return max((leaf.shape[-1] - 1 for leaf in leaves if leaf.frame_stack), default=0)

    @property
    def _frames(self) -> PyTree:
        """Specifications of observations, of stacks that of a frame."""
        return jax.tree.map(
            lambda spec: ArraySpec(spec.shape[:-1], spec.dtype) if spec.frame_stack else spec,
            self.spec.observation,
        )

    def _map_stacks(self, function: Callable[..., Any], otherwise: Any, *trees: PyTree) -> PyTree:
        """Map `function(spec, *leaves)` over stacks of frames, `otherwise(*leaves)` over others."""

        def apply(spec: ArraySpec, *leaves: Any) -> Any:
            return function(spec, *leaves) if spec.frame_stack else otherwise(*leaves)

        return jax.tree.map(apply, self.spec.observation, *trees)

    def _frame_source(self, state: ReplayState, observation: PyTree) -> PyTree:
        """Return the source of the older frames of each stack `[T, B, ..., K]`, u8 `[T, B]`."""

        def source(_: ArraySpec, new: jax.Array, last_stack: jax.Array) -> jax.Array:
            axes = tuple(range(2, new.ndim))
            previous = jnp.concatenate([last_stack[None], new[:-1]])
            continued = jnp.all(new[..., :-1] == previous[..., 1:], axes)
            continued = continued.at[0].set(continued[0] & (state.num_added > 0))
            copied = jnp.all(new[..., :-1] == new[..., -1:], axes)
            initial = jnp.where(copied, COPIED, BLANK)
            return jnp.where(continued, CONTINUED, initial).astype(jnp.uint8)

        return self._map_stacks(source, lambda *_: (), observation, state.last_stack)

    def _observation(
        self, state: ReplayState, rows: Int[Array, "N"], times: Int[Array, "L N"]
    ) -> PyTree:
        """Return the observations `[L, N, ...]` of consecutive times, with whole stacks."""

        def read(source: jax.Array, spec: ArraySpec, age: int) -> jax.Array:
            return from_stored(_read(source, rows, times - age), spec)

        def stack(spec: ArraySpec, reader: Any, frame_source: jax.Array) -> jax.Array:
            return stack_frames(
                spec.shape[-1], reader, lambda age: _read(frame_source, rows, times - age)
            )

        source = state.steps.timestep.observation
        readers = jax.tree.map(lambda *x: partial(read, *x), source, self._frames)
        return self._map_stacks(stack, lambda x, _: x(0), readers, state.frame_source)


def _ring_size(state: ReplayState) -> int:
    return state.steps.timestep.reward.shape[1]


def _read(
    ring: Shaped[Array, "B C ..."], rows: Int[Array, "N"], times: Int[Array, "L N"]
) -> Shaped[Array, "L N ..."]:
    return ring.at[rows[None], times % ring.shape[1]].get(mode="promise_in_bounds")
