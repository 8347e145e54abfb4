"""Running means and variances, to normalize observations and rewards."""

# Types of JAX itself are partly unknown to pyright.
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from podracer.mesh import global_mean, num_shards
from podracer.types import PyTree, struct, unchecked


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
    """Return the moments of zero items; `item` is a tree of arrays or `ArraySpec`s of one item."""

    def full(value: float) -> PyTree:
        return jax.tree.map(
            lambda x: jnp.full(x.shape, value, jnp.float32) if _is_quantity(x) else None, item
        )

    return Moments(jnp.float32(0), full(0.0), full(1.0))


def _is_quantity(leaf: Any) -> bool:
    return leaf.dtype != bool and getattr(leaf, "num_values", None) is None


def _map_quantities(function: Callable[..., jax.Array], mean: PyTree, *others: PyTree) -> PyTree:
    """Map over a tree of moments and others; None where the first tree has None."""

    def apply(mean: Any, *others: Any) -> Any:
        return None if mean is None else function(mean, *others)

    return jax.tree.map(apply, mean, *others, is_leaf=_is_none)


def _is_none(x: Any) -> bool:
    return x is None


def moments_of(
    items: PyTree, axis: str | None, weights: jax.Array | None = None, *, batch_axes: int = 2
) -> Moments:
    """Compute the moments of a batch `[T, B, ...]` of every shard, see `moments_of_each`."""
    return moments_of_each((items,), axis, (weights,), batch_axes=batch_axes)[0]


def moments_of_each(
    batches: Sequence[PyTree],
    axis: str | None,
    weights: Sequence[jax.Array | None],
    *,
    batch_axes: int = 2,
) -> tuple[Moments, ...]:
    """Return the moments of several batches `[T, B, ...]`, in two all-reduces for all of them.

    The weights of a batch, f32 `[T, B]` or as its items, are 0 for what does not count, else 1;
    None counts all of them.
    """
    # Without the barrier XLA fuses the sums with whatever computed the items, and they round
    # differently: Anakin and Sebulba would differ in the last bit.
    batches = jax.lax.optimization_barrier(tuple(batches))
    batches = [jax.tree.map(lambda x: x.astype(jnp.float32), batch) for batch in batches]
    axes = tuple(range(batch_axes))
    shares = [None if weight is None else jnp.mean(weight, axes) for weight in weights]

    def sums(trees: Sequence[PyTree]) -> list[PyTree]:
        return [
            jax.tree.map(partial(_weighted_mean, axes, weight), tree)
            for weight, tree in zip(weights, trees, strict=True)
        ]

    def means(sums: Sequence[PyTree]) -> list[PyTree]:
        return list(map(_divide, sums, shares))

    def deviations(x: jax.Array, mean: jax.Array) -> jax.Array:
        return (x - jnp.expand_dims(mean, axes)) ** 2

    total, shares = global_mean((sums(batches), shares), axis)
    centers = means(total)
    squares = [jax.tree.map(deviations, *pair) for pair in zip(batches, centers, strict=True)]
    variances = means(global_mean(sums(squares), axis))
    sizes = [_count(batch, batch_axes, axis) for batch in batches]
    counts = [n if share is None else n * share for n, share in zip(sizes, shares, strict=True)]
    return tuple(map(Moments, counts, centers, variances))


def _weighted_mean(axes: tuple[int, ...], weight: jax.Array | None, x: jax.Array) -> jax.Array:
    """Return the mean over T x B of items `[T, B, ...]` times their weights `[T, B]`."""
    if weight is not None:
        x = jnp.expand_dims(weight, range(weight.ndim, x.ndim)) * x
    return jnp.mean(x, axes)


def _divide(tree: PyTree, share: jax.Array | None) -> PyTree:
    if share is None:
        return tree
    return jax.tree.map(lambda x: x / jnp.maximum(share, 1e-9), tree)


def _count(items: PyTree, batch_axes: int, axis: str | None) -> jax.Array:
    """Return the number of items of all shards, f32 []; 0 of a tree without leaves."""
    shapes = [x.shape[:batch_axes] for x in jax.tree.leaves(items)]
    return jnp.float32(math.prod(shapes[0]) * num_shards(axis) if shapes else 0)


def merge(one: Moments, other: Moments) -> Moments:
    """Combine the moments of two sets of items.

    Source: Chan, Golub and LeVeque 1979, the pairwise combination of means and variances.
    """
    total = one.count + other.count
    share = other.count / jnp.maximum(total, 1.0)

    def combine(
        mean: jax.Array, variance: jax.Array, other_mean: jax.Array, other_variance: jax.Array
    ) -> jax.Array:
        between = (other_mean - mean) ** 2 * share * (1 - share)
        return variance * (1 - share) + other_variance * share + between

    return Moments(
        count=total,
        mean=_map_quantities(lambda m, m2: m + (m2 - m) * share, one.mean, other.mean),
        variance=_map_quantities(combine, one.mean, one.variance, other.mean, other.variance),
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
