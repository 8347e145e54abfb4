"""Ant in MuJoCo."""

from benchmarks.reproduce.figure import Axes, Curve, Figure, Reading
from benchmarks.reproduce.figures.papers import ELEGANTRL

FIGURE = Figure(
    name="elegantrl-ant",
    title="Ant (MuJoCo)",
    paper=ELEGANTRL,
    place="figure of the locomotion experiments, as in the project's documentation",
    claim="A return of 5.4 K after 8,000 s and 2e7 steps on a DGX-2, where RLlib has 4.7 K; "
    "ElegantRL reaches 4.7 K after about 3,750 s, 2.1 times as fast.",
    measures="learning",
    published=(
        Curve("ElegantRL-Podracer", ((3750, 4700), (8000, 5400)), "published", Reading.BITMAP),
        Curve("RLlib", ((8000, 4700),), "published", Reading.BITMAP, faint=True),
    ),
    axes=Axes("seconds", "return"),
    impossible="It takes 2e7 steps of MuJoCo, about two hours for each seed. The table of "
    "results (docs/results.md) has Ant at 1e6 steps, beside stable-baselines3.",
)
