"""Max-pooling whose gradient is elementwise.

JAX's gradient of `reduce_window` scatters, which a CPU does one number at a time: with it, half of
a residual network's gradient was pooling. Here the place of each maximum is kept, as a byte.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def max_pool(x: Float[Array, "B H W C"]) -> Float[Array, "B H2 W2 C"]:
    """Return the maxima of windows of 3x3 with stride 2, padded at the edges ("SAME").

    The gradient goes to the first maximum of a window, row by row.
    """
    return _pool(_pool(x, 2, x.shape[2]), 1, x.shape[1])


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _pool(x: jax.Array, axis: int, size: int) -> jax.Array:
    return _keep(x, axis, size)[0]


def _keep(x: jax.Array, axis: int, size: int) -> tuple[jax.Array, jax.Array]:
    """Return the maxima of three along an axis of `size`, and the places 0, 1 or 2 of the first."""
    outputs, padding = _geometry(size)
    x = _pad(x, axis, padding, 2 * outputs + 1 - size - padding, -jnp.inf)
    parts = [jax.lax.slice_in_dim(x, i, i + 2 * outputs - 1, 2, axis) for i in range(3)]
    y = jnp.maximum(jnp.maximum(parts[0], parts[1]), parts[2])
    place = jnp.where(parts[0] == y, 0, jnp.where(parts[1] == y, 1, 2)).astype(jnp.int8)
    return y, place


def _gradient(axis: int, size: int, place: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    """Write even and odd inputs beside each other: window i has the inputs 2i, 2i + 1, 2i + 2."""
    outputs, padding = _geometry(size)
    first, second, third = (jnp.where(place == i, g, 0.0) for i in range(3))
    even = _pad(first, axis, 0, 1, 0.0) + _pad(third, axis, 1, 0, 0.0)
    odd = _pad(second, axis, 0, 1, 0.0)
    pairs = jnp.stack([even, odd], axis + 1)
    dx = pairs.reshape(*g.shape[:axis], 2 * (outputs + 1), *g.shape[axis + 1 :])
    return (jax.lax.slice_in_dim(dx, padding, padding + size, axis=axis),)


def _geometry(size: int) -> tuple[int, int]:
    """Return the number of windows, and how many inputs are padded before the first."""
    outputs = (size + 1) // 2
    return outputs, (2 * outputs + 1 - size) // 2


def _pad(x: jax.Array, axis: int, start: int, end: int, value: float) -> jax.Array:
    widths = [(start, end) if i == axis else (0, 0) for i in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=value)


_pool.defvjp(_keep, _gradient)
