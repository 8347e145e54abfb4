"""Markets made from a seed: one that looks like the real ones, and one whose optimum is known."""

from __future__ import annotations

import numpy as np

from podracer.envs.trading.market import TRADING_DAYS, Market
from podracer.types import ConfigError

CALM, TURBULENT = 0.008, 0.024  # daily volatility of the market as a whole
BECOMES_TURBULENT, BECOMES_CALM = 0.01, 0.05  # chances from one day to the next
OWN = 0.012  # daily volatility that a ticker has for itself
DRIFT = 0.08  # a year
DEGREES = 4  # of Student's t: the fewer, the fatter the tails
LARGEST = 0.2  # relative move of a bar
OPENING = 9 * 60 + 30  # minute of the day


def synthetic(
    *, tickers: int = 8, bars: int = 2520, seed: int = 0, bars_per_day: int = 1
) -> Market:
    """Correlated returns with fat tails, in calm and in turbulent times.

    The return of a ticker is its share of the market's, between 0.5 and 1.5, and one of its own,
    both of Student's t. The market's volatility is that of a regime which changes by the day
    (Markov switching, Hamilton 1989). Bars are days, or `bars_per_day` minutes of each, on weekdays
    from 2010 on. Raises `ConfigError` for numbers out of range.
    """
    _check(tickers=(tickers, 1, 10_000), bars=(bars, 6, 10**8), seed=(seed, 0, 2**63))
    _check(bars_per_day=(bars_per_day, 1, 390))
    rng = np.random.default_rng(seed)
    of_day = 1 / np.sqrt(bars_per_day)  # of a day's volatility, in a bar
    shape = (bars, tickers)
    common = np.repeat(_regimes(rng, -(-bars // bars_per_day)), bars_per_day)[:bars, None]
    beta = rng.uniform(0.5, 1.5, tickers)
    moves = common * beta * _shocks(rng, (bars, 1)) + OWN * _shocks(rng, shape)
    moves = moves * of_day + DRIFT / (TRADING_DAYS * bars_per_day)
    close = 100 * np.cumprod(1 + np.clip(moves, -LARGEST, LARGEST), axis=0)
    before = np.concatenate([np.full((1, tickers), 100.0), close[:-1]])
    opened = before * np.exp(OWN / 4 * of_day * rng.normal(size=shape))
    above, below = (np.exp(OWN / 2 * of_day * np.abs(rng.normal(size=shape))) for _ in range(2))
    volume = np.exp(rng.normal(13, 0.4, shape)) * (1 + np.abs(moves) / (OWN * of_day))
    return Market(
        tuple(f"S{i:03}" for i in range(tickers)),
        _times(bars, bars_per_day),
        open=opened,
        high=np.maximum(opened, close) * above,
        low=np.minimum(opened, close) / below,
        close=close,
        volume=np.ceil(volume / bars_per_day),
    )


def wave(*, tickers: int = 2, bars: int = 200, seed: int = 0, gain: float = 0.01) -> Market:
    """Prices that alternate between 100 and 100 (1 + `gain`), half of the tickers against the other
    half; the seed says which. The next bar is known from this one, so the best that any policy can
    do is known too, see `best_wealth`. Raises `ConfigError` for numbers out of range."""
    _check(tickers=(tickers, 2, 10_000), bars=(bars, 6, 10**6), seed=(seed, 0, 2**63))
    if not 0 < gain <= 0.2:
        raise ConfigError(f"gain must lie in (0, 0.2], but it is {gain}.")
    phase = np.random.default_rng(seed).permutation(np.arange(tickers) % 2)
    high = (np.arange(bars)[:, None] + phase) % 2
    close = 100 * np.where(high, 1 + gain, 1.0)
    names = tuple(f"W{i:03}" for i in range(tickers))
    return Market(names, _times(bars, 1), close, close, close, close, np.ones_like(close))


def best_wealth(bars: int, gain: float, cash: float, cost: float) -> float:
    """The most that `cash` can become in `bars` bars of a `wave`, traded as `Trading` does.

    What is decided on bar 0 is bought at bar 1, with all there is, and sold at each bar after it
    for what rises next: bars - 2 rises, one purchase and bars - 3 exchanges. Whole shares and a
    limit of shares at once can only take from it. Raises `ConfigError` where an exchange costs more
    than it gains.
    """
    exchange = (1 - cost) / (1 + cost)
    if exchange * (1 + gain) <= 1:
        raise ConfigError(f"at a cost of {cost} a gain of {gain} is not worth an exchange.")
    return cash * (1 + gain) ** (bars - 2) / (1 + cost) * exchange ** (bars - 3)


def _regimes(rng: np.random.Generator, days: int) -> np.ndarray:
    """The market's volatility on each day, f64 `[days]`."""
    turbulent, chances = np.zeros(days, bool), rng.random(days)
    for day in range(1, days):
        was = turbulent[day - 1]
        turbulent[day] = was ^ (chances[day] < (BECOMES_CALM if was else BECOMES_TURBULENT))
    return np.where(turbulent, TURBULENT, CALM)


def _shocks(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Of mean 0 and variance 1."""
    return rng.standard_t(DEGREES, shape) * np.sqrt((DEGREES - 2) / DEGREES)


def _times(bars: int, bars_per_day: int) -> np.ndarray:
    """datetime64 `[N]`."""
    day, minute = np.divmod(np.arange(bars), bars_per_day)
    dates = np.busday_offset("2010-01-01", day, roll="forward")
    if bars_per_day == 1:
        return dates
    return dates.astype("datetime64[m]") + (OPENING + minute).astype("timedelta64[m]")


def _check(**ranges: tuple[int, int, int]) -> None:
    for name, (value, least, most) in ranges.items():
        if not isinstance(value, int) or not least <= value <= most:
            raise ConfigError(f"{name} must be a number in [{least}, {most}], but it is {value}.")
