"""Trading: buy and sell whole shares of several tickers, bar by bar.

The environment of FinRL-Podracer (Li et al. 2021, arXiv 2111.05188) as its released code has it, on
the device. Where that code does what no trader can, this does what is right, see `Trading`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracer.environment import AutoReset, restart, transition
from podracer.envs.trading.indicators import FEATURES, features, turbulence
from podracer.envs.trading.market import Period, Split
from podracer.types import ArraySpec, ConfigError, Continuous, EnvironmentSpec, TimeStep, struct

FIRST_SHARES = 64  # a random start holds fewer of each ticker
CASH_RANGE = (0.95, 1.05)  # and this much of the usual cash
_OPTIONAL = ("episode_length", "turbulence_threshold", "final_discount")


class Table(NamedTuple):
    """A period as the environment reads it: constants of the compiled program, there once for all
    environments of a device."""

    price: np.ndarray  # f32 [n, D], closes
    turbulence: np.ndarray  # f32 [n]
    features: np.ndarray  # f32 [n, D * F], the F of a ticker side by side


@struct
class TradingState:
    """A portfolio at a bar."""

    cash: jax.Array  # f32
    shares: jax.Array  # i32 [D]
    idle: jax.Array  # i32 [D], steps since the last trade of each
    time: jax.Array  # i32, bar of the period
    end: jax.Array  # i32, bar at which the episode ends
    rewarded: jax.Array  # f32, the discounted sum that `final_discount` asks for


@dataclasses.dataclass(frozen=True)
class Trading:
    """Observation: f32 `[3 + 10 D]`: cash, turbulence (squashed), whether that is above the
    threshold, then of each ticker price, shares and steps since a trade, then 7 indicators of each,
    see `indicators.FEATURES`; all at the current bar. Action: f32 `[D]` in [-1, 1], shares to buy
    or sell as a part of `max_shares`, rounded towards zero. Reward: what the portfolio gains from
    this bar to the next, less fees. Marks its ends only: see `auto_reset`.

    An action is chosen on a bar and carried out at the close of the next: no price is both seen
    and traded at. Sales come first. Purchases follow in the order of tickers, each of as many
    shares as the cash left can pay with their fee, so cash never becomes negative (the released
    code leaves the fee out and lets it). On a bar whose turbulence is above the threshold nothing
    is bought and all is sold, at the close of the next as well. A trade of no shares is no trade.
    Shares of a random start come on top of its cash.

    The end of an episode is a time-out: wealth keeps its value, and no observation knows the date.
    With `final_discount` it is a terminal, because the last reward then stands for the future.
    """

    split: Split
    name: str = "synthetic"
    period: Literal["train", "validation", "backtest"] = "train"
    episode_length: int | None = None
    """Steps of an episode, from a random bar on; none for the whole period."""
    random_start: bool = True
    """Begin with a little more or less cash and up to 63 shares of each ticker."""
    cash: float = 1e6
    """At the start."""
    cost: float = 0.001
    """Fee, as a part of the value, of each purchase and each sale; ElegantRL-Podracer has 0.002."""
    max_shares: int = 100
    """Most shares of a ticker to trade at once."""
    min_trade: float = 0.1
    """Orders of a smaller part of `max_shares` are ignored."""
    turbulence_threshold: float | None = None
    """None for 4 D, which one day in fifty exceeds: the index has a mean of about D. The released
    code has 30 in training and 15 after it, for 89 tickers."""
    final_discount: float | None = None
    """If set, the last reward becomes G, with G = r + `final_discount` G over the episode."""
    reward_scale: float = 2**-13
    cash_scale: float = 2**-12
    cash_floor: float = 1e4
    """Less cash than this is shown as this."""
    turbulence_scale: float = 2**-5
    price_scale: float = 2**-6
    shares_scale: float = 2**-6
    feature_scale: float = 2**-7

    def __post_init__(self) -> None:
        steps = len(self.bars) - 1
        for name, kind, least, most in (
            ("episode_length", int, 1, steps),  # no longer than the period
            ("random_start", bool, False, True),
            ("cash", float, 0.01, 1e9),
            ("cost", float, 0, 0.5),
            ("max_shares", int, 1, 10**6),
            ("min_trade", float, 0, 1),
            ("turbulence_threshold", float, 1e-6, 1e9),
            ("final_discount", float, 0, 1),
        ):
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            fits = isinstance(value, (int, float) if kind is float else kind)
            if not (fits and least <= value <= most):
                raise ConfigError(
                    f"{name} must be of type {kind.__name__} and in [{least:g}, {most:g}], "
                    f"but it is {value!r}."
                )

    @property
    def spec(self) -> EnvironmentSpec:
        tickers = len(self.bars.market.tickers)
        size = 3 + (3 + len(FEATURES)) * tickers
        action = Continuous((-1.0,) * tickers, (1.0,) * tickers)
        return EnvironmentSpec(f"trading:{self.name}", ArraySpec((size,)), action)

    def for_evaluation(self) -> Trading:
        """The same in the validation period, all of it, always from the same start."""
        return self._examined("validation")

    def for_backtest(self) -> Trading:
        """The same in the back-test period: for the report, never to choose by."""
        return self._examined("backtest")

    def reset(self, key: jax.Array) -> tuple[TradingState, TimeStep]:
        tickers, steps = len(self.bars.market.tickers), len(self.bars) - 1
        words = jax.random.bits(key, (2 + tickers,))  # a key for each would double a step's time
        cash, shares = jnp.float32(self.cash), jnp.zeros(tickers, jnp.int32)
        if self.random_start:
            low, high = CASH_RANGE
            cash *= low + (high - low) * (words[0] >> 8).astype(jnp.float32) * 2**-24
            shares = (words[2:] % FIRST_SHARES).astype(jnp.int32)
        time, length = jnp.int32(0), steps
        if self.episode_length is not None:
            length = self.episode_length
            time = (words[1] % np.uint32(steps - length + 1)).astype(jnp.int32)
        idle = jnp.zeros(tickers, jnp.int32)
        state = TradingState(cash, shares, idle, time, time + length, jnp.float32(0))
        return state, restart(self._observe(state))

    def step(
        self, key: jax.Array, state: TradingState, action: jax.Array
    ) -> tuple[TradingState, TimeStep]:
        time, prices = state.time + 1, jnp.asarray(self.table.price)
        price, before = prices[time], prices[state.time]
        cash, shares, fees = trade(
            state.cash, state.shares, self._orders(state, action), price, self.cost
        )
        # Not wealth less wealth before: the difference of two large sums has few digits left.
        reward = (jnp.sum(state.shares * (price - before)) - fees) * self.reward_scale
        idle = jnp.where(shares == state.shares, state.idle + 1, 0)
        ends = time >= state.end
        state = TradingState(cash, shares, idle, time, state.end, state.rewarded)
        if self.final_discount is None:
            return state, transition(self._observe(state), reward, timeout=ends)
        rewarded = reward + self.final_discount * state.rewarded
        state = dataclasses.replace(state, rewarded=rewarded)
        reward = jnp.where(ends, rewarded, reward)
        return state, transition(self._observe(state), reward, terminal=ends)

    def wealth(self, state: TradingState) -> jax.Array:
        """Cash and what the shares are worth, f32."""
        return state.cash + jnp.sum(state.shares * jnp.asarray(self.table.price)[state.time])

    @property
    def table(self) -> Table:
        """What the period's bars show."""
        return _table(self.bars)

    @property
    def bars(self) -> Period:
        """The period itself."""
        return getattr(self.split, self.period)

    @property
    def _threshold(self) -> float:
        if self.turbulence_threshold is None:
            return 4.0 * len(self.bars.market.tickers)
        return self.turbulence_threshold

    def _examined(self, period: Literal["validation", "backtest"]) -> Trading:
        return dataclasses.replace(
            self, period=period, episode_length=None, random_start=False, final_discount=None
        )

    def _orders(self, state: TradingState, action: jax.Array) -> jax.Array:
        """Shares to buy, negative to sell, i32 `[D]`."""
        orders = jnp.trunc(jnp.clip(action, -1, 1) * self.max_shares).astype(jnp.int32)
        orders = jnp.where(jnp.abs(orders) >= self.min_trade * self.max_shares, orders, 0)
        turbulent = jnp.asarray(self.table.turbulence)[state.time] > self._threshold
        return jnp.where(turbulent, -state.shares, orders)

    def _observe(self, state: TradingState) -> jax.Array:
        price, index, indicators = (jnp.asarray(x)[state.time] for x in self.table)
        threshold = self._threshold
        squashed = jnp.tanh(np.e / 2 * index / threshold) * threshold / 2
        whole = jnp.stack(
            [
                jnp.maximum(state.cash, self.cash_floor) * self.cash_scale,
                squashed * self.turbulence_scale,
                (index > threshold).astype(jnp.float32),
            ]
        )
        shares, idle = state.shares.astype(jnp.float32), state.idle.astype(jnp.float32)
        of_tickers = price * self.price_scale, shares * self.shares_scale, idle
        return jnp.concatenate([whole, *of_tickers, indicators * self.feature_scale])


def trade(
    cash: jax.Array, shares: jax.Array, orders: jax.Array, price: jax.Array, cost: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Carry out orders, i32 `[D]`, at prices f32 `[D]`: cash, shares `[D]` and fees after them.

    Sales first, of what is held at most; then purchases in the order of tickers, each of what the
    cash left can pay.
    """
    sold = jnp.clip(-orders, 0, shares)
    cash += jnp.sum(sold * price) * (1 - cost)

    def buy(cash: jax.Array, ticker: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        wanted, each = ticker
        bought = jnp.minimum(wanted, jnp.floor(cash / each))
        # The quotient may be rounded up to a share that is not quite affordable.
        return jnp.maximum(cash - bought * each, 0), bought

    wanted = jnp.maximum(orders, 0).astype(jnp.float32)
    cash, bought = jax.lax.scan(buy, cash, (wanted, price * (1 + cost)))
    shares = shares - sold + bought.astype(jnp.int32)
    return cash, shares, jnp.sum((sold + bought) * price) * cost


def backtest_environment(environment: Any) -> AutoReset:
    """A trading environment in its back-test period. Raises `ConfigError` for any other."""
    if not isinstance(getattr(environment, "inner", None), Trading):
        raise ConfigError(f"{environment.spec.name} has no period to back-test in.")
    return dataclasses.replace(environment, inner=environment.inner.for_backtest())


@functools.lru_cache(maxsize=4)  # three periods and one more: of a large market each takes a while
def _table(period: Period) -> Table:
    """Of the period's bars, with indicators that were warmed up on what lies before them."""
    market = period.market
    of_tickers = features(market).reshape(len(market), -1)
    table = (market.close, turbulence(market), of_tickers)
    return Table(*(np.ascontiguousarray(x[period.start :], np.float32) for x in table))
