"""Targets and advantages against rlax, and against slow forward sums that understand cuts."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer.ops import returns

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of what rlax imports
    import rlax

generalized_advantages = jax.jit(returns.generalized_advantages)
lambda_returns = jax.jit(returns.lambda_returns)
vtrace = jax.jit(returns.vtrace)
retrace = jax.jit(returns.retrace)
discounted_sums = jax.jit(returns.discounted_sums)

LAMBDAS = (0.0, 0.5, 0.95, 1.0)
T = 12
TERMINAL, TIMEOUT = "terminal", "timeout"
# One column of the batch each: at which transitions an episode ends, and how.
CUTS = (
    {},
    {5: TERMINAL},
    {5: TIMEOUT},
    {3: TERMINAL, 8: TIMEOUT},
    {3: TIMEOUT, 8: TIMEOUT},
    {4: TERMINAL, 5: TERMINAL},
    {4: TIMEOUT, 5: TERMINAL},
    {0: TERMINAL, T - 1: TERMINAL},
    {0: TIMEOUT, T - 1: TIMEOUT},
)


class Data(NamedTuple):
    v_tm1: np.ndarray
    v_t: np.ndarray
    r_t: np.ndarray
    discount_t: np.ndarray
    valid_tm1: np.ndarray


def episodes(cuts: tuple[dict[int, str], ...], seed: int = 0) -> Data:
    """Random rewards, values and discounts `[T, len(cuts)]`, cut where the columns say."""
    rng = np.random.default_rng(seed)
    shape = (T, len(cuts))
    values = rng.normal(size=(T + 1, len(cuts))).astype(np.float32)
    discount = rng.uniform(0.8, 1.0, shape).astype(np.float32)
    valid = np.ones(shape, bool)
    for b, column in enumerate(cuts):
        for t, kind in column.items():
            if kind == TERMINAL:
                discount[t, b] = 0.0
            else:
                valid[t, b] = False
    reward = rng.normal(size=shape).astype(np.float32)
    return Data(values[:-1], values[1:], reward, discount, valid)


def end_of(data: Data, t: int, b: int) -> int:
    """The transition after the last one that a target at t may see."""
    for k in range(t, T):
        if not data.valid_tm1[k, b]:
            return k
        if data.discount_t[k, b] == 0:
            return k + 1
    return T


def slow_lambda_return(data: Data, lambda_: float, t: int, b: int) -> float:
    """The mixture of n-step returns of Sutton and Barto 2018, equation 12.3."""
    end = end_of(data, t, b)
    if end == t:
        return float(data.v_tm1[t, b])
    mixture, rewards, discount = 0.0, 0.0, 1.0
    for n, k in enumerate(range(t, end)):
        rewards += discount * float(data.r_t[k, b])
        discount *= float(data.discount_t[k, b])
        n_step = rewards + discount * float(data.v_t[k, b])
        mixture += lambda_**n * (1 - lambda_ if k < end - 1 else 1) * n_step
    return mixture


def slow_vtrace_target(
    data: Data,
    rho: np.ndarray,
    clips: dict[str, float],
    lambda_: float,
    t: int,
    b: int,
    alpha_rho: float = 1.0,
    alpha_c: float = 1.0,
) -> float:
    """Espeholt et al. 2018, equation 1, as the sum over what follows; clips that leak."""
    target, weight = float(data.v_tm1[t, b]), 1.0
    for k in range(t, end_of(data, t, b)):
        discount = float(data.discount_t[k, b])
        delta = data.r_t[k, b] + discount * data.v_t[k, b] - data.v_tm1[k, b]
        target += weight * leaky(rho[k, b], clips["clip_rho"], alpha_rho) * float(delta)
        weight *= discount * lambda_ * leaky(rho[k, b], clips["clip_c"], alpha_c)
    return target


def leaky(rho: float, clip: float, alpha: float) -> float:
    return alpha * min(clip, rho) + (1 - alpha) * rho


def table(function) -> np.ndarray:
    """`function(t, b)` for every transition of every column of `CUTS`."""
    return np.array([[function(t, b) for b in range(len(CUTS))] for t in range(T)])


@pytest.mark.parametrize("lambda_", LAMBDAS)
def test_lambda_returns_and_advantages_equal_mixtures_of_n_step_returns(lambda_):
    data = episodes(CUTS)
    expected = table(lambda t, b: slow_lambda_return(data, lambda_, t, b))
    np.testing.assert_allclose(lambda_returns(*data, lambda_), expected, atol=1e-5)
    advantages = generalized_advantages(*data, lambda_)
    np.testing.assert_allclose(advantages, expected - data.v_tm1, atol=1e-5)


@pytest.mark.parametrize("clips", [(1.0, 1.0, 1.0), (2.0, 0.7, 1.5)])
@pytest.mark.parametrize("lambda_", LAMBDAS)
def test_vtrace_equals_its_definition(lambda_, clips):
    data = episodes(CUTS)
    rho = np.random.default_rng(1).uniform(0.2, 3.0, data.r_t.shape).astype(np.float32)
    clips = dict(zip(("clip_rho", "clip_c", "clip_pg_rho"), clips, strict=True))
    got = vtrace(*data, rho, lambda_=lambda_, **clips)
    targets = table(lambda t, b: slow_vtrace_target(data, rho, clips, lambda_, t, b))
    np.testing.assert_allclose(got.targets, targets, atol=1e-5)

    following = np.concatenate([targets[1:], data.v_t[-1:]])
    following[:-1] = lambda_ * following[:-1] + (1 - lambda_) * data.v_t[:-1]
    gain = data.r_t + data.discount_t * following - data.v_tm1
    expected = data.valid_tm1 * np.minimum(clips["clip_pg_rho"], rho) * gain
    np.testing.assert_allclose(got.advantages, expected, atol=1e-5)


def slow_retrace_target(data: Data, rho: np.ndarray, lambda_: float, t: int, b: int) -> float:
    """Munos et al. 2016, equation 4: the value and the discounted, weighted errors that follow.

    The data's `v_tm1` are the values of the actions taken.
    """
    target, weight = float(data.v_tm1[t, b]), 1.0
    for k in range(t, end_of(data, t, b)):
        discount = float(data.discount_t[k, b])
        delta = data.r_t[k, b] + discount * data.v_t[k, b] - data.v_tm1[k, b]
        target += weight * float(delta)
        weight *= discount * lambda_ * min(1.0, float(rho[min(k + 1, T - 1), b]))
    return target


@pytest.mark.parametrize("lambda_", LAMBDAS)
def test_retrace_equals_its_definition_and_rlax(lambda_):
    data = episodes(CUTS)
    rho = np.random.default_rng(1).uniform(0.2, 3.0, data.r_t.shape).astype(np.float32)
    expected = table(lambda t, b: slow_retrace_target(data, rho, lambda_, t, b))
    np.testing.assert_allclose(retrace(*data, rho, lambda_), expected, atol=1e-5)

    whole = episodes(({}, {5: TERMINAL}))  # rlax knows no time-outs
    for b in range(2):
        q, v, r, discount = (x[:, b] for x in whole[:4])
        traces = lambda_ * np.minimum(1.0, rho[1:, b])
        other = rlax.general_off_policy_returns_from_q_and_v(q[1:], v, r, discount, traces)
        np.testing.assert_allclose(retrace(*whole, rho[:, :2], lambda_)[:, b], other, atol=1e-5)


def test_leaky_vtrace_equals_its_definition():
    data, lambda_, clips = episodes(CUTS), 0.9, {"clip_rho": 1.5, "clip_c": 0.8}
    rho = np.random.default_rng(1).uniform(0.2, 3.0, data.r_t.shape).astype(np.float32)
    alphas = {"alpha_rho": 0.7, "alpha_c": 0.4}
    got = vtrace(*data, rho, lambda_=lambda_, clip_pg_rho=1.5, **clips, **alphas)
    targets = table(lambda t, b: slow_vtrace_target(data, rho, clips, lambda_, t, b, **alphas))
    np.testing.assert_allclose(got.targets, targets, atol=1e-5, rtol=1e-5)

    following = np.concatenate([targets[1:], data.v_t[-1:]])
    following[:-1] = lambda_ * following[:-1] + (1 - lambda_) * data.v_t[:-1]
    gain = data.r_t + data.discount_t * following - data.v_tm1
    weight = np.vectorize(leaky)(rho, 1.5, 0.7)
    expected = data.valid_tm1 * weight * gain
    np.testing.assert_allclose(got.advantages, expected, atol=1e-5, rtol=1e-5)
    tight = vtrace(*data, rho, lambda_=lambda_, alpha_rho=1.0, alpha_c=1.0)
    np.testing.assert_allclose(tight.targets, vtrace(*data, rho, lambda_=lambda_).targets)


def test_vtrace_on_policy_is_the_lambda_return():
    data = episodes(CUTS)
    got = vtrace(*data, np.ones_like(data.r_t), lambda_=0.9)
    np.testing.assert_allclose(got.targets, lambda_returns(*data, 0.9), atol=1e-5)


@pytest.mark.parametrize("lambda_", LAMBDAS)
def test_uncut_rollouts_equal_rlax(lambda_):
    data = episodes(({},) * 5)
    values = np.concatenate([data.v_tm1, data.v_t[-1:]])
    rho = np.random.default_rng(1).uniform(0.2, 3.0, data.r_t.shape).astype(np.float32)

    def batched(function, *args):
        return jax.vmap(function, in_axes=1, out_axes=1)(*args)

    advantages = batched(
        lambda r, d, v: rlax.truncated_generalized_advantage_estimation(r, d, lambda_, v),
        data.r_t, data.discount_t, values,
    )  # fmt: skip
    returns = batched(
        lambda r, d, v: rlax.lambda_returns(r, d, v, lambda_), data.r_t, data.discount_t, data.v_t
    )
    traced = batched(
        lambda *x: rlax.vtrace_td_error_and_advantage(*x, lambda_, 1.0, 1.0),
        data.v_tm1, data.v_t, data.r_t, data.discount_t, rho,
    )  # fmt: skip
    ours = vtrace(*data, rho, lambda_=lambda_)
    np.testing.assert_allclose(generalized_advantages(*data, lambda_), advantages, atol=1e-5)
    np.testing.assert_allclose(lambda_returns(*data, lambda_), returns, atol=1e-5)
    np.testing.assert_allclose(ours.targets, data.v_tm1 + traced.errors, atol=1e-5)
    np.testing.assert_allclose(ours.advantages, traced.pg_advantage, atol=1e-5)

    leaking = batched(
        lambda *x: rlax.leaky_vtrace_td_error_and_advantage(*x, 0.6, lambda_, 1.0, 1.0),
        data.v_tm1, data.v_t, data.r_t, data.discount_t, rho,
    )  # fmt: skip
    ours = vtrace(*data, rho, lambda_=lambda_, alpha_rho=0.6, alpha_c=0.6)
    np.testing.assert_allclose(ours.targets, data.v_tm1 + leaking.errors, atol=1e-5)
    np.testing.assert_allclose(ours.advantages, leaking.pg_advantage, atol=1e-5)


def test_nothing_crosses_a_cut():
    """What follows an episode, and what is said at a time-out's own step, changes no target."""
    data = episodes(CUTS)
    rng = np.random.default_rng(7)
    reward, values = data.r_t.copy(), np.concatenate([data.v_tm1, data.v_t[-1:]])
    b, cut = 2, 5
    assert CUTS[b] == {cut: TIMEOUT}
    reward[cut:, b] = rng.normal(size=T - cut)
    values[cut + 1 :, b] = rng.normal(size=T - cut)
    other = data._replace(r_t=reward, v_tm1=values[:-1], v_t=values[1:])
    before, after = lambda_returns(*data, 0.9), lambda_returns(*other, 0.9)
    np.testing.assert_array_equal(before[: cut + 1, b], after[: cut + 1, b])
    assert (np.abs(before[cut + 1 :, b] - after[cut + 1 :, b]) > 0).all()
    assert generalized_advantages(*data, 0.9)[cut, b] == 0


def test_any_batch_shape_and_traced_lambda():
    data = episodes(CUTS)
    whole = generalized_advantages(*data, 0.9)
    one = generalized_advantages(*(x[:, 0] for x in data), 0.9)
    more = generalized_advantages(*(x.reshape(T, 3, 3) for x in data), 0.9)
    np.testing.assert_allclose(one, whole[:, 0], atol=1e-6)
    np.testing.assert_allclose(more.reshape(T, -1), whole, atol=1e-6)
    several = jax.vmap(lambda x: generalized_advantages(*data, x))(jnp.asarray(LAMBDAS))
    np.testing.assert_allclose(several[1], generalized_advantages(*data, LAMBDAS[1]), atol=1e-6)


def test_discounted_sums_equal_a_loop():
    rng = np.random.default_rng(0)
    reward = rng.normal(size=(T, 4)).astype(np.float32)
    ended = rng.random((T, 4)) < 0.3
    before = rng.normal(size=4).astype(np.float32)
    decay = np.full_like(reward, 0.9)
    sums, after = discounted_sums(before, reward, decay, ended)

    total, expected = before.copy(), []
    for t in range(T):
        total = reward[t] + 0.9 * total
        expected.append(total.copy())
        total[ended[t]] = 0
    np.testing.assert_allclose(sums, np.stack(expected), atol=1e-5)
    np.testing.assert_allclose(after, total, atol=1e-5)


def test_discounted_sums_continue_from_rollout_to_rollout():
    rng = np.random.default_rng(0)
    reward = rng.normal(size=(T, 4)).astype(np.float32)
    ended = rng.random((T, 4)) < 0.3
    decay = np.full_like(reward, 0.9)
    whole, last = discounted_sums(np.zeros(4, np.float32), reward, decay, ended)
    first, between = discounted_sums(np.zeros(4, np.float32), reward[:5], decay[:5], ended[:5])
    second, after = discounted_sums(between, reward[5:], decay[5:], ended[5:])
    np.testing.assert_allclose(np.concatenate([first, second]), whole, atol=1e-6)
    np.testing.assert_allclose(after, last, atol=1e-6)
