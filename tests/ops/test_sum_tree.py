"""The sum tree against plain arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from variants import variants

from podracer.ops import sum_tree


def filled(rows, items, seed=0):
    random = np.random.default_rng(seed)
    values = random.uniform(size=(rows, items)).astype(np.float32)
    values[random.uniform(size=values.shape) < 0.3] = 0
    where = np.indices(values.shape).reshape(2, -1)
    tree = sum_tree.empty(rows, items)
    tree = sum_tree.update(tree, *map(jnp.asarray, (*where, values.reshape(-1))))
    return tree, values


@variants("items", [1, 33, 5000], [7, 32, 1000, 1024])
def test_blocks_hold_the_sums_of_what_is_below_them(items):
    tree, values = filled(3, items)
    for level in tree:
        np.testing.assert_allclose(level.sum(-1), values.sum(-1), rtol=1e-5)
    assert tree[-1].shape[1] <= sum_tree.BRANCHES
    np.testing.assert_array_equal(tree[0][:, :items], values)


@variants("items", [5], [100, 2000])
def test_items_are_drawn_by_their_share_and_never_without_one(items):
    tree, values = filled(4, items)
    draws = jax.vmap(lambda key: sum_tree.sample(tree, key, 1024))
    rows, where, shares = map(np.asarray, draws(jax.random.split(jax.random.key(0), 400)))
    counts = np.zeros_like(values)
    np.add.at(counts, (rows.ravel(), where.ravel()), 1)
    expected = values / values.sum()
    assert counts[values == 0].sum() == 0
    np.testing.assert_allclose(shares, expected[rows, where], rtol=1e-4)
    total = counts.sum()
    deviation = (counts - expected * total) / np.sqrt(np.maximum(expected * total, 1))
    assert np.abs(deviation).max() < 6


def test_sums_of_another_order_draw_nothing_without_a_share(monkeypatch):
    """As a GPU may compute them with JAX 0.12: the sum can grow behind the last share."""
    sums = jax.lax.associative_scan
    monkeypatch.setattr(jnp, "cumsum", lambda x, axis: sums(jnp.add, x, axis=axis))
    random = np.random.default_rng(0)
    values = random.uniform(size=(1000, sum_tree.BRANCHES)).astype(np.float32)
    values[np.arange(sum_tree.BRANCHES) >= random.integers(1, 32, (1000, 1))] = 0
    largest = jnp.full(1000, 1 - 2.0**-23, jnp.float32)  # of `jax.random.uniform`
    chosen = jax.jit(sum_tree._choose)(values, largest)
    assert (values[np.arange(1000), np.asarray(chosen)] > 0).all()


def test_strata_hit_every_large_share():
    """Of 8 draws, one from each eighth of the whole, a row that has a quarter gets two."""
    tree = sum_tree.empty(4, 10)
    rows = jnp.arange(4)
    tree = sum_tree.update(tree, rows, jnp.zeros(4, jnp.int32), jnp.ones(4))
    for seed in range(20):
        drawn, _, _ = sum_tree.sample(tree, jax.random.key(seed), 8)
        assert np.bincount(np.asarray(drawn), minlength=4).tolist() == [2, 2, 2, 2]


def test_the_larger_of_two_values_for_one_item_counts():
    tree, _ = filled(2, 40)
    rows, items = jnp.asarray([1, 1, 0]), jnp.asarray([7, 7, 3])
    for values in ([0.25, 0.5, 0.125], [0.5, 0.25, 0.125]):
        new = sum_tree.update(tree, rows, items, jnp.asarray(values))
        assert new[0][1, 7] == 0.5
        assert new[0][0, 3] == 0.125
        np.testing.assert_allclose(new[1].sum(-1), new[0].sum(-1), rtol=1e-5)


@pytest.mark.slow
def test_rounding_does_not_gather():
    """After many changes the sums are those of the items, not a history of differences."""
    tree, values = filled(1, 1000)
    put = jax.jit(sum_tree.update)
    random = np.random.default_rng(1)
    for _ in range(300):
        items = random.integers(0, 1000, 64)
        new = (10.0 ** random.uniform(-6, 6, 64)).astype(np.float32)
        tree = put(tree, jnp.zeros(64, jnp.int32), jnp.asarray(items), jnp.asarray(new))
    tree = put(tree, jnp.zeros(1000, jnp.int32), jnp.arange(1000), jnp.asarray(values[0]))
    np.testing.assert_allclose(tree[-1].sum(), values.sum(), rtol=1e-5)
