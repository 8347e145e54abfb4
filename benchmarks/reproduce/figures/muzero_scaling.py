"""MuZero under Sebulba, over the number of cores."""

from benchmarks.reproduce.figure import Axes, Curve, Figure, Reading
from benchmarks.reproduce.figures.papers import PODRACER

FIGURE = Figure(
    name="muzero-scaling",
    title="MuZero over cores",
    paper=PODRACER,
    place="Figure 4c",
    claim="MuZero without Reanalyse scales linearly from 16 to 128 cores on Atari; 200 M frames "
    "take 9 hours and about $40 on 16 cores.",
    measures="rate",
    published=(
        Curve(
            "TPU cores",
            ((16, 5e3), (32, 10e3), (64, 20e3), (128, 40e3)),
            "published",
            Reading.AXIS,
        ),
        Curve("200 M frames in 9 h", ((16, 6.2e3),), "published", Reading.DERIVED),
    ),
    axes=Axes("TPU cores", "emulator frames a second", log_x=True, log_y=True),
    impossible="It needs several hosts with accelerators; the recipe is `atari_muzero`.",
)
