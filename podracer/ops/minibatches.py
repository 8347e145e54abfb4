"""Shuffling of a batch into minibatches, without sorting and without moving it."""

# Types of JAX itself are partly unknown to pyright.
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt32

from podracer.types import PyTree


def permutation(key: jax.Array, n: int) -> UInt32[Array, "n"]:
    """Return a pseudo-random permutation of 0 .. n-1, in a few multiplications per index.

    Rounds of `x -> odd * x + b (mod 2^k)` and `x -> x ^ (x >> s)` are bijections of k-bit numbers;
    where n is not a power of two, indices that land outside follow their cycle until they are
    inside. `jax.random.permutation` sorts, which on a CPU takes 300 times as long. This one
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


def take(batch: PyTree, items: UInt32[Array, "m"]) -> PyTree:
    """Gather items from leaves `[T, N, ...]`: `[T, m, ...]`."""
    # Promising bounds spares a comparison and a fill of every number.
    return jax.tree.map(
        lambda x: x.at[:, items].get(mode="promise_in_bounds", unique_indices=True), batch
    )
