"""Timesteps on their way to a device: one array of all small numbers, and one for each picture.

Each array that a program takes costs 1 to 2 microseconds a call on a CPU (decision 0014), and each
one that it writes costs a GPU a kernel. The newest frame of a stack is new, so it goes up alone.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Shaped, UInt8, UInt32

from podracer.frames import CONTINUED, first_source
from podracer.types import EnvironmentSpec, PyTree, TimeStep, blank_timestep

STACK, LARGE, SMALL = range(3)
_SMALL_SIZE = 256  # numbers of an observation that are at most columns
_WORDS = {size: np.dtype(f"u{size}") for size in (1, 2, 4)}

Packed = tuple[list[Any], Any]
"""Packed timestep: frames and other large arrays `[b, ...]`, and columns, u32 `[b, C]`."""


@dataclasses.dataclass(frozen=True)
class TimestepLayout:
    """Layout of packed timesteps.

    The columns are the number of the step, the bits of reward, discount, `first` and `last`, the
    source of each stack of frames, and the small leaves of the observation.
    """

    spec: EnvironmentSpec

    @functools.cached_property
    def kinds(self) -> list[int]:
        """Kind of each leaf of an observation: STACK, LARGE or SMALL."""
        return [
            STACK if leaf.frame_stack else SMALL if math.prod(leaf.shape) <= _SMALL_SIZE else LARGE
            for leaf in jax.tree.leaves(self.spec.observation)
        ]

    @functools.cached_property
    def columns(self) -> list[Any]:
        """Shape and dtype of one row of each array in the columns."""
        stacks, _, small = self.split(self.spec.observation)
        dtypes = [np.uint32, np.float32, np.float32, np.bool_, np.bool_, *[np.uint8] * len(stacks)]
        return [*(jax.ShapeDtypeStruct((), dtype) for dtype in dtypes), *small]

    @functools.cached_property
    def width(self) -> int:
        """Number of columns."""
        return sum(math.prod(x.shape) for x in self.columns)

    def split(self, observation: PyTree) -> list[list[Any]]:
        """Return the leaves of an observation by kind."""
        pairs = [*zip(self.kinds, jax.tree.leaves(observation), strict=True)]
        return [[x for k, x in pairs if k == kind] for kind in (STACK, LARGE, SMALL)]

    def merge(self, *groups: Sequence[Any]) -> PyTree:
        """Return the observation of the leaves of each kind."""
        leaves = [iter(group) for group in groups]
        structure = jax.tree.structure(self.spec.observation)
        return jax.tree.unflatten(structure, [next(leaves[kind]) for kind in self.kinds])

    def pack(self, xp: Any, timestep: TimeStep, unmasked: TimeStep, step: ArrayLike) -> Packed:
        """Return a timestep `[b, ...]` packed, with the number of its step; `xp` is its `numpy`.

        Frames are those of the `unmasked` timestep, so that stacks go on behind masked rows.
        """
        _, arrays, small = self.split(timestep.observation)
        stacks, _, _ = self.split(unmasked.observation)
        sources = [_sources(xp, stack, unmasked.first) for stack in stacks]
        signals = [timestep.reward, timestep.discount, timestep.first, timestep.last]
        large = [*(stack[..., -1] for stack in stacks), *arrays]
        parts, num_envs = to_words([*signals, *sources, *small]), len(timestep.reward)
        if xp is not np:
            steps = xp.full((num_envs, 1), step, np.uint32)
            return large, xp.concatenate([x.astype(np.uint32) for x in (steps, *parts)], axis=1)
        columns, end = np.empty((num_envs, self.width), np.uint32), 1
        columns[:, 0] = step
        for part in parts:
            start, end = end, end + part.shape[1]
            columns[:, start:end] = part
        return large, columns

    def unpack(
        self, large: Sequence[Any], columns: UInt32[Array, "*t b C"]
    ) -> tuple[TimeStep, list[UInt8[Array, "*t b"]], UInt32[Array, "*t b"]]:
        """Return timesteps with frames in place of stacks, the stacks' sources, and steps."""
        step, reward, discount, first, last, *leaves = from_words(columns, self.columns)
        count = self.kinds.count(STACK)
        observation = self.merge(large[:count], large[count:], leaves[count:])
        return TimeStep(observation, reward, discount, first, last), leaves[:count], step

    def sources(self, columns: UInt32[Array, "*t b C"]) -> list[UInt8[Array, "*t b"]]:
        """Return the source of each stack of frames; there may be other columns behind these."""
        return from_words(columns, self.columns)[5 : 5 + self.kinds.count(STACK)]

    def with_stacks(
        self, timestep: TimeStep, masked: Bool[Array, "*t b"], stacks: Sequence[jax.Array]
    ) -> TimeStep:
        """Return unpacked timesteps with stacks in place of frames, zeros in masked rows."""

        def zero(x: jax.Array) -> jax.Array:
            rows = jnp.expand_dims(masked, range(masked.ndim, x.ndim))
            return jnp.where(rows, jnp.zeros_like(x), x)

        _, arrays, small = self.split(timestep.observation)
        observation = self.merge([zero(stack) for stack in stacks], arrays, small)
        return dataclasses.replace(timestep, observation=observation)

    def zeros(self, num_envs: int) -> Packed:
        """Return a packed timestep whose observation is zeros, to compile with."""
        timestep = jax.tree.map(np.asarray, blank_timestep(self.spec, num_envs))
        return self.pack(np, timestep, timestep, 0)


def _sources(xp: Any, stack: Any, first: Any) -> UInt8[Array | np.ndarray, " b"]:
    """Return the sources of stacks `[b, ..., K]`, which go on where no episode begins."""
    if xp is not np:
        return xp.where(first, first_source(xp, stack), CONTINUED)
    sources, rows = np.full(len(first), CONTINUED, np.uint8), np.flatnonzero(first)
    if rows.size:
        sources[rows] = first_source(np, stack[rows])
    return sources


def to_words(arrays: Sequence[Any]) -> list[Any]:
    """Return the bits of arrays `[b, ...]` as unsigned numbers `[b, n]`."""
    flat = [x.reshape(len(x), -1) for x in arrays]
    return [x if x.dtype.kind in "bu" else x.view(_WORDS[x.dtype.itemsize]) for x in flat]


def from_words(
    columns: UInt32[Array, "*t b C"], rows: Sequence[Any]
) -> list[Shaped[Array, "*t b ..."]]:
    """Return the arrays of `to_words`; `rows` has shape and dtype of a row of each."""
    arrays, end = [], 0
    for row in rows:
        dtype, start, end = np.dtype(row.dtype), end, end + math.prod(row.shape)
        words = columns[..., start:end].reshape(*columns.shape[:-1], *row.shape)
        words = words.astype(_WORDS[dtype.itemsize])
        arrays.append(words > 0 if dtype.kind == "b" else words.view(dtype))
    return arrays
