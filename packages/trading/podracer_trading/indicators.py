"""Technical indicators: seven of each ticker, and the turbulence of the whole market.

The value at a bar depends on that bar and earlier ones only, by sums in a fixed order, so later
bars do not change a bit of it. Windows that are not yet full use the bars that exist, so there are
values from the first bar on. Definitions are those of stockstats, which FinRL uses.
"""

from __future__ import annotations

import numpy as np
from scipy.signal import lfilter

from podracer_trading.market import Market

INDICATORS = ("macd", "boll_ub", "boll_lb", "rsi_30", "dx_30", "close_30_sma", "close_60_sma")
TURBULENCE_DAYS = 252


def compute_indicators(market: Market) -> np.ndarray:
    """Return `INDICATORS`, f64 `[N, D, F]`; RSI and DX in percent, the others in units of price."""
    close = market.close
    middle, width = moving_average(close, 20), 2 * moving_std(close, 20)
    columns = (
        ema(close, 2 / 13) - ema(close, 2 / 27),
        middle + width,
        middle - width,
        relative_strength_index(close, 30),
        directional_index(market.high, market.low, 30),
        moving_average(close, 30),
        moving_average(close, 60),
    )
    return np.stack(columns, axis=-1)


def moving_average(x: np.ndarray, length: int) -> np.ndarray:
    """Return the mean of the newest `length` rows of `x`, f64 `[N, ...]`."""
    total = np.zeros_like(x)
    for lag in range(min(length, len(x))):
        total[lag:] += x[: len(x) - lag]
    return total / _window_sizes(x, length)


def moving_std(x: np.ndarray, length: int) -> np.ndarray:
    """Return the sample standard deviation of the newest `length` rows of `x`, f64 `[N, ...]`.

    It is 0 at the first row.
    """
    average, total = moving_average(x, length), np.zeros_like(x)
    for lag in range(min(length, len(x))):  # not by sums of squares, whose difference cancels
        total[lag:] += (x[: len(x) - lag] - average[lag:]) ** 2
    return np.sqrt(total / np.maximum(_window_sizes(x, length) - 1, 1))


def ema(x: np.ndarray, alpha: float) -> np.ndarray:
    """Return the mean of all rows so far, weighted by 1 - `alpha` to the power of their age."""
    return _exponential_filter(x, alpha) / _exponential_filter(np.ones_like(x), alpha)


def relative_strength_index(close: np.ndarray, length: int) -> np.ndarray:
    """Return the RSI in percent: the upward part of the averaged changes; 50 without any change.

    Source: Wilder 1978.
    """
    change = np.diff(close, axis=0, prepend=close[:1])
    rise, fall = (_exponential_filter(np.maximum(x, 0), 1 / length) for x in (change, -change))
    return 100 * _safe_ratio(rise, rise + fall, 0.5)


def directional_index(high: np.ndarray, low: np.ndarray, length: int) -> np.ndarray:
    """Return the DX in percent: how one-sided the averaged moves of highs and lows are.

    It is 0 without any move. The true range by which Wilder (1978) divides both sides cancels.
    """
    gain = np.diff(high, axis=0, prepend=high[:1])
    loss = -np.diff(low, axis=0, prepend=low[:1])
    rise = _exponential_filter(np.where((gain > loss) & (gain > 0), gain, 0.0), 1 / length)
    fall = _exponential_filter(np.where((loss > gain) & (loss > 0), loss, 0.0), 1 / length)
    return 100 * _safe_ratio(np.abs(rise - fall), rise + fall, 0.0)


def turbulence_index(market: Market) -> np.ndarray:
    """Return the turbulence index, which measures how unusual a day's returns are, f64 `[N]`.

        dₜ = (yₜ - μ) Σ⁺ (yₜ - μ)ᵀ

    with mean and covariance of the previous 252 days; 0 for the first 252 days, and for more than
    126 tickers, whose covariance so few days do not tell. For D tickers it has a mean of about
    252 D / (250 - D). A bar has the index of its own day where a day is one bar, and of the
    previous day where a day has several bars, because its last price is not known yet. Source:
    Kritzman and Li 2010.
    """
    day_of = market.times.astype("datetime64[D]")
    _, opening, day = np.unique(day_of, return_index=True, return_inverse=True)
    closing = np.append(opening[1:], len(market)) - 1
    index = _daily_turbulence(market.close[closing])
    if len(index) == len(market):
        return index
    return np.append(0.0, index)[day]


def _daily_turbulence(close: np.ndarray) -> np.ndarray:
    """Return the index of each day, f64 `[N]`, from closes `[N, D]`."""
    index = np.zeros(len(close))
    if close.shape[1] > TURBULENCE_DAYS // 2:
        return index
    returns = close[1:] / close[:-1] - 1  # row t - 1 is the return of day t
    for day in range(TURBULENCE_DAYS, len(close)):
        window = returns[max(day - 1 - TURBULENCE_DAYS, 0) : day - 1]
        deviation = returns[day - 1] - window.mean(axis=0)
        covariance = np.atleast_2d(np.cov(window, rowvar=False))
        index[day] = deviation @ np.linalg.pinv(covariance, rcond=1e-12, hermitian=True) @ deviation
    return index


def _exponential_filter(x: np.ndarray, alpha: float) -> np.ndarray:
    """Return yₜ = α xₜ + (1 - α) yₜ₋₁ along the first axis, from y = 0."""
    return np.asarray(lfilter([alpha], [1, alpha - 1], x, axis=0))


def _window_sizes(x: np.ndarray, length: int) -> np.ndarray:
    """Return the number of rows in the window at each row, `[N, 1, ...]`."""
    counts = np.minimum(np.arange(1, len(x) + 1), length)
    return counts.reshape(-1, *(1,) * (x.ndim - 1))


def _safe_ratio(part: np.ndarray, total: np.ndarray, default: float) -> np.ndarray:
    return np.divide(part, total, out=np.full_like(total, default), where=total > 0)
