"""Generated markets: one with the statistics of real ones, one with a known optimum."""

from __future__ import annotations

import numpy as np

from podracer.arguments import typed
from podracer.errors import ConfigError
from podracer_trading.market import TRADING_DAYS, Market

CALM_VOLATILITY, TURBULENT_VOLATILITY = 0.008, 0.024  # daily, of the market as a whole
CALM_TO_TURBULENT, TURBULENT_TO_CALM = 0.01, 0.05  # daily transition probabilities
TICKER_VOLATILITY = 0.012  # daily, of a ticker besides the market
ANNUAL_DRIFT = 0.08  # expected return of a year
DEGREES_OF_FREEDOM = 4  # in Student's t: the fewer, the heavier the tails
MAX_RETURN = 0.2  # absolute, in one bar
OPENING_MINUTE = 9 * 60 + 30  # minute of the day


@typed
def synthetic_market(
    *, tickers: int = 8, bars: int = 2520, seed: int = 0, bars_per_day: int = 1
) -> Market:
    """Return a market with correlated, heavy-tailed returns in calm and turbulent regimes.

    The return of a ticker is the market's return times a beta between 0.5 and 1.5, plus a return of
    its own; both follow Student's t. The market's volatility depends on a regime that may change
    from day to day (Markov switching, Hamilton 1989). Bars are days, or `bars_per_day` minutes of
    each, on weekdays from 2010 on. Raises `ConfigError` for numbers out of range.
    """
    _check(tickers=(tickers, 1, 10_000), bars=(bars, 6, 10**8), seed=(seed, 0, 2**63))
    _check(bars_per_day=(bars_per_day, 1, 390))
    rng = np.random.default_rng(seed)
    bar_scale = 1 / np.sqrt(bars_per_day)  # a bar's volatility as a fraction of a day's
    shape = (bars, tickers)
    common = np.repeat(_volatilities(rng, -(-bars // bars_per_day)), bars_per_day)[:bars, None]
    beta = rng.uniform(0.5, 1.5, tickers)
    returns = common * beta * _shocks(rng, (bars, 1)) + TICKER_VOLATILITY * _shocks(rng, shape)
    returns = returns * bar_scale + ANNUAL_DRIFT / (TRADING_DAYS * bars_per_day)
    close = 100 * np.cumprod(1 + np.clip(returns, -MAX_RETURN, MAX_RETURN), axis=0)
    previous_close = np.concatenate([np.full((1, tickers), 100.0), close[:-1]])
    open_ = previous_close * np.exp(TICKER_VOLATILITY / 4 * bar_scale * rng.normal(size=shape))
    high_factor, low_factor = (
        np.exp(TICKER_VOLATILITY / 2 * bar_scale * np.abs(rng.normal(size=shape))) for _ in range(2)
    )
    volume = np.exp(rng.normal(13, 0.4, shape)) * (
        1 + np.abs(returns) / (TICKER_VOLATILITY * bar_scale)
    )
    return Market(
        tuple(f"S{i:03}" for i in range(tickers)),
        _times(bars, bars_per_day),
        open=open_,
        high=np.maximum(open_, close) * high_factor,
        low=np.minimum(open_, close) / low_factor,
        close=close,
        volume=np.ceil(volume / bars_per_day),
    )


@typed
def wave_market(*, tickers: int = 2, bars: int = 200, seed: int = 0, gain: float = 0.01) -> Market:
    """Return a market whose prices alternate between 100 and 100 (1 + `gain`).

    Half of the tickers, drawn from the seed, rise where the other half falls. Each bar determines
    the next, so the best possible result is known, see `optimal_wealth`. Raises `ConfigError` for
    numbers out of range.
    """
    _check(tickers=(tickers, 2, 10_000), bars=(bars, 6, 10**6), seed=(seed, 0, 2**63))
    if not 0 < gain <= 0.2:
        raise ConfigError(f"gain must lie in (0, 0.2], but it is {gain}.")
    phase = np.random.default_rng(seed).permutation(np.arange(tickers) % 2)
    high = (np.arange(bars)[:, None] + phase) % 2
    close = 100 * np.where(high, 1 + gain, 1.0)
    names = tuple(f"W{i:03}" for i in range(tickers))
    return Market(names, _times(bars, 1), close, close, close, close, np.ones_like(close))


def optimal_wealth(bars: int, gain: float, cash: float, cost: float) -> float:
    """Return an upper bound of the wealth after `bars` bars of a `wave_market`.

    The decision on bar 0 buys at bar 1 with all cash, and every later bar exchanges everything for
    the tickers that rise next: bars - 2 rises, one purchase and bars - 3 exchanges. Whole shares
    and a limit of shares per order only lower the result. Raises `ConfigError` where an exchange
    costs more than it gains.
    """
    exchange = (1 - cost) / (1 + cost)
    if exchange * (1 + gain) <= 1:
        raise ConfigError(f"at a cost of {cost} a gain of {gain} is not worth an exchange.")
    return cash * (1 + gain) ** (bars - 2) / (1 + cost) * exchange ** (bars - 3)


def _volatilities(rng: np.random.Generator, days: int) -> np.ndarray:
    """Return the market's volatility on each day, f64 `[days]`."""
    turbulent, uniform = np.zeros(days, bool), rng.random(days)
    for day in range(1, days):
        previous = turbulent[day - 1]
        probability = TURBULENT_TO_CALM if previous else CALM_TO_TURBULENT
        turbulent[day] = previous ^ (uniform[day] < probability)
    return np.where(turbulent, TURBULENT_VOLATILITY, CALM_VOLATILITY)


def _shocks(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Return samples of Student's t, scaled to mean 0 and variance 1."""
    return rng.standard_t(DEGREES_OF_FREEDOM, shape) * np.sqrt(
        (DEGREES_OF_FREEDOM - 2) / DEGREES_OF_FREEDOM
    )


def _times(bars: int, bars_per_day: int) -> np.ndarray:
    """Return the times of bars, datetime64 `[N]`."""
    day, minute = np.divmod(np.arange(bars), bars_per_day)
    dates = np.busday_offset("2010-01-01", day, roll="forward")
    if bars_per_day == 1:
        return dates
    return dates.astype("datetime64[m]") + (OPENING_MINUTE + minute).astype("timedelta64[m]")


def _check(**ranges: tuple[int, int, int]) -> None:
    for name, (value, low, high) in ranges.items():
        if not low <= value <= high:
            raise ConfigError(f"{name} must be in [{low:,}, {high:,}], but it is {value}.")
