"""Sums over blocks of priorities, so that an item can be drawn by its share in a few steps.

A tree with many branches, not two: on a vector machine the sum of a block costs no more than the
sum of a pair, and a tree over 2^20 items has 4 levels, not 20. Sums are made anew from the items
below them, never by adding differences, so rounding errors do not gather.
Source of the idea: Schaul et al.
2016, appendix B.2.1 (arXiv 1511.05952).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

BRANCHES = 32

# From the items `[B, S]` to the widest blocks `[B, m]`, m at most `BRANCHES`.
SumTree = tuple[jax.Array, ...]


def empty(num_rows: int, num_items: int) -> SumTree:
    """Zeros for `num_items` in each of `num_rows`; sizes are rounded up to whole blocks."""
    levels, size = [], num_items
    while True:
        parents = math.ceil(size / BRANCHES)
        levels.append(jnp.zeros((num_rows, size if parents == 1 else parents * BRANCHES)))
        if parents == 1:
            return tuple(levels)
        size = parents


def put(
    tree: SumTree, rows: Int[Array, "N"], items: Int[Array, "N"], values: Float[Array, "N"]
) -> SumTree:
    """The tree with new priorities, at least 0. Of an item that comes twice the larger one counts,
    so that nothing depends on an order."""
    cleared = tree[0].at[rows, items].set(0.0, mode="promise_in_bounds")
    levels = [cleared.at[rows, items].max(values, mode="promise_in_bounds")]
    for level in tree[1:]:
        items = items // BRANCHES
        below = levels[-1].reshape(level.shape[0], -1, BRANCHES)
        sums = below.at[rows, items].get(mode="promise_in_bounds").sum(-1)
        levels.append(level.at[rows, items].set(sums, mode="promise_in_bounds"))
    return tuple(levels)


def draw(
    tree: SumTree, key: jax.Array, num: int
) -> tuple[Int[Array, "N"], Int[Array, "N"], Float[Array, "N"]]:
    """`num` items by their shares: rows, items and shares. The sum of all must be above 0.

    Rows are drawn stratified, one in each of `num` equal parts of the whole (Schaul et al. 2016,
    section 3.3), and with fresh random numbers within a row.
    """
    uniform = jax.random.uniform(key, (len(tree) + 1, num))
    below = jnp.cumsum(tree[-1].sum(-1))
    strata = (jnp.arange(num) + uniform[0]) / num
    rows = jnp.searchsorted(below, _threshold(below[-1], strata), side="right")
    items = jnp.zeros(num, jnp.int32)
    for level, random in zip(reversed(tree), uniform[1:], strict=True):
        blocks = level.reshape(level.shape[0], -1, min(BRANCHES, level.shape[1]))
        within = _chosen(blocks.at[rows, items].get(mode="promise_in_bounds"), random)
        items = items * BRANCHES + within
    values = tree[0].at[rows, items].get(mode="promise_in_bounds")
    return rows, items, values / below[-1]


def _chosen(values: Float[Array, "N m"], uniform: Float[Array, "N"]) -> Int[Array, "N"]:
    """The index of one value of each row, by its share; never of a 0."""
    below = jnp.cumsum(values, axis=-1)
    threshold = _threshold(below[:, -1], uniform)
    return jnp.sum(below <= threshold[:, None], axis=-1, dtype=jnp.int32)


def _threshold(total: jax.Array, uniform: jax.Array) -> jax.Array:
    """A share of the total, and less than it whatever the rounding."""
    return jnp.minimum(uniform * total, jnp.nextafter(total, jnp.zeros_like(total)))
