"""Lax primitives that ONNX has no operator for, as functions of others."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from podracer.errors import ConfigError


def _log1p(x: jax.Array, **_: Any) -> jax.Array:
    """Return `x log(u) / (u - 1)` with `u = 1 + x`, which is exact where u rounds.

    Source: Kahan, quoted in Goldberg 1991, theorem 4.
    """
    u = 1 + x
    quotient = x / jnp.where(u == 1, 1, u - 1)
    exact = jnp.where(u == 1, x, jnp.log(u) * quotient)
    return jnp.where(jnp.abs(x) == jnp.inf, jnp.log(u), exact)


def _expm1(x: jax.Array, **_: Any) -> jax.Array:
    exp = jnp.exp(x)
    return jnp.where(x > 20, exp, jnp.tanh(x / 2) * (exp + 1))  # the product would overflow


# Coefficients of Giles 2010, "Approximating the erfinv function", as XLA has them.
_ERF_INV_CENTER = (
    2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087,
    -0.00125372503, -0.00417768164, 0.246640727, 1.50140941,
)  # fmt: skip
_ERF_INV_TAIL = (
    -0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773,
    -0.0076224613, 0.00943887047, 1.00167406, 2.83297682,
)  # fmt: skip


def _erf_inv(x: jax.Array, **_: Any) -> jax.Array:
    w = -jnp.log(1 - x * x)
    center = functools.reduce(lambda y, c: y * (w - 2.5) + c, _ERF_INV_CENTER)
    tail = functools.reduce(lambda y, c: y * (jnp.sqrt(w) - 3) + c, _ERF_INV_TAIL)
    return jnp.where(w < 5, center, tail) * x


def _bits_as_float(bits: jax.Array, *, new_dtype: Any) -> jax.Array:
    """Read uint32 as float32 of the positive normal numbers that random bits are made into."""
    if (bits.dtype, new_dtype) != (jnp.uint32, jnp.float32):
        raise ConfigError(f"ONNX cannot read the bits of {bits.dtype} as {new_dtype}.")
    exponent = (bits >> 23).astype(jnp.float32) - 127
    fraction = (bits & (2**23 - 1)).astype(jnp.float32) * 2.0**-23
    return jnp.exp2(exponent) * (1 + fraction)


def _threefry(
    key: jax.Array, other_key: jax.Array, x: jax.Array, y: jax.Array, **_: Any
) -> tuple[jax.Array, jax.Array]:
    """Return a block of Threefry-2x32 with 20 rounds (Salmon et al. 2011)."""
    keys = key, other_key, key ^ other_key ^ jnp.uint32(0x1BD11BDA)
    x, y = x + key, y + other_key
    for group in range(5):
        for bits in ((13, 15, 26, 6), (17, 29, 16, 24))[group % 2]:
            x = x + y
            y = (y << bits | y >> (32 - bits)) ^ x
        x, y = x + keys[(group + 1) % 3], y + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x, y


COMPOSITES: dict[str, Callable[..., Any]] = {
    "ne": lambda x, y, **_: ~(x == y),
    "square": lambda x, **_: x * x,
    "rsqrt": lambda x, **_: 1 / jnp.sqrt(x),
    "exp2": lambda x, **_: 2.0**x,
    "log1p": _log1p,
    "expm1": _expm1,
    "erfc": lambda x, **_: 1 - jax.lax.erf(x),  # exact to the rounding of 1
    "erf_inv": _erf_inv,
    "is_finite": lambda x, **_: jnp.abs(x) < jnp.inf,
    "clamp": lambda low, x, high, **_: jnp.minimum(jnp.maximum(x, low), high),
    "reduce_and": lambda x, *, axes, **_: jnp.min(x.astype(jnp.int32), axes) > 0,
    "reduce_or": lambda x, *, axes, **_: jnp.max(x.astype(jnp.int32), axes) > 0,
    "stack": lambda *rows, axis, **_: jnp.concatenate(
        [jnp.expand_dims(x, axis) for x in rows], axis
    ),
    "unstack": lambda x, *, axis, **_: [
        jax.lax.index_in_dim(x, i, axis, keepdims=False) for i in range(x.shape[axis])
    ],
    "bitcast_convert_type": _bits_as_float,
    "threefry2x32": _threefry,
}
"""Functions of the inputs of primitives, and of their parameters, by name."""
