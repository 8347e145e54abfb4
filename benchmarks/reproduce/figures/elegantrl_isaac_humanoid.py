"""Humanoid in Isaac Gym."""

from benchmarks.reproduce.figure import Axes, Curve, Figure, Reading
from benchmarks.reproduce.figures.papers import ELEGANTRL

FIGURE = Figure(
    name="elegantrl-isaac-humanoid",
    title="Humanoid (Isaac Gym)",
    paper=ELEGANTRL,
    place="figure of the locomotion experiments, as in the project's documentation",
    claim="A return of 10.2 K after 9,000 s and 8e8 steps, where RLlib has 6.8 K; as much as "
    "RLlib's after about 2,400 s, 3.75 times as fast.",
    measures="learning",
    published=(
        Curve("ElegantRL-Podracer", ((2400, 6800), (9000, 10200)), "published", Reading.BITMAP),
        Curve("RLlib", ((9000, 6800),), "published", Reading.BITMAP, faint=True),
    ),
    axes=Axes("seconds", "return"),
    impossible="Isaac Gym needs an NVIDIA GPU and podracer has no adapter for it; rewards of other "
    "simulators' Humanoids do not compare.",
)
