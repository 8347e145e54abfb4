"""Baselines without learning: equity curves of portfolios with fixed weights.

Each portfolio starts with `cash` and buys at the first close of the period. It pays the fee `cost`
for each purchase and sale, as the environment does, but trades fractional shares. The first value
of a curve is the cash before the first purchase.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import nnls

from podracer.errors import ConfigError
from podracer_trading.market import Period


def buy_and_hold(period: Period, *, cash: float = 1e6, cost: float = 0.001) -> np.ndarray:
    """Return the equity `[n]` of equal weights, bought once."""
    return _equity_curve(period, _equal_weights(period), cash, cost, rebalance=False)


def equal_weight(period: Period, *, cash: float = 1e6, cost: float = 0.001) -> np.ndarray:
    """Return the equity `[n]` of equal weights, rebalanced at the first bar of each day."""
    return _equity_curve(period, _equal_weights(period), cash, cost, rebalance=True)


def minimum_variance(
    period: Period, train: Period, *, cash: float = 1e6, cost: float = 0.001
) -> np.ndarray:
    """Return the equity `[n]` of the minimum-variance weights of `train`, rebalanced daily."""
    return _equity_curve(period, minimum_variance_weights(train), cash, cost, rebalance=True)


def minimum_variance_weights(train: Period) -> np.ndarray:
    """Return the long-only weights `[D]`, of sum 1, with the least variance of daily returns.

    They are found by non-negative least squares: the w >= 0 that minimizes |R w|² + (1ᵀw - 1)²,
    with R the centered returns, is a multiple of them, because both problems have the same
    Karush-Kuhn-Tucker conditions up to scale. Source: Markowitz 1952.
    """
    close = train.close[_first_bars(train)]
    if len(close) < 3:
        raise ConfigError(
            f"the train period has {len(close)} days, but a variance needs at least 3."
        )
    returns = close[1:] / close[:-1] - 1
    rows = np.vstack([returns - returns.mean(axis=0), np.ones(returns.shape[1])])
    weights, _ = nnls(rows, np.append(np.zeros(len(returns)), 1.0))
    return weights / weights.sum()


def _equity_curve(
    period: Period, weights: np.ndarray, cash: float, cost: float, *, rebalance: bool
) -> np.ndarray:
    """Return the equity `[n]` of weights `[D]`, set at the first bar, and daily to rebalance."""
    close = period.close
    trades = _first_bars(period) if rebalance else _first_bars(period)[:1]
    trades = np.isin(np.arange(len(close)), trades)
    equity, holdings = np.full(len(close), cash, np.float64), np.zeros_like(weights)
    for bar in range(len(close)):
        if bar:
            holdings = holdings * (close[bar] / close[bar - 1])
            equity[bar] = holdings.sum()
        if trades[bar]:
            holdings = weights * _after_fees(equity[bar], holdings, weights, cost)
    return equity


def _after_fees(wealth: float, holdings: np.ndarray, weights: np.ndarray, cost: float) -> float:
    """Return the wealth after the fees of trading to `weights` of that wealth."""
    net_wealth = wealth
    for _ in range(20):  # a contraction by `cost` at least, so this is exact
        net_wealth = wealth - cost * np.abs(weights * net_wealth - holdings).sum()
    return net_wealth


def _first_bars(period: Period) -> np.ndarray:
    """Return the row of the first bar of each day."""
    return np.unique(period.times.astype("datetime64[D]"), return_index=True)[1]


def _equal_weights(period: Period) -> np.ndarray:
    tickers = len(period.market.tickers)
    return np.full(tickers, 1 / tickers)
