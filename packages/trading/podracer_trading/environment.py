"""Trading: buy and sell whole shares of several tickers, bar by bar.

The environment of FinRL-Podracer (Li et al. 2021, arXiv 2111.05188) on the device, after its
released code. `Trading` documents the differences, where that code does what no trader can do.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracer.arguments import typed
from podracer.environment import AutoReset, auto_reset, restart, transition
from podracer.envs.common import check_known
from podracer.errors import ConfigError
from podracer.fields import bounded, check_ranges, struct
from podracer.types import ArraySpec, Continuous, EnvironmentSpec, TimeStep
from podracer_trading.bars import load_market
from podracer_trading.indicators import INDICATORS, compute_indicators, turbulence_index
from podracer_trading.market import Period, Periods, split_market
from podracer_trading.sums import TwoFloats, exact_products, two_floats, value_of
from podracer_trading.synthetic import synthetic_market, wave_market

MAX_START_SHARES = 64  # a random start holds fewer shares of each ticker than this
CASH_RANGE = (0.95, 1.05)  # range of its cash, as a factor of the configured cash
_SCALES: dict[str, Any] = {"high": 1e12, "exclusive": True}


class PeriodData(NamedTuple):
    """Arrays of a period of n bars.

    They are constants of the compiled program, which all environments of a device share.
    """

    price: np.ndarray  # f32 [n, D], closes
    turbulence: np.ndarray  # f32 [n]
    indicators: np.ndarray  # f32 [n, D * F], the F indicators of a ticker side by side


@struct
class TradingState:
    """A portfolio at a bar."""

    cash: TwoFloats
    shares: jax.Array  # i32 [D]
    steps_since_trade: jax.Array  # i32 [D]
    time: jax.Array  # i32, bar of the period
    end: jax.Array  # i32, bar at which the episode ends
    discounted_rewards: jax.Array  # f32, the sum G of `final_discount`


@typed
@dataclasses.dataclass(frozen=True)
class Trading:
    """A portfolio of D tickers in one period of a market, without restarts.

    Observation: f32 `[3 + 10 D]`: cash, turbulence (squashed), whether turbulence is above the
    threshold, then price, shares and steps since a trade of each ticker, then the 7 indicators of
    each (`indicators.INDICATORS`); all at the current bar. Action: f32 `[D]` in [-1, 1], the shares
    to buy or sell as a fraction of `max_shares`, rounded towards zero. Reward: the gain of the
    portfolio from this bar to the next, less fees.

    An action is chosen on a bar and executed at the close of the next, so no price is both observed
    and traded at. Sales are executed first. Purchases follow in the order of tickers, each of as
    many shares as the remaining cash can pay with their fee, so cash never becomes negative (the
    released code leaves the fee out, and its cash can). On a bar whose turbulence is above the
    threshold, nothing is bought and everything is sold, also at the close of the next bar. Steps
    since a trade count on where an order changes no shares. Shares of a random start come on top of
    its cash.

    The end of an episode is a time-out, as wealth keeps its value and observations do not contain
    the date. With `final_discount` it is a terminal, because the last reward then represents the
    future.
    """

    periods: Periods
    """Train, validation and back-test periods of the market."""
    name: str = "synthetic"
    """Name of the market in the environment's name."""
    period: Literal["train", "validation", "backtest"] = "train"
    """Period to trade in."""
    episode_length: int | None = bounded(None, low=1)
    """Steps of an episode, from a random bar on. By default the whole period."""
    random_start: bool = True
    """Whether episodes begin with 0.95 to 1.05 of the cash and up to 63 shares of each ticker."""
    cash: float = bounded(1e6, high=1e9, exclusive=True)
    """Cash at the start of an episode."""
    cost: float = bounded(0.001, high=0.5)
    """Fee of each purchase and each sale, as a fraction of its value, in [0, 0.5].
    ElegantRL-Podracer has 0.002."""
    max_shares: int = bounded(100, low=1, high=10**6)
    """Largest number of shares of a ticker in one order."""
    min_trade: float = bounded(0.1, high=1.0)
    """Smallest order, as a fraction of `max_shares`, in [0, 1]. Smaller orders are ignored."""
    turbulence_threshold: float | None = bounded(None, high=1e9, exclusive=True)
    """Turbulence above which everything is sold. By default 4 D, which one day in fifty exceeds:
    the index has a mean of about D. The released code has 30 in training and 15 after it, for 89
    tickers."""
    final_discount: float | None = bounded(None, high=1.0)
    """Discount factor of G = r + `final_discount` G over an episode, which becomes its last reward.
    By default the last reward is like any other."""
    reward_scale: float = bounded(2**-13, **_SCALES)
    """Factor of rewards."""
    cash_scale: float = bounded(2**-12, **_SCALES)
    """Factor of cash in observations."""
    cash_floor: float = bounded(1e4, high=1e9)
    """Smallest cash in observations; less cash is observed as this."""
    turbulence_scale: float = bounded(2**-5, **_SCALES)
    """Factor of turbulence in observations."""
    price_scale: float = bounded(2**-6, **_SCALES)
    """Factor of prices in observations."""
    shares_scale: float = bounded(2**-6, **_SCALES)
    """Factor of shares in observations."""
    indicator_scale: float = bounded(2**-7, **_SCALES)
    """Factor of indicators in observations."""

    def __post_init__(self) -> None:
        check_ranges(self, "")
        steps = len(self.bars) - 1
        if self.episode_length is not None and self.episode_length > steps:
            raise ConfigError(
                f"episode_length must be at most {steps:,}, as long as the period, but it is "
                f"{self.episode_length}."
            )

    @property
    def spec(self) -> EnvironmentSpec:
        tickers = len(self.bars.market.tickers)
        size = 3 + (3 + len(INDICATORS)) * tickers
        action = Continuous((-1.0,) * tickers, (1.0,) * tickers)
        return EnvironmentSpec(f"trading:{self.name}", ArraySpec((size,)), action)

    def for_evaluation(self) -> Trading:
        """Return the same environment in the whole validation period, with one fixed start."""
        return self._whole_period("validation")

    def for_backtest(self) -> Trading:
        """Return the same environment in the whole back-test period, for the report only."""
        return self._whole_period("backtest")

    def reset(self, key: jax.Array) -> tuple[TradingState, TimeStep]:
        tickers, steps = len(self.bars.market.tickers), len(self.bars) - 1
        words = jax.random.bits(key, (2 + tickers,))  # a key for each would double a step's time
        cash, shares = two_floats(self.cash), jnp.zeros(tickers, jnp.int32)
        if self.random_start:
            low, high = CASH_RANGE
            factor = low + (high - low) * (words[0] >> 8).astype(jnp.float32) * 2**-24
            cash = two_floats(cash.high * factor)
            shares = (words[2:] % MAX_START_SHARES).astype(jnp.int32)
        time, length = jnp.int32(0), steps
        if self.episode_length is not None:
            length = self.episode_length
            time = (words[1] % np.uint32(steps - length + 1)).astype(jnp.int32)
        steps_since_trade = jnp.zeros(tickers, jnp.int32)
        state = TradingState(cash, shares, steps_since_trade, time, time + length, jnp.float32(0))
        return state, restart(self._observe(state))

    def step(
        self, key: jax.Array, state: TradingState, action: jax.Array
    ) -> tuple[TradingState, TimeStep]:
        time, prices = state.time + 1, jnp.asarray(self.data.price)
        price, old_price = prices[time], prices[state.time]
        cash, shares, fees = execute_orders(
            state.cash, state.shares, self._orders(state, action), price, self.cost
        )
        # Not the difference of the wealth at two bars: of two large sums few digits are left.
        reward = (jnp.sum(state.shares * (price - old_price)) - fees) * self.reward_scale
        steps_since_trade = jnp.where(shares == state.shares, state.steps_since_trade + 1, 0)
        last = time >= state.end
        state = dataclasses.replace(
            state, cash=cash, shares=shares, steps_since_trade=steps_since_trade, time=time
        )
        if self.final_discount is None:
            return state, transition(self._observe(state), reward, timeout=last)
        discounted_rewards = reward + self.final_discount * state.discounted_rewards
        state = dataclasses.replace(state, discounted_rewards=discounted_rewards)
        reward = jnp.where(last, discounted_rewards, reward)
        return state, transition(self._observe(state), reward, terminal=last)

    def wealth(self, state: TradingState) -> jax.Array:
        """Cash and what the shares are worth, f32."""
        price = jnp.asarray(self.data.price)[state.time]
        held = value_of(jnp.asarray(state.shares), price)
        return state.cash.plus(held.high, held.low).high

    @property
    def data(self) -> PeriodData:
        """Arrays of the period's bars and indicators."""
        return _period_data(self.bars)

    @property
    def bars(self) -> Period:
        """Bars of the period."""
        return getattr(self.periods, self.period)

    @property
    def _threshold(self) -> float:
        if self.turbulence_threshold is None:
            return 4.0 * len(self.bars.market.tickers)
        return self.turbulence_threshold

    def _whole_period(self, period: Literal["validation", "backtest"]) -> Trading:
        return dataclasses.replace(
            self, period=period, episode_length=None, random_start=False, final_discount=None
        )

    def _orders(self, state: TradingState, action: jax.Array) -> jax.Array:
        """Return shares to buy, negative to sell, i32 `[D]`."""
        orders = jnp.trunc(jnp.clip(action, -1, 1) * self.max_shares).astype(jnp.int32)
        orders = jnp.where(jnp.abs(orders) >= self.min_trade * self.max_shares, orders, 0)
        turbulent = jnp.asarray(self.data.turbulence)[state.time] > self._threshold
        return jnp.where(turbulent, -state.shares, orders)

    def _observe(self, state: TradingState) -> jax.Array:
        price, turbulence, indicators = (jnp.asarray(x)[state.time] for x in self.data)
        threshold = self._threshold
        squashed = jnp.tanh(np.e / 2 * turbulence / threshold) * threshold / 2
        portfolio = jnp.stack(
            [
                jnp.maximum(state.cash.high, self.cash_floor) * self.cash_scale,
                squashed * self.turbulence_scale,
                (turbulence > threshold).astype(jnp.float32),
            ]
        )
        shares = state.shares.astype(jnp.float32) * self.shares_scale
        steps_since_trade = state.steps_since_trade.astype(jnp.float32)
        tickers = price * self.price_scale, shares, steps_since_trade
        return jnp.concatenate([portfolio, *tickers, indicators * self.indicator_scale])


def execute_orders(
    cash: TwoFloats | jax.Array,
    shares: jax.Array,
    orders: jax.Array,
    price: jax.Array,
    cost: float,
) -> tuple[TwoFloats, jax.Array, jax.Array]:
    """Execute orders, i32 `[D]`, at prices f32 `[D]`; return new cash, shares `[D]` and fees.

    Sales are first, of no more than is held; then purchases in the order of tickers, each of no
    more than the remaining cash can pay and of fewer than 2^22 shares.
    """
    sold = jnp.clip(-orders, 0, shares)
    sales = value_of(sold, price)
    cash = cash if isinstance(cash, TwoFloats) else two_floats(cash)
    cash = cash.plus(sales.high, sales.low).minus(sales.times(cost))
    fee = two_floats(price).times(cost)
    price_with_fee = two_floats(price).plus(fee.high, fee.low)

    def buy(cash: TwoFloats, ticker: tuple[jax.Array, TwoFloats]) -> tuple[TwoFloats, jax.Array]:
        order, price = ticker
        # Rounded to the nearest, so at most one too many.
        affordable = jnp.floor(cash.high / price.high + 0.5)
        bought = jnp.minimum(order, affordable).astype(jnp.int32)
        value = exact_products(bought, price.high)
        remaining = cash.plus(*(-x for x in value), -bought * price.low)
        too_many = remaining.high < 0
        corrected = TwoFloats(remaining.high, remaining.low + price.low).plus(price.high)
        remaining = jax.tree.map(functools.partial(jnp.where, too_many), corrected, remaining)
        return remaining, bought - too_many

    cash, bought = jax.lax.scan(buy, cash, (jnp.maximum(orders, 0), price_with_fee))
    return cash, shares - sold + bought, jnp.sum((sold + bought) * price) * cost


def trading(
    source: str,
    *,
    train_until: float | str = 0.6,
    validate_until: float | str = 0.8,
    **options: Any,
) -> AutoReset:
    """Trade in a market: trading:synthetic, trading:wave, or your own bars, trading:FILE.csv.

    `source` is what follows the colon; a file may be a `.parquet` file, too. The environment
    restarts by itself and trains in the first of three periods, see `split_market`. Further options
    are fields of `Trading` and arguments of `synthetic_market`, `wave_market` or `load_market`.
    Raises `ConfigError` for invalid values and for an unknown option.
    """
    names = (field.name for field in dataclasses.fields(Trading))
    fields = [name for name in names if name not in ("periods", "name", "period")]
    make = {"synthetic": synthetic_market, "wave": wave_market}.get(
        source, functools.partial(load_market, source)
    )
    arguments = ("train_until", "validate_until", *inspect.signature(make).parameters)
    for name in options:
        check_known(name, (*arguments, *fields), f"trading:{source} has no option")
    settings = {name: options.pop(name) for name in fields if name in options}
    periods = split_market(make(**options), train_until, validate_until)
    return auto_reset(Trading(periods, source, **settings))


@functools.lru_cache(maxsize=4)  # three periods and one more; a large market takes a while
def _period_data(period: Period) -> PeriodData:
    """Return the arrays of a period, with indicators that were warmed up on earlier bars."""
    market = period.market
    indicators = compute_indicators(market).reshape(len(market), -1)
    arrays = (market.close, turbulence_index(market), indicators)
    return PeriodData(*(np.ascontiguousarray(x[period.start :], np.float32) for x in arrays))
