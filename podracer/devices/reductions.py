"""Means and gradients over devices, and over blocks of a batch that stay in a processor's cache.

Each function takes the name of a mesh axis; with `axis=None` there is one shard and nothing is
reduced. Only the drivers have other collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, Integer, Shaped

from podracer.devices.kernels import is_for
from podracer.means import Mean, divide
from podracer.types import PyTree


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
    loss: Callable[..., tuple[Float[Array, ""] | Mean, Any]],
    params: PyTree,
    *args: Any,
    axis: str | None,
) -> tuple[PyTree, Any]:
    """Return the gradient of `loss(params, *args) -> (loss, aux)`, averaged over shards, and aux.

    The drivers run under `shard_map(check_vma=False)`, where differentiating a replicated input
    gives the gradient of one shard, and the mean over shards is taken here. (With `check_vma=True`
    JAX sums such gradients itself, and this mean would leave the sum unchanged.) Where each shard's
    loss is a mean over equally many items, or a `Mean`, the result is the gradient of the mean over
    all items.
    """
    grads, (share, aux) = _grad_of_total(loss, is_all=axis is None)(params, *args)
    grads, share = global_mean((grads, share), axis)
    return _divided(grads, share), aux


def _grad_of_total(
    loss: Callable[..., tuple[Any, Any]], *, is_all: bool
) -> Callable[..., tuple[PyTree, Any]]:
    """Return the gradient of a loss, or of a `Mean`'s total, with `(share or None, aux)`.

    Where `is_all`, and nothing more is averaged, it is a `Mean`'s own gradient, without a share.
    """

    def total(*args: Any) -> tuple[jax.Array, Any]:
        with jax.named_scope("loss"):
            value, aux = loss(*args)
        if isinstance(value, Mean) and not is_all:
            return value.total, (value.share, aux)
        return value.value if isinstance(value, Mean) else value, (None, aux)

    return jax.grad(total, has_aux=True)


def global_grad_in_blocks(
    loss: Callable[[PyTree, Integer[Array, "m"]], tuple[Float[Array, ""] | Mean, Any]],
    params: PyTree,
    indices: Integer[Array, "n"],
    *,
    indices_in_cache: int,
    axis: str | None,
) -> tuple[PyTree, Any]:
    """Return the gradient of `loss(params, indices)` and aux, both averaged over shards.

    `loss(params, indices)` must be a mean over its items, or a `Mean`; it gathers the items by
    their `indices [n]` itself. A CPU takes equal blocks of at most `indices_in_cache` of them, so
    that what the backward pass keeps stays in the processor's cache; an accelerator takes all at
    once. `aux` is a tree of float arrays.
    """
    blocks = split_evenly(indices, indices_in_cache if is_for("cpu") else indices.shape[0])
    count = blocks.shape[0]
    block_grad = partial(_grad_of_total(loss, is_all=axis is None and count == 1), params)
    if count == 1:
        grads, (share, aux) = global_mean(block_grad(blocks[0]), axis)
        return _divided(grads, share), aux

    def add(total: PyTree, block: jax.Array) -> tuple[PyTree, None]:
        return jax.tree.map(lambda t, x: t + x / count, total, block_grad(block)), None

    shapes = jax.eval_shape(block_grad, blocks[0])
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    grads, (share, aux) = global_mean(jax.lax.scan(add, zeros, blocks)[0], axis)
    return _divided(grads, share), aux


def _divided(grads: PyTree, share: jax.Array | None) -> PyTree:
    """Return the gradient of a `Mean` from the gradient of its total."""
    return grads if share is None else jax.tree.map(lambda x: divide(x, share), grads)


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
