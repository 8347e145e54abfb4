"""Means, moments and gradients over devices, and over blocks of a batch that fit into a cache.

A step that only resets an environment is no transition: it counts in no mean. The number of steps
that count differs between shards and between minibatches. So such a mean travels as a fraction, a
`MaskedMean`, whose parts are averaged apart and divided once, at the end.

Functions that reduce take the name of a mesh axis; with `axis=None` there is one shard and nothing
is reduced. Only the drivers have other collectives.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Float32, Integer, Shaped

from podracer.devices.fused import is_for
from podracer.errors import ConfigError
from podracer.fields import struct, unchecked
from podracer.types import PyTree


@unchecked
@struct
class MaskedMean:
    """Mean over the items that count, as a fraction.

    The averages of both parts over equal shards, minibatches or updates are the parts of the mean
    over all their items.
    """

    total: Float[Array, "*h"]
    """Sum over the items that count, divided by the number of all items."""
    share: Float[Array, "*h"]
    """Share of the items that count, in [0, 1]."""

    @property
    def value(self) -> Float[Array, "*h"]:
        """Mean over the items that count; 0 where none does."""
        # The limit is below the smallest share that an item has.
        return self.total / jnp.maximum(self.share, 1e-12)

    def __float__(self) -> float:
        return float(self.value)


def mean_of(x: Array, mask: Bool[Array, "..."] | Float[Array, "..."]) -> MaskedMean:
    """Return the mean of items where a mask of their shape is True, or 1."""
    mask = mask.astype(jnp.float32)
    return MaskedMean(jnp.mean(mask * x), jnp.mean(mask))


def as_mean(metric: Array | MaskedMean) -> MaskedMean:
    """Return a metric as a mean in which it counts as one item."""
    return metric if isinstance(metric, MaskedMean) else MaskedMean(metric, jnp.ones_like(metric))


def _divided(tree: PyTree, share: jax.Array | None) -> PyTree:
    """Return a tree of totals, as of a `MaskedMean`, divided by their share; None is all items."""
    return tree if share is None else jax.tree.map(lambda x: MaskedMean(x, share).value, tree)


def num_shards(axis: str | None) -> int:
    """Return the number of shards along an axis of a mesh; 1 if `axis` is None."""
    return 1 if axis is None else jax.lax.axis_size(axis)


def global_max(x: Float[Array, "..."], axis: str | None) -> Float[Array, "..."]:
    """Return the elementwise maximum over all shards."""
    return x if axis is None else jax.lax.pmax(x, axis)


def global_mean(tree: PyTree, axis: str | None) -> PyTree:
    """Return the mean over all shards of a tree of float arrays, with one all-reduce."""
    if axis is None:
        return tree
    flat, unravel = ravel_pytree(tree)
    return unravel(jax.lax.pmean(flat, axis))


def global_grad(
    loss: Callable[..., tuple[Float[Array, ""] | MaskedMean, Any]],
    params: PyTree,
    *args: Any,
    axis: str | None,
) -> tuple[PyTree, Any]:
    """Return the gradient of `loss(params, *args) -> (loss, aux)`, averaged over shards, and aux.

    The drivers run under `shard_map(check_vma=False)`, where differentiating a replicated input
    gives the gradient of one shard, and the mean over shards is taken here. (With `check_vma=True`
    JAX sums such gradients itself, and this mean would leave the sum unchanged.) Where each shard's
    loss is a mean over equally many items, or a `MaskedMean`, the result is the gradient of the
    mean over all items.
    """
    grads, (share, aux) = _grad_of_total(loss, is_all=axis is None)(params, *args)
    grads, share = global_mean((grads, share), axis)
    return _divided(grads, share), aux


def _grad_of_total(
    loss: Callable[..., tuple[Any, Any]], *, is_all: bool
) -> Callable[..., tuple[PyTree, Any]]:
    """Return the gradient of a loss, or of a `MaskedMean`'s total, with `(share or None, aux)`.

    Where `is_all`, and nothing more is averaged, it is the gradient of a `MaskedMean` itself,
    without a share.
    """

    def total(*args: Any) -> tuple[jax.Array, Any]:
        with jax.named_scope("loss"):
            result: Any = loss(*args)
        if not (isinstance(result, tuple | list) and len(result) == 2):
            raise ConfigError("The loss of `global_grad` must return the pair (loss, aux).")
        value, aux = result
        if isinstance(value, MaskedMean) and not is_all:
            return value.total, (value.share, aux)
        return value.value if isinstance(value, MaskedMean) else value, (None, aux)

    return jax.grad(total, has_aux=True)


def global_grad_in_blocks(
    loss: Callable[[PyTree, Integer[Array, "m"]], tuple[Float[Array, ""] | MaskedMean, Any]],
    params: PyTree,
    indices: Integer[Array, "n"],
    *,
    indices_in_cache: int,
    axis: str | None,
) -> tuple[PyTree, Any]:
    """Return the gradient of `loss(params, indices)` and aux, both averaged over shards.

    `loss(params, indices)` must be a mean over its items, or a `MaskedMean`; it gathers the items
    by their `indices [n]` itself. A CPU takes equal blocks of at most `indices_in_cache` of them,
    so that what the backward pass keeps stays in the processor's cache; an accelerator takes all
    at once. `aux` is a tree of float arrays.
    """
    blocks = split_evenly(indices, indices_in_cache if is_for("cpu") else indices.shape[0])
    count = blocks.shape[0]
    block_grad = partial(_grad_of_total(loss, is_all=axis is None and count == 1), params)

    def add(total: PyTree, block: jax.Array) -> tuple[PyTree, None]:
        return jax.tree.map(lambda t, x: t + x / count, total, block_grad(block)), None

    if count == 1:
        mean = block_grad(blocks[0])
    else:
        zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(block_grad, blocks[0]))
        mean, _ = jax.lax.scan(add, zeros, blocks)
    grads, (share, aux) = global_mean(mean, axis)
    return _divided(grads, share), aux


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

    def full(value: float, leaf: Any) -> jax.Array | None:
        is_index = getattr(leaf, "num_values", None) is not None
        return None if is_index or leaf.dtype == bool else jnp.full(leaf.shape, value, jnp.float32)

    mean, variance = (jax.tree.map(partial(full, value), item) for value in (0.0, 1.0))
    return Moments(jnp.float32(0), mean, variance)


def _map_quantities(function: Callable[..., jax.Array], mean: PyTree, *trees: PyTree) -> PyTree:
    """Map over a tree of moments and others; None where the first tree has None."""

    def apply(mean: Any, *leaves: Any) -> Any:
        return None if mean is None else function(mean, *leaves)

    return jax.tree.map(apply, mean, *trees, is_leaf=lambda x: x is None)


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
    mean = _divided(total, share)
    squares = jax.tree.map(deviations, items, mean)
    mean_square = global_mean(jax.tree.map(mean_over_batch, squares), axis)
    size = math.prod(jax.tree.leaves(items)[0].shape[:batch_axes]) * num_shards(axis)
    count = jnp.float32(size) if share is None else jnp.float32(size) * share
    return Moments(count, mean, _divided(mean_square, share))


def merge(first: Moments, second: Moments) -> Moments:
    """Combine the moments of two sets of items, the second a batch, which counts at least 2^-18.

    Less would round away: in a long run the variance would sink to the power of two below it.
    Source: Chan, Golub and LeVeque 1979, the pairwise combination of means and variances.
    """
    total = first.count + second.count
    share = second.count / jnp.maximum(total, 1.0)
    share = jnp.maximum(share, 2.0**-18 * jnp.sign(second.count))

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

    return jax.tree.map(
        normalize_leaf, moments.mean, moments.variance, items, is_leaf=lambda x: x is None
    )


def map_blocks(
    function: Callable[[PyTree], Float[Array, "N m"]], x: PyTree, *, rows_in_cache: int
) -> Float[Array, "N m"]:
    """Return `function(x)`, which maps each row of arrays `[N, ...]` alone.

    A CPU takes equal blocks of at most `rows_in_cache` rows, one after another, so that what is
    made of a block stays in the processor's cache; an accelerator takes all rows at once.
    """
    N = jax.tree.leaves(x)[0].shape[0]
    if not (is_for("cpu") and isinstance(N, int)):  # exported programs have any number of rows
        return function(x)
    blocks = jax.tree.map(lambda x: split_evenly(x, rows_in_cache), x)
    if len(jax.tree.leaves(blocks)[0]) == 1:
        return function(x)
    y = jax.lax.map(function, blocks)
    return y.reshape(N, y.shape[-1])


def split_evenly(x: Shaped[Array, "n ..."], limit: int) -> Shaped[Array, "K m ..."]:
    """Return an array `[n, ...]` in order as equal blocks `[K, m, ...]`.

    A block has at most `limit` items and more than half as many, or all n where no divisor of n
    lies between.
    """
    n = x.shape[0]
    limit = max(1, limit)
    sizes = (size for size in range(min(limit, n), limit // 2, -1) if n % size == 0)
    return x.reshape(-1, next(sizes, n), *x.shape[1:])
