"""Decisions at bounds and ends in compiled programs, whose divisions are rounded products.

The data are arguments: folded as constants, they would be computed as in an interpreter.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer.ops.action_values import Atoms
from podracer.ops.distributions import from_bounds, to_bounds
from podracer.ops.transforms import evenly_spaced, two_hot
from podracer.schedules import Linear, value_at
from podracer.types import Continuous
from podracer_testing.parity import optimized


def boxes():
    """4,000 random boxes and all symmetric ones up to 10, of two decimals: f64 `[B]` bounds."""
    random = np.sort(np.random.default_rng(0).uniform(-10, 10, (5_000, 2)).round(2))
    random = random[random[:, 0] < random[:, 1]][:4_000]
    symmetric = np.arange(1, 1_001) / 100
    bounds = np.concatenate([random, np.stack([-symmetric, symmetric], axis=1)])
    return bounds.astype(np.float32).astype(np.float64).T


def beside(bound, other):
    """The next number towards another one, as far as programs have it: they flush tiny ones."""
    return np.where(bound == 0, np.sign(other) * np.float32(1e-30), np.nextafter(bound, other))


@pytest.fixture(autouse=True)
def _as_users_compile():
    with optimized():
        yield


LOW, HIGH = boxes()
SPACE = Continuous(tuple(LOW.tolist()), tuple(HIGH.tolist()))


def rows(*arrays):
    return jnp.asarray(np.stack(arrays), jnp.float32)


def test_actions_are_at_a_bound_in_both_units_or_in_none():
    low, high = LOW.astype(np.float32), HIGH.astype(np.float32)
    inside = beside(low, high), beside(high, low)
    share = np.random.default_rng(1).uniform(size=(50, len(low)))
    between = np.clip(np.float32(LOW + share * (HIGH - LOW)), *inside)
    action = rows(low, high, *inside, *between)
    scaled = np.asarray(jax.jit(lambda x: from_bounds(SPACE, x))(action))
    np.testing.assert_array_equal(scaled[:2], np.stack([-np.ones_like(low), np.ones_like(low)]))
    assert (np.abs(scaled[2:]) < 1).all()
    right = (np.float64(action) - LOW) / (HIGH - LOW) * 2 - 1
    np.testing.assert_allclose(scaled, right, atol=4e-7)

    ends = (-1.0, 1.0, -1.5, 7.0, np.float32(-1e38))
    sample = rows(*(np.full_like(low, x) for x in ends), *scaled[4:])
    action = np.asarray(jax.jit(lambda x: to_bounds(SPACE, x))(sample))
    np.testing.assert_array_equal(action[:5], np.stack([low, high, low, high, low]))
    right = LOW + (np.clip(np.float64(sample), -1, 1) + 1) / 2 * (HIGH - LOW)
    np.testing.assert_allclose(action, right, atol=2e-6)
    assert ((low <= action) & (action <= high)).all()


def test_a_schedule_ends_at_its_end():
    ends = [(a / 20, b / 20) for a in range(21) for b in range(21) if a != b]
    schedules = [Linear(start, end, 12_345.0) for start, end in ends]

    @jax.jit
    def values(frames):
        return jnp.stack([jnp.asarray(value_at(schedule, frames)) for schedule in schedules])

    for late in (12_345, 3 * 12_345):
        np.testing.assert_array_equal(values(jnp.uint32(late)), np.float32(ends)[:, 1])
    starts = np.float32(ends)[:, 0]
    np.testing.assert_array_equal(values(jnp.uint32(0)), starts)


def test_returns_at_the_ends_of_a_support_have_all_weight_there():
    """And beyond them, by each way to project a return; in between as in float64."""
    supports = [*zip(LOW[:6], HIGH[:6], strict=True), *zip(LOW[-4:], HIGH[-4:], strict=True)]
    values = [Atoms(low, high, 21) for low, high in supports]
    places = np.stack([np.linspace(low, high, 43) for low, high in supports])
    places[:, 0], places[:, -1] = LOW[0] - 99, HIGH[0] + 99
    places = jnp.asarray(places, jnp.float32)
    mass = jnp.asarray(np.eye(21)[np.zeros(43, int)], jnp.float32)  # all of the first return

    @jax.jit
    def project(places):
        results = []
        for value, x in zip(values, places, strict=True):
            clipped = jnp.clip(jnp.tile(x[:, None], 21), value.low, value.high)
            hot = two_hot(x, evenly_spaced(value.low, value.high, 21))
            results.append((value.weigh_all(clipped, mass), value.add_to_two(clipped, mass), hot))
        return results

    for value, x, results in zip(values, places, project(places), strict=True):
        atoms = np.linspace(value.low, value.high, 21)
        gap, largest = atoms[1] - atoms[0], np.float32(np.abs(atoms).max())
        x = np.clip(np.float64(x), value.low, value.high)
        right = np.clip(1 - np.abs(x[:, None] - atoms) / gap, 0, 1)
        assert (right[[0, -1], [0, -1]] == 1).all()
        for weights in results:
            np.testing.assert_allclose(weights, right, atol=4 * np.spacing(largest) / gap)
