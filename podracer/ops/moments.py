"""Running means and variances, to normalize observations and rewards."""

# Types of JAX itself are partly unknown to pyright.
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from podracer.devices.reductions import global_mean, num_shards
from podracer.fields import struct, unchecked
from podracer.types import PyTree


@unchecked
@struct
class Moments:
    """Count, mean and variance of the items of a tree.

    Leaves that are no quantities, indices and truth values, have none: None in both trees.
    """

    count: Float32[Array, ""]
    """Number of items; f32, as it only weights means."""
    mean: PyTree
    """Tree of means, each with the shape of one item."""
    variance: PyTree
    """Tree of variances, each with the shape of one item."""


def init_moments(item: PyTree) -> Moments:
    """Return the moments of zero items; `item` is one, arrays or their specs."""

    def full(value: float) -> PyTree:
        return jax.tree.map(
            lambda x: jnp.full(x.shape, value, jnp.float32) if _is_quantity(x) else None, item
        )

    return Moments(jnp.float32(0), full(0.0), full(1.0))


def _is_quantity(leaf: Any) -> bool:
    return leaf.dtype != bool and getattr(leaf, "num_values", None) is None


def _map_quantities(function: Callable[..., jax.Array], mean: PyTree, *trees: PyTree) -> PyTree:
    """Map over a tree of moments and others; None where the first tree has None."""

    def apply(mean: Any, *leaves: Any) -> Any:
        return None if mean is None else function(mean, *leaves)

    return jax.tree.map(apply, mean, *trees, is_leaf=_is_none)


def _is_none(x: Any) -> bool:
    return x is None


def moments_of(
    items: PyTree, axis: str | None, weights: jax.Array | None = None, *, batch_axes: int = 2
) -> Moments:
    """Return the moments of a batch `[T, B, ...]` of every shard, with two all-reduces.

    The weights, f32 `[T, B]` or as the items, are 0 for what does not count, else 1; None counts
    all of them.
    """
    # Without the barrier XLA fuses the sums with whatever computed the items, and they round
    # differently: Anakin and Sebulba would differ in the last bit.
    items = jax.lax.optimization_barrier(items)
    items = jax.tree.map(lambda x: x.astype(jnp.float32), items)
    axes = tuple(range(batch_axes))
    share = None if weights is None else jnp.mean(weights, axes)

    def mean_over_batch(x: jax.Array) -> jax.Array:
        if weights is not None:
            x = jnp.expand_dims(weights, range(weights.ndim, x.ndim)) * x
        return jnp.mean(x, axes)

    def deviations(x: jax.Array, mean: jax.Array) -> jax.Array:
        return (x - jnp.expand_dims(mean, axes)) ** 2

    total, share = global_mean((jax.tree.map(mean_over_batch, items), share), axis)
    mean = _divide(total, share)
    squares = jax.tree.map(deviations, items, mean)
    mean_square = global_mean(jax.tree.map(mean_over_batch, squares), axis)
    size = math.prod(jax.tree.leaves(items)[0].shape[:batch_axes]) * num_shards(axis)
    count = jnp.float32(size) if share is None else jnp.float32(size) * share
    return Moments(count, mean, _divide(mean_square, share))


def _divide(tree: PyTree, share: jax.Array | None) -> PyTree:
    if share is None:
        return tree
    return jax.tree.map(lambda x: x / jnp.maximum(share, 1e-9), tree)


def merge(first: Moments, second: Moments) -> Moments:
    """Combine the moments of two sets of items.

    Source: Chan, Golub and LeVeque 1979, the pairwise combination of means and variances.
    """
    total = first.count + second.count
    share = second.count / jnp.maximum(total, 1.0)

    def combine(
        mean: jax.Array, variance: jax.Array, second_mean: jax.Array, second_variance: jax.Array
    ) -> jax.Array:
        variance_of_means = (second_mean - mean) ** 2 * share * (1 - share)
        return variance * (1 - share) + second_variance * share + variance_of_means

    return Moments(
        count=total,
        mean=_map_quantities(lambda m, m2: m + (m2 - m) * share, first.mean, second.mean),
        variance=_map_quantities(combine, first.mean, first.variance, second.mean, second.variance),
    )


def normalize(moments: Moments, items: PyTree, *, clip: float = 10.0) -> PyTree:
    """Return items `[*b, ...]` with mean 0 and variance 1 in each coordinate, clipped.

    Leaves that have no moments stay as they are.
    """

    def normalize_leaf(mean: Any, variance: Any, x: jax.Array) -> jax.Array:
        if mean is None:
            return x
        axes = tuple(range(x.ndim - mean.ndim))
        mean, variance = jnp.expand_dims(mean, axes), jnp.expand_dims(variance, axes)
        return jnp.clip((x - mean) * jax.lax.rsqrt(variance + 1e-8), -clip, clip)

    return jax.tree.map(normalize_leaf, moments.mean, moments.variance, items, is_leaf=_is_none)
