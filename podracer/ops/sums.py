"""Sums of float32 that keep what rounding would lose.

A `TwoFloats` is a number of about 48 bits. Compilers fuse a product and a sum, and then round once
instead of twice, or do not; so the products here are exact wherever an error is computed from them.
"""

# Types of JAX itself are partly unknown to pyright.
# pyright: reportUnknownArgumentType=false, reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from podracer.fields import struct, unchecked

_UNIT = 2.0**-10  # prices are integers of it


def compensated_sum(
    total: Float[Array, "*b"], error: Float[Array, "*b"], x: Float[Array, "*b"]
) -> tuple[Float[Array, "*b"], Float[Array, "*b"]]:
    """Return a running sum after one more summand, and by how much rounding has made it too large.

    Source: Kahan 1965, "Further remarks on reducing truncation errors".
    """
    x = x - error
    larger = total + x
    return larger, (larger - total) - x


@unchecked
@struct
class TwoFloats:
    """Sum of two float32: the nearest to a number, and what it lacks."""

    high: Float[Array, "*b"]
    low: Float[Array, "*b"]

    def plus(self, *summands: Float[Array, "*b"]) -> TwoFloats:
        """Return the sum with numbers; the errors of all additions but the smallest are kept.

        Source: Knuth 1969, section 4.2.2, theorem B.
        """
        high, low = self.high, self.low
        for x in summands:
            total = high + x
            rounded = total - high
            low = low + ((high - (total - rounded)) + (x - rounded))
            high = total
        total = high + low
        return TwoFloats(total, low - (total - high))

    def minus(self, number: TwoFloats) -> TwoFloats:
        """Return the difference of two numbers."""
        return self.plus(-number.high, -number.low)

    def times(self, factor: float) -> TwoFloats:
        """Return the product with a constant, which is taken as a float64."""
        nearest = np.float32(factor)
        small = self.high * np.float32(factor - float(nearest)) + self.low * nearest
        products = (x * y for x in _halves(self.high) for y in _halves(jnp.asarray(nearest)))
        return two_floats(small).plus(*products)

    def to_float64(self) -> Any:
        """Return the numbers, on the host."""
        return np.add(self.high, self.low, dtype=np.float64)

    def __float__(self) -> float:
        """Return a single number, on the host."""
        return float(self.to_float64())


def two_floats(x: float | Float[Array, "*b"]) -> TwoFloats:
    """Return a constant, or float32, in two parts."""
    low = x - float(np.float32(x)) if isinstance(x, float) else 0.0
    high = jnp.asarray(x, jnp.float32)
    return TwoFloats(high, jnp.full_like(high, low))


def sum_of_pairs(high: Float[Array, "*b"], low: Float[Array, "*b"]) -> Float[Array, ""]:
    """Return the sum of all numbers, each in two parts."""

    def add(x: tuple[jax.Array, jax.Array], y: tuple[jax.Array, jax.Array]) -> Any:
        total = TwoFloats(*x).plus(*y)
        return total.high, total.low

    zero = np.float32(0)
    return jax.lax.reduce((high, low), (zero, zero), add, range(high.ndim))[0]


def value_of(count: Int[Array, "*b D"], price: Float[Array, "*b D"]) -> TwoFloats:
    """Return the sum of `count * price`, neither of them negative, over the last axis.

    Prices are whole units and a fraction. The units are counted as float32, and exactly by integers
    that overflow: the difference of both tells what rounding has lost. For counts below 2^31, and
    values below a million times 2^31.
    """
    units = jnp.minimum(jnp.floor(price / _UNIT), 2.0**30)
    fraction = jnp.sum(count * (price - units * _UNIT), axis=-1)
    nearest = jnp.floor(jnp.sum(count * units, axis=-1))
    exact = jnp.sum(count * units.astype(jnp.int32), axis=-1)
    upper = jnp.floor(nearest * 2.0**-24)
    lower = nearest - upper * 2.0**24
    excess = exact - (upper.astype(jnp.int32) << 24) - lower.astype(jnp.int32)
    return two_floats(nearest * _UNIT).plus(excess.astype(jnp.float32) * _UNIT, fraction)


def exact_products(
    count: Int[Array, "*b"], price: Float[Array, "*b"]
) -> Sequence[Float[Array, "*b"]]:
    """Return exact numbers whose sum is `count * price`, for counts from 0 to 2^22 - 1."""
    lower = count & 2**11 - 1
    parts = [x.astype(jnp.float32) for x in (count - lower, lower)]
    return [x * y for x in parts for y in _halves(price)]


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return float32 as a sum of two of at most 12 significant bits each."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    upper = jax.lax.bitcast_convert_type(bits & np.uint32(0xFFFFF000), jnp.float32)
    return upper, x - upper
