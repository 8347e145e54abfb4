"""What an agent is shown of the past: seven indicators of each ticker, and turbulence of them all.

Each value at a bar is made of that bar and earlier ones alone, by sums in a fixed order, so it is
the same to the bit whatever comes later. Windows that are not yet full use what there is, so there
are values from the first bar on. Definitions are those of stockstats, which FinRL uses.
"""

from __future__ import annotations

import numpy as np
from scipy.signal import lfilter

from podracer.envs.trading.market import Market

FEATURES = ("macd", "boll_ub", "boll_lb", "rsi_30", "dx_30", "close_30_sma", "close_60_sma")
TURBULENCE_DAYS = 252


def features(market: Market) -> np.ndarray:
    """The indicators `FEATURES`, f64 `[N, D, F]`; RSI and DX in percent, the others in money."""
    close = market.close
    middle, width = mean(close, 20), 2 * deviation(close, 20)
    columns = (
        ema(close, 2 / 13) - ema(close, 2 / 27),
        middle + width,
        middle - width,
        relative_strength(close, 30),
        directional_index(market.high, market.low, 30),
        mean(close, 30),
        mean(close, 60),
    )
    return np.stack(columns, axis=-1)


def mean(x: np.ndarray, length: int) -> np.ndarray:
    """The mean of the newest `length` rows of `x`, f64 `[N, ...]`."""
    total = np.zeros_like(x)
    for lag in range(min(length, len(x))):
        total[lag:] += x[: len(x) - lag]
    return total / _counts(x, length)


def deviation(x: np.ndarray, length: int) -> np.ndarray:
    """The standard deviation (of a sample) of the newest `length` rows of `x`, f64 `[N, ...]`; 0 at
    the first."""
    middle, total = mean(x, length), np.zeros_like(x)
    for lag in range(min(length, len(x))):  # not by sums of squares, whose difference cancels
        total[lag:] += (x[: len(x) - lag] - middle[lag:]) ** 2
    return np.sqrt(total / np.maximum(_counts(x, length) - 1, 1))


def ema(x: np.ndarray, alpha: float) -> np.ndarray:
    """The mean of all rows so far, each weighted by 1 - `alpha` to the power of its age."""
    return _decayed(x, alpha) / _decayed(np.ones_like(x), alpha)


def relative_strength(close: np.ndarray, length: int) -> np.ndarray:
    """RSI in percent: of the averaged moves, the share of those upwards; 50 without any. Source:
    Wilder 1978."""
    move = np.diff(close, axis=0, prepend=close[:1])
    up, down = (_decayed(np.maximum(x, 0), 1 / length) for x in (move, -move))
    return 100 * _share(up, up + down, 0.5)


def directional_index(high: np.ndarray, low: np.ndarray, length: int) -> np.ndarray:
    """DX in percent: how one-sided the averaged moves of highs and lows are; 0 without any. The
    true range by which Wilder (1978) divides both sides cancels."""
    up = np.diff(high, axis=0, prepend=high[:1])
    down = -np.diff(low, axis=0, prepend=low[:1])
    rise = _decayed(np.where((up > down) & (up > 0), up, 0.0), 1 / length)
    fall = _decayed(np.where((down > up) & (down > 0), down, 0.0), 1 / length)
    return 100 * _share(np.abs(rise - fall), rise + fall, 0.0)


def turbulence(market: Market) -> np.ndarray:
    """How unusual the day's returns are, f64 `[N]`, 0 for the first 252 days.

        dₜ = (yₜ - μ) Σ⁺ (yₜ - μ)ᵀ

    with mean and covariance of the 252 days before. For D tickers it has a mean of about D, and
    is that of the bar's own day where a day is one bar, of the day before where it has several,
    because its last price is not known yet. Source: Kritzman and Li 2010.
    """
    day_of = market.times.astype("datetime64[D]")
    _, opening, day = np.unique(day_of, return_index=True, return_inverse=True)
    closing = np.append(opening[1:], len(market)) - 1
    index = _daily_turbulence(market.close[closing])
    if len(index) == len(market):
        return index
    return np.append(0.0, index)[day]


def _daily_turbulence(close: np.ndarray) -> np.ndarray:
    """The index of each of the days `[N]` with closes `[N, D]`."""
    returns = close[1:] / close[:-1] - 1  # that of day t stands at t - 1
    index = np.zeros(len(close))
    for day in range(TURBULENCE_DAYS, len(close)):
        past = returns[max(day - 1 - TURBULENCE_DAYS, 0) : day - 1]
        away = returns[day - 1] - past.mean(axis=0)
        covariance = np.atleast_2d(np.cov(past, rowvar=False))
        index[day] = away @ np.linalg.pinv(covariance, rcond=1e-12, hermitian=True) @ away
    return index


def _decayed(x: np.ndarray, alpha: float) -> np.ndarray:
    """The recursion yₜ = α xₜ + (1 - α) yₜ₋₁ along the first axis, from y = 0."""
    return np.asarray(lfilter([alpha], [1, alpha - 1], x, axis=0))


def _counts(x: np.ndarray, length: int) -> np.ndarray:
    """How many rows a window has at each row, `[N, 1, ...]`."""
    counts = np.minimum(np.arange(1, len(x) + 1), length)
    return counts.reshape(-1, *(1,) * (x.ndim - 1))


def _share(part: np.ndarray, whole: np.ndarray, empty: float) -> np.ndarray:
    return np.divide(part, whole, out=np.full_like(whole, empty), where=whole > 0)
