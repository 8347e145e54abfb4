"""Running means and variances, for normalizing observations and rewards."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from podracer.mesh import global_mean, num_shards
from podracer.types import PyTree, struct


@struct
class Moments:
    """Count (f32 scalar), and mean and variance with the shape of one item."""

    count: PyTree
    mean: PyTree
    variance: PyTree


def init_moments(item: PyTree) -> Moments:
    """Moments that normalize nothing until something was seen; `item` gives shapes."""
    return Moments(
        count=jnp.float32(0),
        mean=jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), item),
        variance=jax.tree.map(lambda x: jnp.ones(x.shape, jnp.float32), item),
    )


def moments_of(items: PyTree, axis: str | None, *, batch_axes: int = 2) -> Moments:
    """Moments of a batch `[T, B, ...]` of every shard, in two all-reduces for all leaves."""
    # Kept apart from what made the items: fused with that, sums would round otherwise, and the two
    # architectures would differ in the last bit.
    items = jax.lax.optimization_barrier(items)
    batch = tuple(range(batch_axes))
    count = math.prod(jax.tree.leaves(items)[0].shape[:batch_axes]) * num_shards(axis)
    mean = global_mean(jax.tree.map(lambda x: jnp.mean(x, batch), items), axis)
    spread = jax.tree.map(
        lambda x, m: jnp.mean((x - jnp.expand_dims(m, batch)) ** 2, batch), items, mean
    )
    return Moments(jnp.float32(count), mean, global_mean(spread, axis))


def moments_of_each(items: Sequence[PyTree], axis: str | None) -> tuple[Moments, ...]:
    """Return the moments of several batches `[T, B, ...]`, in two all-reduces for all of them."""
    joint = moments_of(tuple(items), axis)
    parts = zip(joint.mean, joint.variance, strict=True)
    return tuple(Moments(joint.count, mean, variance) for mean, variance in parts)


def merge(one: Moments, other: Moments) -> Moments:
    """Moments of all that the two have seen.

    Source: Chan, Golub and LeVeque 1979, the pairwise combination of means and variances.
    """
    total = one.count + other.count
    share = other.count / total

    def variance(mean: jax.Array, spread: jax.Array, mean2: jax.Array, spread2: jax.Array):
        between = (mean2 - mean) ** 2 * share * (1 - share)
        return spread * (1 - share) + spread2 * share + between

    return Moments(
        count=total,
        mean=jax.tree.map(lambda m, m2: m + (m2 - m) * share, one.mean, other.mean),
        variance=jax.tree.map(variance, one.mean, one.variance, other.mean, other.variance),
    )


def normalize(moments: Moments, items: PyTree, *, clip: float = 10.0) -> PyTree:
    """Items `[*b, ...]` with zero mean and unit variance a coordinate, clipped."""

    def one(x: jax.Array, mean: jax.Array, variance: jax.Array) -> jax.Array:
        axes = tuple(range(x.ndim - mean.ndim))
        mean, variance = jnp.expand_dims(mean, axes), jnp.expand_dims(variance, axes)
        return jnp.clip((x - mean) * jax.lax.rsqrt(variance + 1e-8), -clip, clip)

    return jax.tree.map(one, items, moments.mean, moments.variance)
