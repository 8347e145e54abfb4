"""Likelihood of clipped actions: probabilities sum to 1, at a bound as in compiled programs."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from podracer.ops.distributions import Normal, from_bounds
from podracer.types import Continuous
from podracer_offline.likelihood import clipped_log_prob
from podracer_testing.parity import optimized


def boxes():
    """4,000 random boxes and all symmetric ones up to 10, of two decimals: f64 `[B]` bounds."""
    random = np.sort(np.random.default_rng(0).uniform(-10, 10, (5_000, 2)).round(2))
    random = random[random[:, 0] < random[:, 1]][:4_000]
    symmetric = np.arange(1, 1_001) / 100
    bounds = np.concatenate([random, np.stack([-symmetric, symmetric], axis=1)])
    return bounds.astype(np.float32).astype(np.float64).T


LOW, HIGH = boxes()
SPACE = Continuous(tuple(LOW.tolist()), tuple(HIGH.tolist()))


def test_clipped_samples_have_the_probability_of_what_lies_beyond_the_bounds():
    """All probabilities sum to 1, and gradients are finite however far a mean is from a bound."""
    grid = np.linspace(-1, 1, 4_001)[1:-1]
    one = Normal(*(jnp.full((len(grid), 1), x) for x in (0.7, -0.5)))
    density = np.exp(clipped_log_prob(one, jnp.asarray(grid, jnp.float32)[:, None]))
    bounds = np.exp(
        clipped_log_prob(Normal(one.mean[:2], one.log_scale[:2]), jnp.array([[-1.0], [1.0]]))
    )
    assert abs(density.sum() * (grid[1] - grid[0]) + bounds.sum() - 1) < 1e-3
    np.testing.assert_allclose(
        bounds, stats.norm.sf([1.7 * np.exp(0.5), 0.3 * np.exp(0.5)]), rtol=1e-5
    )

    mean = jnp.array([-1e4, -50.0, -3.0, -0.7, 0.9, 2.0, 1e4])[:, None]
    log_prob, slope = jax.vmap(
        jax.value_and_grad(lambda x: clipped_log_prob(Normal(x, jnp.float32([-2.0])), jnp.ones(1)))
    )(mean)
    z = (1 - np.float64(mean[:, 0])) * np.exp(2)
    np.testing.assert_allclose(log_prob, stats.norm.logsf(z), rtol=1e-5, atol=1e-6)
    hazard = np.exp(stats.norm.logpdf(z[2:]) - stats.norm.logsf(z[2:]))
    np.testing.assert_allclose(slope[:, 0], np.exp(2) * np.array([*z[:2], *hazard]), rtol=1e-3)


@pytest.mark.parametrize("side", [-1.0, 1.0])
def test_an_action_at_a_bound_has_the_likelihood_of_all_beyond_it(side):
    """And its neighbor inside has a density."""
    bound, other = (HIGH, LOW) if side > 0 else (LOW, HIGH)
    bound, other = bound.astype(np.float32), other.astype(np.float32)
    # Programs flush the numbers next to 0.
    near = np.sign(other) * np.float32(1e-30)
    beside = np.where(bound == 0, near, np.nextafter(bound, other))
    action = jnp.asarray(np.stack([bound, beside]), jnp.float32)

    def log_prob(action):
        scaled = from_bounds(SPACE, action)[..., None]
        policy = Normal(jnp.full_like(scaled, 2 * side), jnp.full_like(scaled, -2.0))
        return clipped_log_prob(policy, scaled)

    with optimized():  # as users compile
        at_bound, inside = np.asarray(jax.jit(log_prob)(action))
    std = math.exp(-2)
    np.testing.assert_allclose(at_bound, stats.norm.logsf(1, 2, std), atol=1e-9)
    np.testing.assert_allclose(inside, stats.norm.logpdf(1, 2, std), rtol=1e-3)
