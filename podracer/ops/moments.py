"""Running means and variances, for normalising observations and rewards."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from podracer.mesh import global_mean
from podracer.types import PyTree, struct


@struct
class Moments:
    """Count (f32 scalar), and mean and variance with the shape of one item."""

    count: PyTree
    mean: PyTree
    variance: PyTree


def init_moments(item: PyTree) -> Moments:
    """Moments that normalise nothing until something was seen; `item` gives shapes."""
    return Moments(
        count=jnp.float32(0),
        mean=jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), item),
        variance=jax.tree.map(lambda x: jnp.ones(x.shape, jnp.float32), item),
    )


def update_moments(moments: Moments, items: PyTree, axis: str | None) -> Moments:
    """Add a batch `[*b, ...]` from every shard, all of the same size, in two all-reduces.

    Source: Chan, Golub and LeVeque 1979, the pairwise combination of means and variances.
    """
    leaf, shape = jax.tree.leaves(items)[0], jax.tree.leaves(moments.mean)[0].shape
    added = float(leaf.size // max(1, _size(shape)))
    batch_axes = tuple(range(leaf.ndim - len(shape)))
    shards = global_mean(jnp.float32(1), axis) * (1 if axis is None else jax.lax.axis_size(axis))
    added = added * shards
    mean = global_mean(jax.tree.map(lambda x: jnp.mean(x, batch_axes), items), axis)
    spread = jax.tree.map(
        lambda x, m: jnp.mean((x - jnp.expand_dims(m, batch_axes)) ** 2, batch_axes), items, mean
    )
    variance = global_mean(spread, axis)
    total = moments.count + added
    share = added / total

    def combine(old_mean, old_variance, new_mean, new_variance):
        delta = new_mean - old_mean
        between = delta**2 * share * (1 - share)
        return old_variance * (1 - share) + new_variance * share + between

    return Moments(
        count=total,
        mean=jax.tree.map(lambda old, new: old + (new - old) * share, moments.mean, mean),
        variance=jax.tree.map(combine, moments.mean, moments.variance, mean, variance),
    )


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size


def normalise(moments: Moments, items: PyTree, *, clip: float = 10.0) -> PyTree:
    """Items `[*b, ...]` with zero mean and unit variance a coordinate, clipped."""

    def one(x: jax.Array, mean: jax.Array, variance: jax.Array) -> jax.Array:
        axes = tuple(range(x.ndim - mean.ndim))
        mean, variance = jnp.expand_dims(mean, axes), jnp.expand_dims(variance, axes)
        return jnp.clip((x - mean) * jax.lax.rsqrt(variance + 1e-8), -clip, clip)

    return jax.tree.map(one, items, moments.mean, moments.variance)
