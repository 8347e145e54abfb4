"""Trading: the environment against a slow reference, its periods, figures and baselines."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podracer.environment import AutoReset, auto_reset
from podracer.envs import make
from podracer.envs.pendulum import Pendulum
from podracer.errors import ConfigError
from podracer_trading.backtest import trading_in
from podracer_trading.baselines import buy_and_hold, minimum_variance, minimum_variance_weights
from podracer_trading.environment import Trading, execute_orders
from podracer_trading.market import Market, Period, split_market
from podracer_trading.metrics import compute_performance
from podracer_trading.synthetic import optimal_wealth, synthetic_market, wave_market

STEPS = 120


def quarters(bars: int = 900) -> Market:
    """A market whose closes are multiples of a quarter: with a fee of 1/64 all sums are exact in
    float32, however a compiler orders or fuses them."""
    market = synthetic_market(tickers=5, bars=bars)
    close = np.round(np.clip(market.close, 20, 200) * 4) / 4
    return dataclasses.replace(market, open=close, high=close, low=close, close=close)


EXACT: dict[str, Any] = {
    "cash": 2e4, "cost": 1 / 64, "turbulence_threshold": 6.0, "random_start": False,
}  # fmt: skip


def run(env: Any, actions: np.ndarray, seed: int = 0) -> Any:
    """States and timesteps `[T + 1, B, ...]` under actions `[T, B, D]`, in numpy."""
    keys = jax.random.split(jax.random.key(seed), actions.shape[1])

    def body(carry: Any, action: jax.Array) -> Any:
        carry = jax.vmap(env.step)(keys, carry[0], action)
        return carry, carry

    def whole(actions: jax.Array) -> Any:
        start = jax.vmap(env.reset)(keys)
        _, rest = jax.lax.scan(body, start, actions)
        return jax.tree.map(lambda x, y: jnp.concatenate([x[None], y]), start, rest)

    return jax.device_get(jax.jit(whole)(jnp.asarray(actions, jnp.float32)))


def wealth_of(env: Trading, states: Any) -> np.ndarray:
    """Cash and shares in float64."""
    price = env.data.price.astype(np.float64)[states.time]
    return states.cash.to_float64() + (states.shares * price).sum(axis=-1)


def some_actions(steps: int, num: int, tickers: int) -> np.ndarray:
    return np.random.default_rng(0).uniform(-1.1, 1.3, (steps, num, tickers)).astype(np.float32)


# --- the environment against plain Python --------------------------------------------------------


class Slow:
    """One environment, one number at a time."""

    def __init__(self, env: Trading, state: Any) -> None:
        self.env, self.data = env, env.data
        self.cash, self.time = float(state.cash), int(state.time)
        self.shares, self.steps_since_trade = (
            state.shares.tolist(),
            state.steps_since_trade.tolist(),
        )
        self.ignored = self.short = self.liquidated = 0  # how often each rule mattered

    def step(self, action: np.ndarray) -> float:
        env, now = self.env, self.data.price[self.time].tolist()
        turbulent = self.data.turbulence[self.time] > env.turbulence_threshold
        self.time += 1
        price, before = self.data.price[self.time].tolist(), list(self.shares)
        fees, tickers = 0.0, range(len(price))
        orders = [int(np.float32(env.max_shares) * min(max(a, np.float32(-1)), np.float32(1)))
                  for a in action]  # fmt: skip
        for i in tickers:
            if turbulent:
                orders[i] = -self.shares[i]
            elif abs(orders[i]) < env.min_trade * env.max_shares:
                self.ignored += orders[i] != 0
                orders[i] = 0
        for i in tickers:
            if orders[i] < 0:
                sold = min(-orders[i], self.shares[i])
                self.shares[i] -= sold
                self.cash += sold * price[i] * (1 - env.cost)
                fees += sold * price[i] * env.cost
        for i in tickers:
            if orders[i] > 0:
                bought = min(orders[i], int(self.cash // (price[i] * (1 + env.cost))))
                self.short += bought < orders[i]
                self.shares[i] += bought
                self.cash -= bought * price[i] * (1 + env.cost)
                fees += bought * price[i] * env.cost
        self.liquidated += turbulent and any(before)
        self.steps_since_trade = [
            0 if self.shares[i] != before[i] else self.steps_since_trade[i] + 1 for i in tickers
        ]
        gain = sum(before[i] * (price[i] - now[i]) for i in tickers) - fees
        return gain * env.reward_scale

    def observation(self) -> list[float]:
        env, index = self.env, float(self.data.turbulence[self.time])
        threshold = env.turbulence_threshold
        squashed = (1 / (1 + math.exp(-index / threshold * math.e)) - 0.5) * threshold
        return [
            max(self.cash, 1e4) / 4096,
            squashed / 32,
            float(index > threshold),
            *(p / 64 for p in self.data.price[self.time].tolist()),
            *(n / 64 for n in self.shares),
            *map(float, self.steps_since_trade),
            *(x / 128 for x in self.data.indicators[self.time].tolist()),
        ]


def test_every_step_equals_a_slow_reference() -> None:
    """Cash, shares, clocks and rewards to the bit, over whole episodes."""
    env = Trading(split_market(quarters(), 0.9, 0.95), episode_length=STEPS, **EXACT)
    actions = some_actions(STEPS, 16, 5)
    states, shown = run(env, actions)
    cash = states.cash.to_float64()
    assert cash.max() < 2**16  # or sums would not be exact
    ignored = short = liquidated = 0
    for lane in range(16):
        slow = Slow(env, jax.tree.map(lambda x, lane=lane: x[0, lane], states))
        assert (shown.reward[0, lane], slow.cash) == (0, cash[0, lane])
        for t in range(STEPS + 1):
            reward = slow.step(actions[t - 1, lane]) if t else 0.0
            assert slow.cash == cash[t, lane]
            assert slow.shares == states.shares[t, lane].tolist()
            assert slow.steps_since_trade == states.steps_since_trade[t, lane].tolist()
            assert slow.time == states.time[t, lane]
            assert reward == shown.reward[t, lane]
            np.testing.assert_allclose(shown.observation[t, lane], slow.observation(), rtol=1e-6)
        ignored, short = ignored + slow.ignored, short + slow.short
        liquidated += slow.liquidated
    assert min(ignored, short, liquidated) > 20  # each rule was tried
    assert (cash >= 0).all()


# --- properties of trading -----------------------------------------------------------------------

money = st.floats(0.015625, 1000, width=32)
fee_rate = st.sampled_from([0.0, 0.001, 0.002, 0.03125, 0.3])
four = functools.partial(st.lists, min_size=4, max_size=4)
traded = jax.jit(execute_orders, static_argnums=4)


@settings(max_examples=150, deadline=None)
@given(st.floats(0, 2**23, width=32), four(st.integers(0, 5000)), four(st.integers(-5000, 5000)),
       four(money), fee_rate)  # fmt: skip
def test_trading_keeps_the_books(
    cash: float, shares: list[int], orders: list[int], price: list[float], cost: float
) -> None:
    """Nothing is sold that is not held or bought that is not paid; wealth falls by the fees alone;
    nothing is left undone that could be done."""
    given_arrays = jnp.int32(shares), jnp.int32(orders), jnp.float32(price)
    after, held, fees = map(np.float64, traded(jnp.float32(cash), *given_arrays, cost))
    moved = held - shares
    assert after >= 0
    assert (held >= 0).all()
    assert (np.abs(moved) <= np.abs(orders)).all()
    assert (moved * np.array(orders) >= 0).all()
    assert (moved == np.maximum(orders, -np.array(shares)))[np.array(orders) < 0].all()
    scale = cash + float(np.abs(moved) @ price) + 1e-6
    assert abs(cash - moved @ price - fees - after) <= 2e-6 * scale
    assert abs(fees - cost * (np.abs(moved) @ price)) <= 2e-6 * scale
    unfilled = moved < np.array(orders)
    assert (after < np.array(price) * (1 + cost) + 2e-6 * scale)[unfilled].all()


@pytest.mark.parametrize(
    ("cash", "price", "tickers", "max_shares", "bars"),
    [
        (1e6, 100, 30, 100, 700),
        (1e9, 20, 1, 1, 4000),
        (1e8, 3, 5, 1, 4000),
        (1e5, 100, 5, 100, 4000),
    ],
)
def test_the_account_is_exact_to_the_cent(
    cash: float, price: float, tickers: int, max_shares: int, bars: int
) -> None:
    """Sizes of the paper, rich portfolios of small orders, and one whose cash is always short."""
    rng = np.random.default_rng(0)
    close = price * np.exp(0.001 * rng.normal(size=(bars, tickers)).cumsum(axis=0))
    market = synthetic_market(tickers=tickers, bars=bars)
    market = dataclasses.replace(market, open=close, high=close, low=close, close=close)
    env = Trading(
        split_market(market, 0.9, 0.95), cash=cash, max_shares=max_shares, random_start=False,
        turbulence_threshold=1e9,
    )  # fmt: skip
    actions = rng.uniform(-1.5, 1.5, (bars * 7 // 8, 2, tickers))
    states, shown = run(env, actions)
    traded = np.diff(states.shares.astype(np.int64), axis=0)
    paid = np.float64(env.data.price)[states.time[1:]]
    spent = (traded * paid).sum(-1) + env.cost * (abs(traded) * paid).sum(-1)
    assert (traded != 0).any(-1).mean() > 0.3
    account = states.cash.to_float64()
    np.testing.assert_allclose(account[1:], cash - spent.cumsum(axis=0), atol=1e-3)
    assert account.min() >= 0
    gains = shown.reward[1:].astype(np.float64) / env.reward_scale
    wealth = wealth_of(env, states)
    np.testing.assert_allclose(gains, np.diff(wealth, axis=0), atol=0.01)
    np.testing.assert_allclose(gains.sum(axis=0), wealth[-1] - cash, atol=0.01)


# --- episodes ------------------------------------------------------------------------------------


def test_random_starts() -> None:
    env = Trading(split_market(synthetic_market(tickers=5, bars=100)), episode_length=20)
    state, opening = jax.device_get(jax.jit(jax.vmap(env.reset))(
        jax.random.split(jax.random.key(0), 4000)))  # fmt: skip
    assert set(np.unique(state.time)) == set(range(40))  # of 60 bars
    assert (state.end == state.time + 20).all()
    assert (state.shares.min(), state.shares.max()) == (0, 63)
    assert abs(state.shares.mean() - 31.5) < 0.5
    assert 0.95e6 <= state.cash.high.min() < 0.951e6
    assert 1.049e6 < state.cash.high.max() <= 1.05e6
    assert opening.first.all()
    assert not state.steps_since_trade.any()


def test_the_last_reward_may_be_the_discounted_sum() -> None:
    options: dict[str, Any] = {"episode_length": 10, **EXACT}
    cut, actions = split_market(quarters(), 0.9, 0.95), some_actions(10, 4, 5)
    _, plain = run(Trading(cut, **options), actions)
    _, summed = run(Trading(cut, final_discount=0.5, **options), actions)
    assert (plain.reward[:-1] == summed.reward[:-1]).all()
    expected = sum(0.5 ** (10 - t) * plain.reward[t] for t in range(1, 11))
    np.testing.assert_allclose(summed.reward[-1], expected, rtol=1e-5)
    assert plain.last[-1].all()
    assert (plain.discount[-1] == 1).all()
    assert (summed.discount[-1] == 0).all()


def test_the_best_policy_of_a_wave_earns_the_optimum() -> None:
    def best(bars: int, gain: float, cost: float) -> tuple[float, Any]:
        env = Trading(
            split_market(wave_market(bars=bars, gain=gain), 0.6, 0.8), random_start=False,
            cost=cost, cash=1e7, max_shares=10**6,
        )  # fmt: skip
        price = env.data.price
        rises = price[2:] > price[1:-1]  # what is bought at the next close rises after it
        actions = np.where(rises, 1.0, -1.0)[:, None]
        return optimal_wealth(len(price), gain, 1e7, cost), run(env, actions)[0]

    for bars, gain, cost in ((50, 0.05, 0.0), (100, 0.01, 0.002)):
        optimum, states = best(bars, gain, cost)
        held = states.cash.to_float64()[-1, 0] + states.shares[-1, 0] @ (
            100 * (1 + gain) * np.ones(2)
        )
        assert held <= optimum * (1 + 1e-9)
        assert held == pytest.approx(optimum, rel=2e-3)  # whole shares, some cash left


# --- periods -------------------------------------------------------------------------------------


def altered(market: Market, row: int) -> Market:
    """Other prices from `row` on."""
    factor = np.where(np.arange(len(market)) < row, 1.0, 1.01 ** np.arange(len(market)) * 2)
    prices = {k: getattr(market, k) * factor[:, None] for k in ("open", "high", "low", "close")}
    return dataclasses.replace(market, **prices)


def test_no_environment_depends_on_a_later_period() -> None:
    market, actions = synthetic_market(tickers=3, bars=500), some_actions(20, 2, 3)

    def played(market: Market) -> list[list[np.ndarray]]:
        env = auto_reset(Trading(split_market(market)))
        return [jax.tree.leaves(run(each, actions)) for each in (env, env.for_evaluation())]

    def equal(ours: Any, theirs: Any) -> bool:
        return all(np.array_equal(x, y) for x, y in zip(ours, theirs, strict=True))

    original = played(market)
    for row, same in ((400, [True, True]), (300, [True, False])):
        assert list(map(equal, original, played(altered(market, row)))) == same


def test_evaluation_is_the_whole_validation_period_from_one_start() -> None:
    env = make("trading:synthetic,episode_length=20,final_discount=0.9,bars=100,cost=0.002")
    for examined, period in (
        (env.for_evaluation(), env.inner.periods.validation),
        (auto_reset(trading_in(env).for_backtest()), env.inner.periods.backtest),
    ):
        assert isinstance(examined, AutoReset)
        assert (examined.inner.data.price == period.close.astype(np.float32)).all()
        states, shown = run(examined, np.zeros((19, 3, 8)))
        assert shown.last[-1].all()
        assert (states.inner.cash.to_float64() == 1e6).all()
        assert not states.inner.shares.any()
        assert examined.inner.cost == 0.002
    assert not hasattr(auto_reset(Pendulum()), "for_evaluation")
    with pytest.raises(ConfigError, match="pendulum has no back-test period"):
        trading_in(auto_reset(Pendulum()))


@pytest.mark.parametrize(("option", "meant"), [("csot=2", "cost"), ("adjsut=true", "adjust")])
def test_a_mistyped_option_is_refused_with_the_one_that_is_meant(option, meant):
    with pytest.raises(ConfigError, match=rf"bars\.csv has no option .*did you mean .*\b{meant}\b"):
        make(f"trading:bars.csv,{option}")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("bars.csv,adjust=no", "adjust cannot be 'no': it must be True or False"),  # text is true
        ("synthetic,tickers=true", "tickers cannot be True: it must be a whole number"),
        ("wave,gain=x", "gain cannot be 'x': it must be a number"),
        ("wave,cash=true", "cash cannot be True: it must be a number"),
        ("wave,cash=null", "cash cannot be None: it must be a number"),
        ("wave,random_start=no", "random_start cannot be 'no': it must be True or False"),
        ("wave,episode_length=120", "episode_length must be at most 119, as long as the period"),
        ("wave,price_scale=0", "price_scale must be above 0"),
        ("wave,train_until=2010-03-01T09:30Z", "is no date without a time zone: write it as 2019"),
    ],
)
def test_an_option_of_another_kind_is_refused(name, words):
    with pytest.raises(ConfigError, match=words):
        make(f"trading:{name}")


def test_cash_is_exact_as_a_whole_number_too() -> None:
    state, _ = make("trading:wave,cash=16777217").for_evaluation().reset(jax.random.key(0))
    assert state.inner.cash.to_float64() == 16777217


# --- figures -------------------------------------------------------------------------------------


def test_figures_in_closed_form() -> None:
    steady = compute_performance(1.01 ** np.arange(253), 252)
    assert steady.cumulative_return == pytest.approx(1.01**252 - 1)
    assert steady.annual_return == pytest.approx(1.01**252 - 1)
    assert steady.annual_volatility == pytest.approx(0, abs=1e-12)
    assert steady.max_drawdown == 0
    assert all(math.isnan(x) for x in (steady.sharpe, steady.sortino, steady.calmar))

    curve = np.cumprod([1.0, *(1.1, 0.9) * 50])  # returns of 10 % and -10 %, 100 a year
    swings = compute_performance(curve, 100)
    assert swings.annual_return == pytest.approx(0.99**50 - 1)
    deviation = 0.1 * np.sqrt(100 / 99)
    assert swings.annual_volatility == pytest.approx(deviation * 10)
    assert swings.sharpe == pytest.approx(0, abs=1e-12)
    assert swings.max_drawdown == pytest.approx(0.99**50 / 1.1 - 1)
    assert swings.calmar == pytest.approx((0.99**50 - 1) / (1 - 0.99**50 / 1.1))

    rate = 1.05**100 - 1  # 5 % a step, without risk
    below = compute_performance(curve, 100, risk_free=rate)
    assert below.sharpe == pytest.approx(-0.05 * 10 / deviation)
    assert below.sortino == pytest.approx(-0.05 * 10 / np.sqrt(0.15**2 / 2))


def test_buy_and_hold_in_closed_form() -> None:
    market = synthetic_market(tickers=3, bars=30)
    period = Period(market, 10)
    curve = buy_and_hold(period, cash=3e5, cost=0.01)
    growth = (market.close[10:] / market.close[10]).mean(axis=1)
    assert curve[0] == 3e5
    np.testing.assert_allclose(curve[1:], 3e5 / 1.01 * growth[1:], rtol=1e-12)


def test_minimum_variance_weights() -> None:
    market = synthetic_market(tickers=6, bars=400)
    train = Period(market.head(300))
    weights = minimum_variance_weights(train)
    returns = np.diff(train.close, axis=0) / train.close[:-1]
    covariance = np.cov(returns.T)
    assert weights.sum() == pytest.approx(1)
    assert (weights >= 0).all()
    slope = covariance @ weights  # Karush, Kuhn and Tucker: least where held, not less elsewhere
    assert slope[weights > 0] == pytest.approx(slope.min())
    assert (weights > 0).sum() > 1
    others = np.random.default_rng(0).dirichlet(np.ones(6), 2000)
    least = np.einsum("ni,ij,nj->n", others, covariance, others).min()
    assert weights @ covariance @ weights <= least
    curve = minimum_variance(Period(market, 300), train, cost=0)
    drift = (market.close[301] / market.close[300]) @ weights
    assert curve[1] == pytest.approx(1e6 * drift)
    with pytest.raises(ConfigError, match="has 2 days, but a variance"):
        minimum_variance_weights(Period(market.head(2)))
