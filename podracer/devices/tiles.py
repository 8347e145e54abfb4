"""Rings of large frames as a TPU keeps them: whole tiles of words."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Shaped

from podracer.devices.fused import is_for

_TILE = (8, 128)  # words of 32 bits that a TPU keeps together


def to_stored(x: Any) -> Any:
    """Return an array `[X, Y, ...]` in the form of a ring: large ones on a TPU as whole tiles.

    A ring of another form would be copied to one with padded frames before samples are read.
    """
    parts, lead = 4 // x.dtype.itemsize, x.shape[:2]
    tile = parts * math.prod(_TILE)
    if not is_for("tpu") or 4 * math.prod(x.shape[2:]) < 3 * tile:
        return x
    x = x.astype(jnp.uint8) if x.dtype == bool else x
    flat = x.reshape(*lead, -1)
    flat = jnp.pad(flat, ((0, 0), (0, 0), (0, -flat.shape[-1] % tile)))
    flat = flat.reshape(*lead, -1, parts) if parts > 1 else flat
    return jax.lax.bitcast_convert_type(flat, jnp.uint32).reshape(*lead, -1, _TILE[1])


def from_stored(stored: Shaped[Array, "X Y ..."], spec: Any) -> Shaped[Array, "X Y ..."]:
    """Return what `to_stored` was given; `spec` has shape and dtype of one timestep."""
    if (stored.shape[2:], stored.dtype) == (tuple(spec.shape), spec.dtype):
        return stored
    dtype, lead = jnp.dtype(jnp.uint8 if spec.dtype == bool else spec.dtype), stored.shape[:2]
    flat = jax.lax.bitcast_convert_type(stored, dtype).reshape(*lead, -1)
    return flat[..., : math.prod(spec.shape)].reshape(*lead, *spec.shape).astype(spec.dtype)
