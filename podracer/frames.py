"""Stacks of frames, from frames that are kept once (`ArraySpec.frame_stack`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped, UInt8

from podracer.devices.fused import is_for

# Source of the older frames of a stack: the previous stack, copies of its newest frame, or zeros.
CONTINUED, COPIED, BLANK = 0, 1, 2


def first_source(xp: Any, stack: Shaped[Array | np.ndarray, "B ..."]) -> UInt8[Array, "B"]:
    """Return the sources of stacks `[B, ..., K]` that begin an episode, by `xp`, as `numpy`.

    CONTINUED is where the older frames are neither copies nor blank: a life was lost.
    """
    axes = tuple(range(1, stack.ndim))
    copied = xp.all(stack[..., :-1] == stack[..., -1:], axes)
    blank = xp.all(stack[..., :-1] == 0, axes)
    source = xp.where(copied, COPIED, xp.where(blank, BLANK, CONTINUED))
    return source.astype(np.uint8)


def stack_frames(
    size: int, frame: Callable[[int], jax.Array], source: Callable[[int], jax.Array]
) -> jax.Array:
    """Return stacks `[*b, ..., size]` of frames `[*b, ...]`.

    `frame(age)` are the frames of so many steps before, and `source(age)`, u8 `[*b]`, the sources
    of the stacks of that time.
    """
    newest_first = [frame(0)]
    complete = jnp.zeros(source(0).shape, bool)
    for age in range(1, size):
        origin = source(age - 1)
        blank = ~complete & (origin == BLANK)
        complete = complete | (origin != CONTINUED)
        axes = range(blank.ndim, newest_first[0].ndim)
        repeat, zero = (jnp.expand_dims(flag, axes) for flag in (complete, blank))
        older = jnp.where(repeat, newest_first[-1], frame(age))
        newest_first.append(jnp.where(zero, jnp.zeros_like(older), older))
    frames = newest_first[::-1]
    if size != 4 or frames[0].dtype != jnp.uint8 or not is_for("cpu"):
        return jnp.stack(frames, axis=-1)
    # Four bytes are written as one word, which a CPU does four times as fast.
    words = [frame.astype(jnp.uint32) << (8 * i) for i, frame in enumerate(frames)]
    return jax.lax.bitcast_convert_type(words[0] | words[1] | words[2] | words[3], jnp.uint8)
