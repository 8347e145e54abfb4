"""A back-test as one self-contained HTML page in the look of `podracer report`, and as a table."""

from __future__ import annotations

import dataclasses
import html
import math
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from podracer.reports.curves import COLORS, legend, render, style_axes
from podracer.reports.run import page, section, table, tiles
from podracer.trading.backtest import POLICY, Backtest, Outcome, dates

COLUMNS = {
    "return": "cumulative_return",
    "a year": "annual_return",
    "volatility": "annual_volatility",
    "drawdown": "max_drawdown",
    "Sharpe": "sharpe",
    "Sortino": "sortino",
    "Calmar": "calmar",
}
RATIOS = ("sharpe", "sortino", "calmar")
CASH = "#8a919a40"  # faint on a light and on a dark page
POINTS = 1000  # drawn of a curve at most
LARGEST = 7  # tickers with an area of their own; the others share one

NOT_MODELLED = (
    "Fills are at the close of the bar after the decision, in whole shares, with the fee of the "
    "environment. Not modeled: slippage and market impact, spreads, dividends, interest on cash, "
    "taxes, short selling. Baselines trade parts of shares and have no limit of shares at once. "
    "A period is one path of prices: a difference between two curves may be luck."
)


def rows(outcome: Outcome) -> list[list[str]]:
    """The names of the columns, and a row of text for the policy and for each baseline."""
    shown = [["", *COLUMNS, "fees"]]
    for name, figures in outcome.figures.items():
        values = dataclasses.asdict(figures)
        cells = [_cell(key, values[key]) for key in COLUMNS.values()]
        shown.append([name, *cells, f"{outcome.book.costs.sum():,.0f}" if name == POLICY else ""])
    return shown


def write_page(result: Backtest, out: Path) -> Path:
    """Write the page to the file `out`, and return that."""
    body = [
        tiles(_facts(result)),
        section("Periods", _periods(result)),
        *(
            section(f"{name}, {' to '.join(dates(outcome.period))}", _outcome(name, outcome))
            for name, outcome in (
                ("Back-test", result.backtest),
                ("Validation", result.validation),
            )
        ),
        section("What these figures leave out", f"<p>{NOT_MODELLED}</p>"),
    ]
    out.write_text(page(f"Back-test of {result.run}", body), encoding="utf-8")
    return out


def _cell(key: str, value: float) -> str:
    if not math.isfinite(value):
        return "-"
    return f"{value:.2f}" if key in RATIOS else f"{100 * value:.1f} %"


def _facts(result: Backtest) -> dict[str, str]:
    """Of the policy in the back-test period."""
    values = dataclasses.asdict(result.backtest.figures[POLICY])
    shown = {
        "Return in the back-test": "cumulative_return",
        "Maximum drawdown": "max_drawdown",
        "Sharpe ratio": "sharpe",
    }
    facts = {title: _cell(key, values[key]) for title, key in shown.items()}
    return {**facts, "Updates": f"{result.updates:,}"}


def _periods(result: Backtest) -> str:
    cut = result.split
    uses = (
        ("Train", cut.train, "learned from; gives the minimum variance its weights"),
        ("Validation", cut.validation, "chosen by: runs, settings, models to promote"),
        ("Back-test", cut.backtest, "reported here, never chosen by"),
    )
    head = ("", "first bar", "last bar", "bars", "used for")
    listed = ([name, *dates(period), f"{len(period):,}", use] for name, period, use in uses)
    tickers = ", ".join(cut.train.market.tickers)
    return f"{table(head, listed)}<p><small>Tickers: {html.escape(tickers)}</small></p>"


def _outcome(name: str, outcome: Outcome) -> str:
    colors: dict[str, str] = dict(zip(outcome.curves, COLORS, strict=False))
    head, *listed = rows(outcome)
    parts = _parts(outcome)
    tints = dict(zip(parts, (CASH, *COLORS), strict=False))

    def curves(figure: Figure) -> None:
        wealth, fall = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
        _lines(wealth, outcome, colors)
        _title(wealth, "Equity")
        for label, curve in outcome.curves.items():
            drawdown = curve / np.maximum.accumulate(curve) - 1
            fall.plot(*_some(outcome, drawdown), color=colors[label], lw=_width(label))
        _title(fall, "Drawdown: below the highest so far")
        fall.yaxis.set_major_formatter(PercentFormatter(1.0, 0))

    def areas(figure: Figure) -> None:
        axes = figure.add_subplot()
        shares = np.stack(list(parts.values())) / outcome.book.equity
        times = _some(outcome, shares[0])[0]
        heights = np.stack([_some(outcome, each)[1] for each in shares])
        axes.stackplot(times, heights, colors=list(tints.values()), lw=0)
        axes.set(ylim=(0, 1))
        _title(axes, "Holdings of the policy: parts of its equity")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, 0))

    return "".join(
        (
            table(head, listed),
            legend(colors.items()),
            render(f"{name}: equity and drawdown", 4.6, curves),
            legend(tints.items()),
            render(f"{name}: holdings", 2.6, areas),
        )
    )


def _parts(outcome: Outcome) -> dict[str, np.ndarray]:
    """What equity was made of, f64 `[n]` each: cash, the largest tickers, the rest together."""
    holdings, tickers = outcome.book.holdings, outcome.period.market.tickers
    order = np.argsort(-holdings.mean(axis=0), kind="stable")
    shown = len(tickers) if len(tickers) <= LARGEST + 1 else LARGEST
    parts = {"cash": outcome.book.cash}
    parts |= {tickers[i]: holdings[:, i] for i in order[:shown]}
    if shown < len(tickers):
        parts[f"{len(tickers) - shown} others"] = holdings[:, order[shown:]].sum(axis=1)
    return parts


def _lines(axes: Axes, outcome: Outcome, colors: dict[str, str]) -> None:
    for label, curve in outcome.curves.items():
        order = 3 if label == POLICY else 2
        axes.plot(*_some(outcome, curve), color=colors[label], lw=_width(label), zorder=order)


def _width(label: str) -> float:
    return 1.8 if label == POLICY else 1.0


def _some(outcome: Outcome, curve: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Times and values, few enough to draw."""
    every = slice(None, None, -(-len(curve) // POINTS))
    return outcome.period.times[every], curve[every]


def _title(axes: Axes, title: str) -> None:
    style_axes(axes, title, "")
    axes.margins(x=0.01)
    locator = AutoDateLocator()
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
    axes.xaxis.get_offset_text().set_color(matplotlib.rcParams["xtick.color"])
