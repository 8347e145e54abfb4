"""Sums of float32 that keep what rounding would lose."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float


def compensated_sum(
    total: Float[Array, "*b"], error: Float[Array, "*b"], x: Float[Array, "*b"]
) -> tuple[Float[Array, "*b"], Float[Array, "*b"]]:
    """Return a running sum after one more summand, and by how much rounding has made it too large.

    Source: Kahan 1965, "Further remarks on reducing truncation errors".
    """
    x = x - error
    larger = total + x
    return larger, (larger - total) - x


def add_to_pair(pair: tuple[Any, Any], *summands: Any) -> tuple[Any, Any]:
    """Return the sum of numbers and a number of about 48 bits: a float32 and what it lacks.

    All are arrays of JAX or of NumPy. The errors of all additions but the smallest are kept.
    Source: Knuth 1969, section 4.2.2, theorem B.
    """
    high, low = pair
    for x in summands:
        total = high + x
        rounded = total - high
        low = low + ((high - (total - rounded)) + (x - rounded))
        high = total
    total = high + low
    return total, low - (total - high)


def sum_of_pairs(high: Float[Array, "*b"], low: Float[Array, "*b"]) -> Float[Array, ""]:
    """Return the sum of all numbers, each in two parts."""
    zero = np.float32(0)
    return jax.lax.reduce(
        (high, low), (zero, zero), lambda x, y: add_to_pair(x, *y), range(high.ndim)
    )[0]
