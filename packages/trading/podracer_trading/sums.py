"""Sums of money in float32 that keep what rounding would lose.

A `TwoFloats` is a number of about 48 bits. Compilers fuse a product and a sum, and then round once
instead of twice, or do not; so the products here are exact wherever an error is computed from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.fields import struct
from podracer.ops.sums import add_to_pair

_UNIT = 2.0**-10  # prices are integers of it


@struct
class TwoFloats:
    """Sum of two float32: the nearest to a number, and what it lacks, `[*b]`."""

    high: jax.Array
    low: jax.Array

    def plus(self, *summands: jax.Array) -> TwoFloats:
        """Return the sum with numbers."""
        return TwoFloats(*add_to_pair((self.high, self.low), *summands))

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


def two_floats(x: float | jax.Array) -> TwoFloats:
    """Return a constant, or float32, in two parts."""
    low = x - float(np.float32(x)) if isinstance(x, int | float) else 0.0
    high = jnp.asarray(x, jnp.float32)
    return TwoFloats(high, jnp.full_like(high, low))


def value_of(count: jax.Array, price: jax.Array) -> TwoFloats:
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


def exact_products(count: jax.Array, price: jax.Array) -> Sequence[jax.Array]:
    """Return exact numbers whose sum is `count * price`, for counts from 0 to 2^22 - 1."""
    lower = count & 2**11 - 1
    parts = [x.astype(jnp.float32) for x in (count - lower, lower)]
    return [x * y for x in parts for y in _halves(price)]


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return float32 as a sum of two of at most 12 significant bits each."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    upper = jax.lax.bitcast_convert_type(bits & np.uint32(0xFFFFF000), jnp.float32)
    return upper, x - upper
