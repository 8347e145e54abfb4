"""Shuffling: every item exactly once, and no pattern that a minibatch would show."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer.agents.common.epochs import permutation, take

KEYS = 2000
SIZES = [1, 2, 3, 5, 8, 13, 32, 33, 97, 300, 1024]


@functools.cache
def orders(n: int, count: int = KEYS) -> np.ndarray:
    """Permutations `[count, n]` from as many keys."""
    keys = jax.random.split(jax.random.key(n), count)
    return np.asarray(jax.jit(jax.vmap(lambda key: permutation(key, n)))(keys)).astype(int)


@pytest.mark.parametrize("n", SIZES)
def test_a_permutation_has_every_item_once(n):
    for order in orders(n, 8):
        np.testing.assert_array_equal(np.sort(order), np.arange(n))


def test_keys_give_different_orders():
    assert len(np.unique(orders(60), axis=0)) == KEYS
    assert len(np.unique(orders(3), axis=0)) == 6


@pytest.mark.parametrize("n", [60, 64, 1000])
def test_items_land_everywhere_alike(n):
    """Where an item goes has the mean and the variance of an even draw, within five errors."""
    slots = np.argsort(orders(n), axis=1)
    for item in (0, 1, n // 2, n - 1):
        mean, variance = (n - 1) / 2, (n**2 - 1) / 12
        assert abs(slots[:, item].mean() - mean) < 5 * np.sqrt(variance / KEYS)
        # The variance of an even draw's sample variance is about 0.8 of its square, over KEYS.
        assert abs(slots[:, item].var() / variance - 1) < 5 * np.sqrt(0.8 / KEYS)
        counts = np.bincount(slots[:, item] * 4 // n, minlength=4)
        assert np.sum((counts - KEYS / 4) ** 2) / (KEYS / 4) < 3 + 5 * np.sqrt(6)


@pytest.mark.parametrize("n", [60, 64, 1000])
def test_neighbors_part(n):
    """Items that follow each other, in time or in the batch, are dealt as a fair shuffle deals
    them: on average over keys, and not all together or never for some of the keys."""
    slots = np.argsort(orders(n), axis=1)
    minibatch = slots * 4 // n
    for distance in (1, 2, n // 4, n // 2):
        share = np.mean(minibatch[:, distance:] == minibatch[:, :-distance], axis=1)
        fair = (n / 4 - 1) / (n - 1)
        assert abs(share.mean() - fair) < 0.01
        deviation = np.sqrt(fair * (1 - fair) / (n - distance))
        assert share.std() < 2 * deviation
    correlation = [np.corrcoef(row[1:], row[:-1])[0, 1] for row in slots]
    assert abs(np.mean(correlation)) < 2 / n + 5 / np.sqrt(n * KEYS)
    assert np.std(correlation) < 1.5 / np.sqrt(n)


def test_items_are_taken_from_every_leaf_alike():
    T, N = 3, 24
    item, time = jnp.arange(N), jnp.arange(T)
    batch = {
        "item": jnp.broadcast_to(item[None], (T, N)),
        "both": 100 * time[:, None, None] + item[None, :, None] + jnp.zeros((1, 1, 5), int),
        "carry": (item[None] * 2.0,),  # leaves may differ in T
    }
    items = np.asarray([7, 0, 23, 3])
    taken = take(batch, jnp.asarray(items, jnp.uint32))
    np.testing.assert_array_equal(taken["item"], np.tile(items, (T, 1)))
    np.testing.assert_array_equal(taken["carry"][0], items[None] * 2.0)
    for t in range(T):
        np.testing.assert_array_equal(taken["both"][t], np.tile(100 * t + items, (5, 1)).T)
