"""Seconds to a return of stock trading, over GPUs."""

from benchmarks.reproduce.figure import Axes, Curve, Figure, Reading
from benchmarks.reproduce.figures.papers import ELEGANTRL

GPUS = (8, 16, 32, 80)


def _times(label: str, seconds: tuple[float, ...], *, faint: bool = False) -> Curve:
    points = tuple(zip(map(float, GPUS), seconds, strict=True))
    return Curve(label, points, "published", Reading.BITMAP, faint)


FIGURE = Figure(
    name="elegantrl-trading-time",
    title="Stock trading: seconds to a return, over GPUs",
    paper=ELEGANTRL,
    place="figures of the trading experiment, as in the project's documentation",
    claim="To a cumulative return of 1.8 ElegantRL-Podracer takes 2,200 s on 80 GPUs, RLlib about "
    "4,750 s; ten times as many GPUs are 1.9 times as fast.",
    measures="rate",
    published=(
        _times("to 1.7", (3600, 3400, 2400, 1900)),
        _times("to 1.8", (4250, 4000, 2800, 2200)),
        _times("RLlib, to 1.7", (5050, 3450, 2950, 2500), faint=True),
        _times("RLlib, to 1.8", (9650, 6600, 5600, 4750), faint=True),
    ),
    axes=Axes("GPUs", "seconds", log_x=True),
    impossible="The data cannot be redistributed, and the experiment takes 8 to 80 GPUs.",
    deviations=(
        "The values of ElegantRL-Podracer for 16, 32 and 80 GPUs are also printed in its "
        "documentation.",
    ),
)
