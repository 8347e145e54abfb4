"""Shuffling a batch into minibatches, without sorting."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt32

from podracer.types import PyTree


def permutation(key: jax.Array, n: int) -> UInt32[Array, "n"]:
    """A pseudo-random permutation of 0 .. n-1, in a few multiplications an item.

    Rounds of `x -> odd * x + b (mod 2^k)` and `x -> x ^ (x >> s)` are bijections of k-bit numbers;
    where n is not a power of two, items that land outside walk on along their cycle until they
    are inside. `jax.random.permutation` sorts, which on a CPU takes 300 times as long. This one
    is drawn from at most 2^256 permutations, not from all n!: enough for minibatches.
    """
    bits = max(1, (n - 1).bit_length())
    mask = jnp.uint32((1 << bits) - 1)
    shift = (bits + 1) // 2
    constants = jax.random.bits(key, (4, 2), jnp.uint32)

    def mix(x: jax.Array) -> jax.Array:
        for multiplier, offset in constants:
            x = (x * (multiplier | 1) + offset) & mask
            x = x ^ (x >> shift)
        return x

    def walk(x: jax.Array) -> jax.Array:
        return jax.lax.while_loop(
            lambda x: jnp.any(x >= n), lambda x: jnp.where(x >= n, mix(x), x), x
        )

    items = mix(jnp.arange(n, dtype=jnp.uint32))
    return items if n == 1 << bits else walk(items)


def in_blocks(batch: PyTree, rows: int) -> PyTree:
    """Leaves `[T, N, ...]` to `[K, T, N / K, ...]`, blocks of at most `rows` steps where N has a
    divisor that comes near; otherwise K is 1. Items stay in order."""
    T, n = jax.tree.leaves(batch)[0].shape[:2]
    most = max(1, rows // T)
    fits = (size for size in range(min(most, n), most // 2, -1) if n % size == 0)
    return _split(batch, n // next(fits, n))


def shuffled_minibatches(key: jax.Array, batch: PyTree, count: int) -> PyTree:
    """Leaves `[T, N, ...]` to `[count, T, N / count, ...]`, every item in one minibatch."""
    n = jax.tree.leaves(batch)[0].shape[1]
    order = permutation(key, n)

    # Promising bounds spares a comparison and a fill of every number.
    shuffled = jax.tree.map(
        lambda x: x.at[:, order].get(mode="promise_in_bounds", unique_indices=True), batch
    )
    return _split(shuffled, count)


def _split(batch: PyTree, count: int) -> PyTree:
    """Leaves `[T, N, ...]` to `[count, T, N / count, ...]`, in order."""

    def split(x: jax.Array) -> jax.Array:
        shape = (x.shape[0], count, x.shape[1] // count, *x.shape[2:])
        return jnp.moveaxis(x.reshape(shape), 1, 0)

    return jax.tree.map(split, batch)
