"""What needs no learning: portfolios with fixed weights, as equity curves to compare with.

Each starts with `cash`, buys at the first close of the period and pays `cost` for each side of
every trade, as the environment does, but trades parts of shares. The first value of a curve is the
cash before that purchase.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import nnls

from podracer.envs.trading.market import Period
from podracer.types import ConfigError


def buy_and_hold(period: Period, *, cash: float = 1e6, cost: float = 0.001) -> np.ndarray:
    """Equal parts of all tickers, bought once: wealth `[n]`."""
    return _follow(period, _equal(period), cash, cost, rebalance=False)


def equal_weight(period: Period, *, cash: float = 1e6, cost: float = 0.001) -> np.ndarray:
    """Equal parts of all tickers, made equal again at the first bar of each day: wealth `[n]`."""
    return _follow(period, _equal(period), cash, cost, rebalance=True)


def minimum_variance(
    period: Period, train: Period, *, cash: float = 1e6, cost: float = 0.001
) -> np.ndarray:
    """The parts that varied least over `train`, kept through `period` as in `equal_weight`."""
    return _follow(period, minimum_variance_weights(train), cash, cost, rebalance=True)


def minimum_variance_weights(train: Period) -> np.ndarray:
    """Weights `[D]`, none negative, of sum 1, with the least variance of daily returns.

    The problem is one of non-negative least squares: of all w >= 0 the one with the smallest
    |R w|² + (1ᵀw - 1)², R the returns less their mean, is a multiple of it, because both have the
    same conditions of Karush, Kuhn and Tucker up to scale. Source: Markowitz 1952.
    """
    close = train.close[_first_bars(train)]
    if len(close) < 3:
        raise ConfigError(f"{len(close)} days say nothing of a variance: train needs at least 3.")
    returns = close[1:] / close[:-1] - 1
    rows = np.vstack([returns - returns.mean(axis=0), np.ones(returns.shape[1])])
    weights, _ = nnls(rows, np.append(np.zeros(len(returns)), 1.0))
    return weights / weights.sum()


def _follow(
    period: Period, weights: np.ndarray, cash: float, cost: float, *, rebalance: bool
) -> np.ndarray:
    """The equity curve `[n]` of weights `[D]`, set at the first bar and, if so, on each day."""
    close = period.close
    trades = _first_bars(period) if rebalance else _first_bars(period)[:1]
    trades = np.isin(np.arange(len(close)), trades)
    equity, held = np.full(len(close), cash), np.zeros_like(weights)
    for bar in range(len(close)):
        if bar:
            held = held * (close[bar] / close[bar - 1])
            equity[bar] = held.sum()
        if trades[bar]:
            held = weights * _after_fees(equity[bar], held, weights, cost)
    return equity


def _after_fees(wealth: float, held: np.ndarray, weights: np.ndarray, cost: float) -> float:
    """What is left of `wealth` once the trades to `weights` of what is left are paid for."""
    left = wealth
    for _ in range(20):  # a contraction by `cost` at least, so this is exact
        left = wealth - cost * np.abs(weights * left - held).sum()
    return left


def _first_bars(period: Period) -> np.ndarray:
    """The row of the first bar of each day."""
    return np.unique(period.times.astype("datetime64[D]"), return_index=True)[1]


def _equal(period: Period) -> np.ndarray:
    tickers = len(period.market.tickers)
    return np.full(tickers, 1 / tickers)
