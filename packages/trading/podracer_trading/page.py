"""Back-tests in HTML: a page of their own, and a section of `podracer report`."""

from __future__ import annotations

import dataclasses
import html
import math
from pathlib import Path
from typing import Any

import numpy as np

from podracer.io.run_directory import write_bytes
from podracer.reports.charts import COLORS, charts, figure, trace
from podracer.reports.page import page, section, table, tiles
from podracer_trading.backtest import (
    POLICY,
    Backtest,
    PeriodResult,
    date_range,
    evaluate_policy,
    load_trading,
)

_COLUMNS = {
    "return": "cumulative_return",
    "a year": "annual_return",
    "volatility": "annual_volatility",
    "drawdown": "max_drawdown",
    "Sharpe": "sharpe",
    "Sortino": "sortino",
    "Calmar": "calmar",
}
RATIOS = ("sharpe", "sortino", "calmar")
CASH = "#8a919a"
POINTS = 1000  # drawn of a curve at most
MAX_TICKERS = 7  # with separate areas; the others share one

NOT_MODELED = (
    "Fills are at the close of the bar after the decision, in whole shares, with the fee of the "
    "environment. Not modeled: slippage and market impact, spreads, dividends, interest on cash, "
    "taxes, short selling. Baselines trade fractional shares and have no limit of "
    "shares per order. "
    "A period is one path of prices: a difference between two curves may be luck."
)


def rows(result: PeriodResult) -> list[list[str]]:
    """Return the head of a table and a row of cells for the policy and for each baseline."""
    table = [["", *_COLUMNS, "fees"]]
    for name, metrics in result.metrics.items():
        values = dataclasses.asdict(metrics)
        cells = [_cell(key, values[key]) for key in _COLUMNS.values()]
        fees = f"{result.portfolio.costs.sum():,.0f}" if name == POLICY else ""
        table.append([name, *cells, fees])
    return table


def write_page(result: Backtest, file: Path) -> Path:
    """Write the page of a back-test to a file, and return the file."""
    body = [
        tiles(_facts(result)),
        section("Periods", _periods(result)),
        *(
            section(heading(name, period), _period(name, period))
            for name, period in (
                ("Back-test", result.backtest),
                ("Validation", result.validation),
            )
        ),
        section("What these figures leave out", f"<p>{NOT_MODELED}</p>"),
    ]
    write_bytes(file, page(f"Back-test of {result.run}", body).encode(errors="replace"))
    return file


def sections(run: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return a trading run's section of `podracer report`: its validation beside the baselines."""
    match config:
        case {"environment": {"inner": {"kind": "Trading"}}}:
            agent, env, state = load_trading(run, "newest")
            params = agent.actor_params(state.learner)
            result = evaluate_policy(agent, env.for_evaluation(), params, state.key)
            return {heading("Validation", result): _period("Validation", result)}
        case _:
            return {}


def heading(name: str, result: PeriodResult) -> str:
    """Return the name of a period with its first and its last bar."""
    return f"{name}, {' to '.join(date_range(result.period))}"


def _cell(key: str, value: float) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{value:.2f}" if key in RATIOS else f"{100 * value:.1f} %"


def _facts(result: Backtest) -> dict[str, str]:
    """Return the headline metrics of the policy in the back-test period."""
    values = dataclasses.asdict(result.backtest.metrics[POLICY])
    titles = {
        "Return in the back-test": "cumulative_return",
        "Maximum drawdown": "max_drawdown",
        "Sharpe ratio": "sharpe",
    }
    facts = {title: _cell(key, values[key]) for title, key in titles.items()}
    return {**facts, "Updates": f"{result.updates:,}"}


def _periods(result: Backtest) -> str:
    periods = result.periods
    uses = (
        ("Train", periods.train, "learned from; gives the minimum variance its weights"),
        ("Validation", periods.validation, "chosen by: runs, settings, models to promote"),
        ("Back-test", periods.backtest, "reported here, never chosen by"),
    )
    head = ("", "first bar", "last bar", "bars", "used for")
    rows = ([name, *date_range(period), f"{len(period):,}", use] for name, period, use in uses)
    tickers = ", ".join(periods.train.market.tickers)
    return f"{table(head, rows)}<p><small>Tickers: {html.escape(tickers)}</small></p>"


def _period(name: str, result: PeriodResult) -> str:
    colors: dict[str, str] = dict(zip(result.curves, COLORS, strict=False))
    equity, drawdowns = [], []
    for label, curve in result.curves.items():
        line = {"color": colors[label], "width": 2.2 if label == POLICY else 1.2}
        drawdown = curve / np.maximum.accumulate(curve) - 1
        equity.append(trace(*thinned(result, curve), label, text=label, line=line))
        drawdowns.append(trace(*thinned(result, drawdown), label, text=label, line=line))
    components = _equity_components(result)
    area_colors = dict(zip(components, (CASH, *COLORS), strict=False))
    shares = np.stack(list(components.values())) / result.portfolio.equity
    times, shares = thinned(result, shares)
    areas = [
        trace(times, share, label, text=label, stackgroup="all", line={"width": 0, "color": color})
        for (label, color), share in zip(area_colors.items(), shares, strict=True)
    ]
    dates, percents = {"type": "date"}, {"tickformat": ".0%"}
    underwater = figure(
        "Drawdown: below the highest so far", drawdowns, xaxis=dates, yaxis=percents, height=220
    )
    holdings = figure(
        "Holdings of the policy, of its equity",
        areas,
        xaxis=dates,
        yaxis={**percents, "range": [0, 1]},
    )
    equities = figure("Equity", equity, xaxis=dates, height=340)
    head, *body = rows(result)
    return (
        table(head, body)
        + charts(f"{name} equity", [equities, underwater], colors, width=600)
        + charts(f"{name} holdings", [holdings], area_colors, width=600)
    )


def _equity_components(result: PeriodResult) -> dict[str, np.ndarray]:
    """Return the components of equity, f64 `[n]` each: cash, the largest tickers, the others."""
    holdings, tickers = result.portfolio.holdings, result.period.market.tickers
    order = np.argsort(-holdings.mean(axis=0), kind="stable")
    num_shown = len(tickers) if len(tickers) <= MAX_TICKERS + 1 else MAX_TICKERS
    parts = {"cash": result.portfolio.cash}
    parts |= {tickers[i]: holdings[:, i] for i in order[:num_shown]}
    if num_shown < len(tickers):
        parts[f"{len(tickers) - num_shown} others"] = holdings[:, order[num_shown:]].sum(axis=1)
    return parts


def thinned(result: PeriodResult, curves: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return times `[n]` and values `[..., n]`, few enough to draw, with the extremes and the end.

    `curves` are `[..., N]`.
    """
    length = curves.shape[-1]
    bars = {*range(0, length, -(-length // POINTS)), length - 1}
    bars |= set(np.ravel([curves.argmin(axis=-1), curves.argmax(axis=-1)]).tolist())
    indices = sorted(bars)
    return result.period.times[indices], curves[..., indices]
