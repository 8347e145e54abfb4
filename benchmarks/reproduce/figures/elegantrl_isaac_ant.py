"""Ant in Isaac Gym."""

from benchmarks.reproduce.figure import Axes, Curve, Figure, Reading
from benchmarks.reproduce.figures.papers import ELEGANTRL

FIGURE = Figure(
    name="elegantrl-isaac-ant",
    title="Ant (Isaac Gym)",
    paper=ELEGANTRL,
    place="figure of the locomotion experiments, as in the project's documentation",
    claim="A return of 14.4 K after 25,000 s and 4e8 steps, where RLlib has 8.6 K; as much as "
    "RLlib's after about 8,000 s, 3.1 times as fast.",
    measures="learning",
    published=(
        Curve("ElegantRL-Podracer", ((8000, 8600), (25000, 14400)), "published", Reading.BITMAP),
        Curve("RLlib", ((25000, 8600),), "published", Reading.BITMAP, faint=True),
    ),
    axes=Axes("seconds", "return"),
    impossible="Isaac Gym needs an NVIDIA GPU and podracer has no adapter for it; rewards of other "
    "simulators' Ants do not compare.",
)
