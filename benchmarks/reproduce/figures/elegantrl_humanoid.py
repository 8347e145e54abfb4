"""Humanoid in MuJoCo."""

from benchmarks.reproduce.figure import Axes, Curve, Figure, Reading
from benchmarks.reproduce.figures.papers import ELEGANTRL

FIGURE = Figure(
    name="elegantrl-humanoid",
    title="Humanoid (MuJoCo)",
    paper=ELEGANTRL,
    place="figure of the locomotion experiments, as in the project's documentation",
    claim="A return of 6.1 K after 32,000 s and 2.5e8 steps on a DGX-2, where RLlib has 5.65 K; "
    "4 K after 8,000 s, RLlib after 12,500 s, 1.6 times as fast.",
    measures="learning",
    published=(
        Curve("ElegantRL-Podracer", ((8000, 4000), (32000, 6100)), "published", Reading.BITMAP),
        Curve("RLlib", ((12500, 4000), (32000, 5650)), "published", Reading.BITMAP, faint=True),
    ),
    axes=Axes("seconds", "return"),
    impossible="It takes 2.5e8 steps of MuJoCo, days on two cores.",
)
