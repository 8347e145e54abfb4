"""Returns of stock trading."""

from benchmarks.reproduce.figure import Axes, Curve, Figure, Reading
from benchmarks.reproduce.figures.papers import ELEGANTRL


def _point(label: str, volatility: float, cumulative: float) -> Curve:
    return Curve(label, ((volatility, cumulative),), "published", Reading.PRINTED)


FIGURE = Figure(
    name="elegantrl-trading",
    title="Stock trading: return and risk",
    paper=ELEGANTRL,
    place="table of the trading experiment, as in the project's documentation",
    claim="From 2020-05-26 to 2021-05-26, NASDAQ-100 by the minute: cumulative return 104.743 %, "
    "volatility 35.357 %, drawdown -17.187 %, Sharpe ratio 2.20, Calmar ratio 6.02; RLlib 86.274, "
    "34.319, -13.689 %, 1.98 and 6.24; the index 46.586, 23.39, -12.749 %, 1.75 and 3.62.",
    measures="learning",
    published=(
        _point("ElegantRL-Podracer", 35.357, 104.743),
        _point("RLlib", 34.319, 86.274),
        _point("QQQ, the index", 23.39, 46.586),
    ),
    axes=Axes("annual volatility in %", "cumulative return in %"),
    impossible="The minute bars of these stocks may not be redistributed and cannot be had here. "
    "The table of results (docs/results.md) has a synthetic market, beside stable-baselines3.",
)
