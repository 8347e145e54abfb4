"""Policies: samples follow their probabilities, and the formulas are the textbook's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer.ops import distributions
from podracer.ops.distributions import (
    LOG_SCALE_BOUNDS,
    Categorical,
    Normal,
    num_outputs,
    policy,
    to_bounds,
)
from podracer.types import Continuous, Discrete

sample = jax.jit(lambda distribution, keys: distribution.sample(keys))

SAMPLES = 20_000
BOX = Continuous((-2.0, 0.0), (2.0, 1.0))


def keys(count: int, seed: int = 0) -> jax.Array:
    return jax.random.split(jax.random.key(seed), count)


def repeated(logits: np.ndarray, count: int = SAMPLES) -> Categorical:
    return Categorical(jnp.broadcast_to(jnp.asarray(logits, jnp.float32), (count, len(logits))))


@pytest.mark.parametrize(
    "logits",
    [[0.0, 0.0, 0.0], [2.0, -1.0, 0.5, 0.0], [0.3], list(np.linspace(-3, 3, 18)), [40.0, 41.0]],
)
def test_samples_follow_the_softmax(logits):
    actions = sample(repeated(np.array(logits)), keys(SAMPLES))
    assert actions.dtype == jnp.int32
    counts = np.bincount(np.asarray(actions), minlength=len(logits))
    expected = SAMPLES * np.asarray(jax.nn.softmax(jnp.array(logits)), np.float64)
    chi_square = np.sum((counts - expected) ** 2 / expected)
    # The mean plus five deviations of a chi-square distribution.
    freedom = len(logits) - 1
    assert chi_square <= freedom + 5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("low", [-1e9, -np.inf])
@pytest.mark.parametrize("size", [2, 7, 18, 64])
def test_impossible_actions_are_never_chosen(size, low):
    rng = np.random.default_rng(size)
    logits = rng.normal(size=(SAMPLES, size)).astype(np.float32)
    impossible = rng.random((SAMPLES, size)) < 0.5
    impossible[np.arange(SAMPLES), rng.integers(size, size=SAMPLES)] = False
    distribution = Categorical(jnp.where(impossible, low, logits))
    for actions in (sample(distribution, keys(SAMPLES)), distribution.mode()):
        assert not impossible[np.arange(SAMPLES), np.asarray(actions)].any()
    assert np.isfinite(distribution.log_prob(actions)).all()


@pytest.mark.parametrize(("size", "share", "rows"), [(362, 0.4, 20), (4672, 0.98, 4)])  # go, chess
def test_sums_of_many_terms_choose_no_impossible_action(size, share, rows):
    """At all ends of the actions, where the distribution function rounds."""
    rng = np.random.default_rng(size)
    impossible = rng.random((rows, size)) < share
    logits = jnp.where(impossible, -1e9, rng.normal(size=impossible.shape).astype(np.float32))
    cumulative = jnp.cumsum(jax.nn.softmax(logits), axis=-1)
    ends = jnp.minimum(cumulative / cumulative[:, -1:], 1 - 2**-24)
    ends = jnp.round(ends * 2**24) * np.float32(2**-24)  # as uniform numbers are
    ends = jnp.minimum(ends, 1 - 2**-24)
    at = jax.jit(jax.vmap(lambda uniform: Categorical(logits).at(uniform)))
    actions = np.asarray(at(ends.T)).T
    assert not np.take_along_axis(impossible, actions, axis=1).any()


def test_the_ends_of_the_uniform_number_choose_possible_actions(monkeypatch):
    """0, and the largest float below 1, with nothing possible at either end."""
    logits = jnp.array([[-1e9, 1.0, -1e9, 0.3, -1e9]])
    for uniform, action in ((0.0, 1), (1 - 2**-24, 3)):
        monkeypatch.setattr(
            distributions, "random_uniform", lambda keys, u=uniform: jnp.full(keys.shape, u)
        )
        assert Categorical(logits).sample(keys(1)).tolist() == [action]


def test_each_key_decides_one_sample():
    distribution = repeated(np.zeros(1000), 8)
    actions = sample(distribution, keys(8))
    assert len(set(actions.tolist())) > 1
    np.testing.assert_array_equal(actions[::-1], sample(distribution, keys(8)[::-1]))


def test_categorical_formulas():
    rng = np.random.default_rng(0)
    logits, actions = rng.normal(size=(5, 4, 6)) * 3, rng.integers(6, size=(5, 4))
    chances = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    chosen = np.eye(6)[actions]
    ours, action = Categorical(jnp.asarray(logits, jnp.float32)), jnp.asarray(actions)
    log_prob = ours.log_prob(action)
    np.testing.assert_allclose(log_prob, np.log((chances * chosen).sum(-1)), atol=1e-5)
    np.testing.assert_allclose(ours.entropy(), -(chances * np.log(chances)).sum(-1), atol=1e-5)
    np.testing.assert_array_equal(ours.mode(), logits.argmax(-1))
    grad = jax.grad(lambda x: jnp.sum(Categorical(x).log_prob(action)))(ours.logits)
    np.testing.assert_allclose(grad, chosen - chances, atol=1e-5)


def test_entropy_of_a_masked_policy_and_its_gradient_are_finite():
    logits = jnp.array([[1.0, -1e9, 0.0]])
    entropy, grad = jax.value_and_grad(lambda x: Categorical(x).entropy().sum())(logits)
    np.testing.assert_allclose(entropy, Categorical(logits[:, ::2]).entropy()[0], atol=1e-6)
    assert np.isfinite(grad).all()


def test_normal_formulas():
    rng = np.random.default_rng(0)
    mean, log_scale, action = jnp.asarray(rng.normal(size=(3, 5, 4, 2)), jnp.float32)
    distribution = Normal(mean, log_scale)
    scale = np.exp(log_scale)
    density = np.exp(-(((action - mean) / scale) ** 2) / 2) / (scale * np.sqrt(2 * np.pi))
    expected = np.log(density).sum(-1)
    np.testing.assert_allclose(distribution.log_prob(action), expected, atol=1e-4, rtol=1e-4)
    np.testing.assert_allclose(
        distribution.entropy(), np.log(scale * np.sqrt(2 * np.pi * np.e)).sum(-1), atol=1e-5
    )
    np.testing.assert_array_equal(distribution.mode(), mean)


def test_normal_samples_have_its_moments():
    mean, log_scale = jnp.array([1.0, -3.0]), jnp.array([0.5, -1.0])
    batch = Normal(*(jnp.broadcast_to(x, (SAMPLES, 2)) for x in (mean, log_scale)))
    samples = np.asarray(sample(batch, keys(SAMPLES)))
    scale = np.exp(np.asarray(log_scale))
    error = 5 / np.sqrt(SAMPLES)
    np.testing.assert_allclose(samples.mean(0), mean, atol=error * scale.max())
    np.testing.assert_allclose(samples.std(0), scale, rtol=error)
    assert abs(np.corrcoef(samples.T)[0, 1]) < error
    entropy = -np.asarray(batch.log_prob(jnp.asarray(samples))).mean()
    np.testing.assert_allclose(entropy, batch.entropy()[0], atol=2 * error)


@pytest.mark.parametrize("space", [Discrete(4), BOX], ids=["discrete", "continuous"])
def test_the_divergence_is_the_mean_difference_of_log_probabilities(space):
    outputs = jax.random.normal(jax.random.key(1), (2, num_outputs(space)))
    one, other = (policy(space, x) for x in outputs)
    many = policy(space, jnp.broadcast_to(outputs[0], (SAMPLES, outputs.shape[-1])))
    actions = sample(many, keys(SAMPLES))
    against = policy(space, jnp.broadcast_to(outputs[1], (SAMPLES, outputs.shape[-1])))
    difference = many.log_prob(actions) - against.log_prob(actions)
    error = jnp.std(difference) / np.sqrt(SAMPLES)
    assert abs(one.divergence(other) - jnp.mean(difference)) < 4 * error
    assert one.divergence(one) == 0 < other.divergence(one)


def test_the_divergence_of_nearly_equal_normals_is_exact():
    """Of scales alone it is about their difference squared, far less than the last digit of 1."""
    other_log_scale = np.float32([3e-4])
    zero = jnp.zeros(1)
    divergence = Normal(zero, zero).divergence(Normal(zero, jnp.asarray(other_log_scale)))
    ratio = -np.float64(other_log_scale[0])
    np.testing.assert_allclose(divergence, 0.5 * np.expm1(2 * ratio) - ratio, rtol=1e-3)


def test_a_policy_reads_what_num_outputs_asks_for():
    outputs = jnp.arange(12.0).reshape(1, 3, 4) - 8
    assert num_outputs(Discrete(4)) == num_outputs(BOX) == 4
    np.testing.assert_array_equal(policy(Discrete(4), outputs).logits, outputs)
    normal = policy(BOX, outputs)
    np.testing.assert_array_equal(normal.mean, outputs[..., :2])
    np.testing.assert_array_equal(normal.log_scale, np.clip(outputs[..., 2:], *LOG_SCALE_BOUNDS))


@pytest.mark.parametrize("batch", [(), (3,), (5, 3)])
def test_actions_are_scaled_to_the_bounds(batch):
    def scaled(*action):
        return to_bounds(BOX, jnp.broadcast_to(jnp.array(action), (*batch, 2)))

    for action, expected in (
        ((-1.0, -1.0), (-2.0, 0.0)),
        ((1.0, 1.0), (2.0, 1.0)),
        ((0.0, 0.5), (0.0, 0.75)),
        ((-9.0, 9.0), (-2.0, 1.0)),
    ):
        np.testing.assert_allclose(scaled(*action), np.broadcast_to(expected, (*batch, 2)))


def test_rounding_takes_no_action_past_a_bound():
    """In float32 `-0.1 + (0.2 - -0.1)` is more than 0.2."""
    space = Continuous((-0.1, -0.7, -3.9), (0.2, -0.2, -0.8))
    for sign, bound in ((-1.0, space.low), (1.0, space.high)):
        action = to_bounds(space, jnp.full((4, 3), sign))
        np.testing.assert_array_equal(action, np.tile(np.float32(bound), (4, 1)))


def test_discrete_actions_need_no_bounds():
    action = jnp.array([0, 3, 1], jnp.int32)
    assert to_bounds(Discrete(4), action) is action
