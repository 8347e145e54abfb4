"""Distributions of returns, scales of values and noisy heads, against rlax and closed forms."""

from __future__ import annotations

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from variants import variants

from podracer.errors import ConfigError
from podracer.fields import check_ranges
from podracer.networks.layers import NoisyLinear
from podracer.ops.action_values import Atoms, Mean, Quantiles, SquaredMean
from podracer.ops.distributions import SquashedNormal, from_bounds, to_bounds
from podracer.ops.random import random_normals
from podracer.ops.returns import n_step_returns, n_step_targets
from podracer.ops.transforms import evenly_spaced, squash, two_hot, unsquash
from podracer.types import Continuous

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what rlax imports
    import rlax

N = 40


@pytest.fixture
def batch():
    random = np.random.default_rng(0)

    def draw(*shape, scale=1.0):
        return jnp.asarray(random.normal(size=(N, *shape)) * scale, jnp.float32)

    discounts = jnp.asarray(random.choice([0.0, 0.9, 0.99], N), jnp.float32)
    return draw, draw(scale=3.0), discounts


@pytest.mark.parametrize(
    ("value", "expected"), [(Mean(), rlax.huber_loss), (SquaredMean(), rlax.l2_loss)]
)
def test_the_mean_learns_by_huber_or_by_squares(value, expected, batch):
    draw, returns, discounts = batch
    ours, after = draw(1), draw(1)
    loss, priority = value.loss(ours, after, returns, discounts)
    error = returns + discounts * after[:, 0] - ours[:, 0]
    np.testing.assert_allclose(loss, expected(error), rtol=1e-5)
    np.testing.assert_allclose(priority, jnp.abs(error), rtol=1e-5)


def test_atoms_are_projected_as_rlax_does(batch):
    draw, returns, discounts = batch
    value = Atoms(-4.0, 6.0, 21)
    ours, after = draw(21), draw(21, scale=2.0)
    places = returns[:, None] + discounts[:, None] * value.support[None]
    mass = jax.nn.softmax(after)
    projected = value.project(places, mass)
    expected = jax.vmap(rlax.categorical_l2_project, in_axes=(0, 0, None))(
        places, mass, value.support
    )
    np.testing.assert_allclose(projected, expected, atol=1e-5)
    np.testing.assert_allclose(projected.sum(-1), 1.0, rtol=1e-5)
    loss, _ = value.loss(ours, after, returns, discounts)
    cross_entropy = -jnp.sum(expected * jax.nn.log_softmax(ours), axis=-1)
    np.testing.assert_allclose(loss, cross_entropy, rtol=1e-4)
    mean = jax.nn.softmax(ours) @ value.support
    np.testing.assert_allclose(value.mean(ours), mean, rtol=1e-4, atol=1e-5)


@variants("value", [Atoms(), Atoms(0.0, 100.0, 2)], [Atoms(-4.0, 6.0, 101)], ids=str)
def test_adding_to_two_atoms_is_weighing_all(value):
    random = np.random.default_rng(1)
    values = random.normal(size=(256, value.atoms)) * 0.6 * (value.high - value.low)
    values[0] = value.support  # exactly the atoms
    values = jnp.asarray(np.clip(values, value.low, value.high), jnp.float32)
    mass = jax.nn.softmax(jnp.asarray(random.normal(size=values.shape), jnp.float32))
    added, weighed = value.add_to_two(values, mass), value.weigh_all(values, mass)
    np.testing.assert_allclose(added, weighed, atol=1e-6, rtol=1e-5)
    np.testing.assert_allclose(added[0], mass[0], atol=1e-6)
    np.testing.assert_allclose(added.sum(-1), 1.0, atol=1e-6)
    np.testing.assert_array_equal(value.project(values, mass), added)  # on a CPU


def test_quantiles_learn_as_in_rlax(batch):
    draw, returns, discounts = batch
    value = Quantiles(9)
    ours, after = draw(9), draw(9)
    share = (jnp.arange(9) + 0.5) / 9
    target = returns[:, None] + discounts[:, None] * after

    def one(ours, target):
        return rlax.quantile_regression_loss(ours, share, target, huber_param=1.0)

    loss, _ = value.loss(ours, after, returns, discounts)
    np.testing.assert_allclose(loss, jax.vmap(one)(ours, target), rtol=1e-4)


@pytest.mark.parametrize("x", [-300.0, -1.0, 0.0, 0.3, 7.0, 5000.0])
def test_scales_are_those_of_rlax_and_inverse(x):
    x = jnp.float32(x)
    np.testing.assert_allclose(squash(x), rlax.signed_hyperbolic(x), rtol=1e-5)
    np.testing.assert_allclose(unsquash(squash(x)), x, rtol=1e-5, atol=1e-6)


def test_small_numbers_survive_the_scales():
    """Against float64; a difference of numbers near 1 would leave nothing of 1e-8."""
    x = np.float32(np.concatenate([sign * np.logspace(-12, -2, 101) for sign in (-1, 1)]))
    exact = np.float64(x)
    squashed = np.sign(x) * np.expm1(0.5 * np.log1p(np.abs(exact))) + 1e-3 * exact
    np.testing.assert_allclose(squash(jnp.asarray(x)), squashed, rtol=1e-6)
    np.testing.assert_allclose(unsquash(squash(jnp.asarray(x))), exact, rtol=1e-6)
    support = evenly_spaced(-5.0, 5.0, 21)
    means = np.float64(two_hot(jnp.asarray(x), support)) @ np.float64(support)
    np.testing.assert_allclose(means, exact, rtol=1e-6)
    assert jax.grad(squash)(0.0) == np.float32(0.501)


def test_two_hot_has_the_mean_that_it_stands_for():
    support = evenly_spaced(-5.0, 5.0, 21)
    x = jnp.asarray([[-7.0, -5.0, -1.3], [0.25, 4.99, 9.0]])
    weights = two_hot(x, support)
    np.testing.assert_allclose(weights @ support, jnp.clip(x, -5, 5), atol=1e-5)
    assert ((weights > 0).sum(-1) <= 2).all()
    expected = rlax.transform_to_2hot(x, -5.0, 5.0, 21)
    np.testing.assert_allclose(weights, expected, atol=1e-4)


def test_n_step_returns_equal_a_plain_loop():
    random = np.random.default_rng(1)
    T, columns = 5, 200
    reward = random.normal(size=(T, columns)).astype(np.float32)
    discount = random.choice([0.0, 0.9], (T, columns), p=[0.2, 0.8]).astype(np.float32)
    valid = random.uniform(size=(T, columns)) < 0.8
    got = n_step_returns(*map(jnp.asarray, (reward, discount, valid)))
    for b in range(columns):
        total, factor, k = 0.0, 1.0, 0
        while k < T and valid[k, b]:
            total += factor * reward[k, b]
            factor *= discount[k, b]
            k += 1
        np.testing.assert_allclose([x[b] for x in got], [total, factor, k], atol=1e-5)


def test_n_step_targets_equal_a_plain_loop():
    random = np.random.default_rng(2)
    T, n, columns = 7, 3, 100
    value = random.normal(size=(T + 1, columns)).astype(np.float32)
    reward = random.normal(size=(T, columns)).astype(np.float32)
    discount = random.choice([0.0, 0.9], (T, columns), p=[0.2, 0.8]).astype(np.float32)
    valid = random.uniform(size=(T, columns)) < 0.8
    got = n_step_targets(*map(jnp.asarray, (value, reward, discount, valid)), n)
    assert got.shape == (T - n + 1, columns)
    for t in range(T - n + 1):
        for b in range(columns):
            total, factor, k = 0.0, 1.0, t
            while k < t + n and valid[k, b]:
                total += factor * reward[k, b]
                factor *= discount[k, b]
                k += 1
            np.testing.assert_allclose(got[t, b], total + factor * value[k, b], atol=1e-5)


def test_squashed_actions_have_the_density_of_their_change_of_variables():
    """Against the derivative of tanh, taken by JAX, where it is not lost to rounding."""
    mean, log_scale = jnp.asarray([[0.3, -0.8]]), jnp.asarray([[-1.0, 0.2]])
    keys = jax.random.split(jax.random.key(0), 500)
    policy = SquashedNormal(jnp.tile(mean, (500, 1)), jnp.tile(log_scale, (500, 1)))
    action, log_prob = policy.sample(keys)
    raw = jnp.arctanh(action)
    inside = (jnp.abs(action) < 0.99).all(-1)
    density = jax.scipy.stats.norm.logpdf(raw, policy.mean, jnp.exp(policy.log_scale))
    slope = jax.vmap(jax.vmap(jax.grad(jnp.tanh)))(raw)
    expected = (density - jnp.log(slope)).sum(-1)
    np.testing.assert_allclose(log_prob[inside], expected[inside], rtol=1e-3, atol=1e-3)
    assert np.isfinite(log_prob).all()
    np.testing.assert_allclose(policy.mode()[0], jnp.tanh(mean[0]), rtol=1e-6)


def test_actions_come_back_from_the_bounds():
    space = Continuous((-2.0, 0.0), (1.0, 10.0))
    action = jnp.asarray([[-1.0, 1.0], [0.25, -0.5]])
    np.testing.assert_allclose(from_bounds(space, to_bounds(space, action)), action, atol=1e-6)


def test_a_support_has_two_ends():
    with pytest.raises(ConfigError, match=r"atoms must be at least 2, but it is 1"):
        check_ranges(Atoms(atoms=1), "value")
    with pytest.raises(ConfigError, match=r"atoms need low < high, but they are 2.0 and 2.0"):
        Atoms(2.0, 2.0)


def test_noise_is_factorized_for_each_row_and_none_without_it():
    layer, rng = NoisyLinear(6, 3, key=jax.random.key(0)), np.random.default_rng(0)
    x, e = (jnp.asarray(rng.normal(size=(4, n)), jnp.float32) for n in (6, 9))
    plain = layer(x, None)
    np.testing.assert_allclose(plain, x @ layer.weight + layer.bias[None], rtol=1e-5, atol=1e-6)
    noisy = layer(x, e)
    for row in range(4):
        weight = layer.weight + layer.weight_scale * np.outer(e[row, :6], e[row, 6:])
        bias = layer.bias + layer.bias_scale * e[row, 6:]
        np.testing.assert_allclose(noisy[row], x[row] @ weight + bias, rtol=1e-4, atol=1e-5)


def test_one_noise_for_all_rows_is_the_same_noise_in_each_of_them():
    layer, rng = NoisyLinear(6, 3, key=jax.random.key(0)), np.random.default_rng(0)
    x, e = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((4, 6), (1, 9)))

    def through(e):
        grads = jax.grad(lambda layer, x: jnp.sum(jnp.sin(layer(x, e))), (0, 1))
        return layer(x, e), grads(layer, x)

    both = zip(*map(jax.tree.leaves, (through(e), through(jnp.repeat(e, 4, 0)))), strict=True)
    for shared, separate in both:
        np.testing.assert_allclose(shared, separate, rtol=1e-5, atol=1e-6)


@variants("inputs", [64], [512])
def test_noise_is_as_large_as_in_its_paper(inputs):
    """Fortunato et al. 2018, section 3.2: sigma = 0.5 / sqrt(p) for p inputs, of weights as of
    biases, which are uniform within 1 / sqrt(p). So the output for features of root mean square 1
    varies by about 0.4 for any p."""
    layer = NoisyLinear(inputs, 8, key=jax.random.key(0))
    np.testing.assert_allclose(layer.weight_scale * np.sqrt(inputs), 0.5, rtol=1e-6)
    np.testing.assert_allclose(layer.bias_scale * np.sqrt(inputs), 0.5, rtol=1e-6)
    for mean in (layer.weight, layer.bias):
        assert np.abs(mean).max() <= 1 / np.sqrt(inputs)
    np.testing.assert_allclose(np.std(layer.weight), 1 / np.sqrt(3 * inputs), rtol=0.1)
    smaller = NoisyLinear(inputs, 8, noise_scale=0.1, key=jax.random.key(0))
    np.testing.assert_allclose(smaller.weight_scale * 5, layer.weight_scale, rtol=1e-6)
    x = jax.random.normal(jax.random.key(1), (1, inputs))
    x = x / jnp.sqrt(jnp.mean(x**2))
    keys = jax.random.split(jax.random.key(2), 4000)
    e = random_normals(keys, inputs + 8)
    e = jnp.sign(e) * jnp.sqrt(jnp.abs(e))
    spread = np.std(layer(jnp.tile(x, (4000, 1)), e) - layer(x, None))
    # E f(e)^2 = E |e| = sqrt(2 / pi), once for the input and once for the output.
    of_f = np.sqrt(2 / np.pi)
    np.testing.assert_allclose(spread, np.sqrt(0.25 * (of_f**2 + of_f / inputs)), rtol=0.05)
