"""Performance metrics of an equity curve."""

from __future__ import annotations

import dataclasses

import numpy as np

from podracer.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Performance:
    """Performance metrics of an equity curve.

    A ratio whose denominator is 0, such as the Sharpe ratio of a constant curve, is NaN.
    """

    cumulative_return: float
    """Return over the whole curve: 0.1 is a gain of 10 %."""
    annual_return: float
    """Compounded return of a year."""
    annual_volatility: float
    """Sample standard deviation of the returns, annualized."""
    sharpe: float
    """Mean excess return over its standard deviation, annualized (Sharpe 1994)."""
    sortino: float
    """Mean excess return over the root mean square of losses, annualized (Sortino and Price
    1994)."""
    calmar: float
    """Annual return over maximum drawdown (Young 1991)."""
    max_drawdown: float
    """Largest fall from a peak, as a fraction of the peak: 0 or negative."""


def compute_performance(
    equity: np.ndarray, periods_per_year: float, *, risk_free: float = 0.0
) -> Performance:
    """Return the metrics of an equity curve `[N]` with `periods_per_year` steps in a year.

    `risk_free` is the compounded risk-free return of a year. Raises `ConfigError` for a curve of
    fewer than three values, and for one that is not positive throughout.
    """
    equity = np.asarray(equity, np.float64)
    if equity.ndim != 1 or len(equity) < 3:
        raise ConfigError(f"an equity curve is a list of three values or more, not {equity.shape}.")
    if not ((equity > 0) & np.isfinite(equity)).all():
        raise ConfigError("an equity curve must be positive throughout: ruin has no return.")
    returns = equity[1:] / equity[:-1] - 1
    excess = returns - ((1 + risk_free) ** (1 / periods_per_year) - 1)
    year = np.sqrt(periods_per_year)
    annual = (equity[-1] / equity[0]) ** (periods_per_year / len(returns)) - 1
    drawdown = (equity / np.maximum.accumulate(equity) - 1).min()
    losses = np.sqrt(np.mean(np.minimum(excess, 0) ** 2))
    return Performance(
        cumulative_return=float(equity[-1] / equity[0] - 1),
        annual_return=float(annual),
        annual_volatility=float(returns.std(ddof=1) * year),
        sharpe=_ratio(excess.mean() * year, excess.std(ddof=1)),
        sortino=_ratio(excess.mean() * year, losses),
        calmar=_ratio(annual, -drawdown),
        max_drawdown=float(drawdown),
    )


def _ratio(numerator: float, denominator: float) -> float:
    """Return a ratio, NaN where the denominator is only rounding error."""
    return float(numerator / denominator) if denominator > 1e-12 else float("nan")
