"""One random word for one key: even, and with no trace of the key's order."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer.ops.random import random_normals, random_uniform, random_word, random_words, unit
from podracer.rollout import Purpose, environment_keys, purpose_key

COUNT = 1 << 16


def rollout_keys() -> jax.Array:
    steps, envs = jnp.arange(256, dtype=jnp.uint32), jnp.arange(256, dtype=jnp.uint32)
    key = purpose_key(jax.random.key(0), Purpose.ACT)
    return environment_keys(key, envs, steps).reshape(-1)


def seeds() -> jax.Array:
    return jax.vmap(jax.random.key)(jnp.arange(COUNT))


@pytest.fixture(params=[rollout_keys, seeds], ids=["a rollout's keys", "consecutive seeds"])
def words(request) -> np.ndarray:
    return np.asarray(random_word(request.param()))


def test_every_value_is_equally_likely(words):
    """Chi-square of the high and the low byte, within five deviations; and of each bit."""
    for byte in (words >> 24, words & 255):
        counts, expected = np.bincount(byte, minlength=256), COUNT / 256
        assert np.sum((counts - expected) ** 2) / expected < 255 + 5 * np.sqrt(2 * 255)
    bits = words[:, None] >> np.arange(32, dtype=np.uint32) & 1
    assert np.all(np.abs(bits.mean(0) - 0.5) < 5 * 0.5 / np.sqrt(COUNT))


def test_neighbors_are_independent(words):
    """Next to each other in environments (1) and in time (256)."""
    uniform = words / 2.0**32 - 0.5
    for distance in (1, 2, 256):
        correlation = 12 * np.mean(uniform[distance:] * uniform[:-distance])
        assert abs(correlation) < 5 / np.sqrt(COUNT)


def test_words_do_not_repeat_more_than_chance_has_it(words):
    expected = COUNT**2 / 2**33
    assert COUNT - len(np.unique(words)) < expected + 5 * np.sqrt(expected) + 1


def test_every_bit_of_the_key_changes_half_of_the_word():
    rng = np.random.default_rng(0)
    data = rng.integers(0, 1 << 32, (2000, 2), dtype=np.uint32)
    word = random_word(jax.random.wrap_key_data(data))
    for bit in range(64):
        flipped = data.copy()
        flipped[:, bit // 32] ^= np.uint32(1 << bit % 32)
        changed = np.asarray(word ^ random_word(jax.random.wrap_key_data(flipped)))
        share = np.unpackbits(changed.view(np.uint8)).mean()
        assert abs(share - 0.5) < 0.02


def test_numbers_are_in_the_unit_interval():
    uniform = np.asarray(random_uniform(rollout_keys()))
    assert uniform.dtype == np.float32
    assert uniform.min() >= 0.0
    assert uniform.max() < 1.0
    assert abs(uniform.mean() - 0.5) < 5 * np.sqrt(1 / 12 / COUNT)


def test_many_words_of_a_key_are_independent():
    """Of each other, of the next key's, and the first is the one that a key gives alone."""
    words = np.asarray(random_words(rollout_keys(), 8))
    np.testing.assert_array_equal(words[:, 0], random_word(rollout_keys()))
    counts, expected = np.bincount(words.ravel() >> 24, minlength=256), words.size / 256
    assert np.sum((counts - expected) ** 2) / expected < 255 + 5 * np.sqrt(2 * 255)
    uniform = np.asarray(unit(jnp.asarray(words))).astype(np.float64) - 0.5
    alike = 12 * np.concatenate([uniform, np.roll(uniform, 1, axis=0)], axis=1).T @ uniform / COUNT
    np.testing.assert_array_less(np.abs(alike - np.eye(16, 8)), 6 * np.sqrt(1.8 / COUNT))
    assert COUNT * 8 - len(np.unique(words)) < 6 * (8 * COUNT) ** 2 / 2**33


def test_normal_numbers_have_the_moments_and_tails_of_the_normal_distribution():
    normal = np.asarray(random_normals(rollout_keys(), 8), np.float64).ravel()
    for power, moment in ((1, 0.0), (2, 1.0), (3, 0.0), (4, 3.0)):
        deviation = np.std(normal**power) / np.sqrt(normal.size)
        assert abs(np.mean(normal**power) - moment) < 5 * deviation
    for limit, tail in ((1.0, 0.158655), (2.0, 0.0227501), (3.0, 0.00134990)):
        for share in (np.mean(normal > limit), np.mean(normal < -limit)):
            assert abs(share - tail) < 5 * np.sqrt(tail / normal.size)


def test_normal_numbers_are_finite_at_both_ends(monkeypatch):
    ends = jnp.asarray([0, 2**32 - 1], jnp.uint32)
    monkeypatch.setattr("podracer.ops.random.random_words", lambda keys, count: ends)
    low, high = np.asarray(random_normals(jax.random.key(0), 2))
    assert -low == high
    assert 5 < high < 6
