"""Sum tree of priorities, for sampling items in proportion to them.

Each node has many children, not two: on a vector machine the sum of a block costs no more than the
sum of a pair, and a tree over 2^20 items has 4 levels, not 20. An update computes sums from the
level below, never by adding differences, so rounding errors do not accumulate.
Source: Schaul et al. 2016, appendix B.2.1 (arXiv 1511.05952).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from podracer.devices.fused import is_for

BRANCHES = 32

# From the items `[B, S]` to the top level `[B, m]`, m at most `BRANCHES`.
SumTree = tuple[jax.Array, ...]


def empty(num_rows: int, num_items: int) -> SumTree:
    """Return a tree of zeros: `num_items` in each of `num_rows`, padded to whole blocks."""
    levels, size = [], num_items
    while True:
        parents = math.ceil(size / BRANCHES)
        levels.append(jnp.zeros((num_rows, size if parents == 1 else parents * BRANCHES)))
        if parents == 1:
            return tuple(levels)
        size = parents


def update(
    tree: SumTree, rows: Int[Array, "N"], items: Int[Array, "N"], values: Float[Array, "N"]
) -> SumTree:
    """Return the tree with new priorities, at least 0.

    Where an item occurs twice the larger value counts, so that the result depends on no order.
    """
    # Zeros that depend on the values, which follow from what was read of the tree: otherwise XLA
    # may clear before it reads, and then copies all items, twice.
    zeros = jnp.minimum(values, 0.0)
    cleared = tree[0].at[rows, items].set(zeros, mode="promise_in_bounds")
    levels = [cleared.at[rows, items].max(values, mode="promise_in_bounds")]
    for level in tree[1:]:
        items = items // BRANCHES
        children = levels[-1].reshape(level.shape[0], -1, BRANCHES)
        sums = children.at[rows, items].get(mode="promise_in_bounds").sum(-1)
        levels.append(level.at[rows, items].set(sums, mode="promise_in_bounds"))
    return tuple(levels)


def sample(
    tree: SumTree, key: jax.Array, num: int
) -> tuple[Int[Array, "N"], Int[Array, "N"], Float[Array, "N"]]:
    """Sample `num` items in proportion to their priorities: rows, items and probabilities.

    The sum of all priorities must be above 0. Rows are sampled stratified, one in each of `num`
    equal parts of the total (Schaul et al. 2016, section 3.3), items within a row independently.
    """
    uniform = jax.random.uniform(key, (len(tree) + 1, num))
    cumulative = jnp.cumsum(tree[-1].sum(-1))
    strata = (jnp.arange(num) + uniform[0]) / num
    search = "compare_all" if is_for("gpu") else "scan"  # one kernel, not a loop
    threshold = _threshold(cumulative[-1], strata)
    rows = jnp.searchsorted(cumulative, threshold, side="right", method=search)
    items = jnp.zeros(num, jnp.int32)
    for level, random in zip(reversed(tree), uniform[1:], strict=True):
        blocks = level.reshape(level.shape[0], -1, min(BRANCHES, level.shape[1]))
        child = _choose(blocks.at[rows, items].get(mode="promise_in_bounds"), random)
        items = items * BRANCHES + child
    values = tree[0].at[rows, items].get(mode="promise_in_bounds")
    return rows, items, values / cumulative[-1]


def _choose(values: Float[Array, "N m"], uniform: Float[Array, "N"]) -> Int[Array, "N"]:
    """Return the index of one value of each row, in proportion to it; never of a 0."""
    # Sums of another order, as a GPU may compute them, can also grow at a 0.
    cumulative = jnp.where(values > 0, jnp.cumsum(values, axis=-1), 0.0)
    is_above = cumulative > _threshold(cumulative.max(axis=-1, keepdims=True), uniform[:, None])
    return jnp.where(is_above, jnp.arange(values.shape[-1]), values.shape[-1]).min(axis=-1)


def _threshold(total: jax.Array, uniform: jax.Array) -> jax.Array:
    """Return a fraction of the total that is less than it whatever the rounding."""
    return jnp.minimum(uniform * total, jnp.nextafter(total, jnp.zeros_like(total)))
