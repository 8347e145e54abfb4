"""43 M frames a second on a full pod."""

from benchmarks.reproduce.figure import Axes, Curve, Figure, Reading
from benchmarks.reproduce.figures.papers import PODRACER

FIGURE = Figure(
    name="pod-throughput",
    title="43 M frames a second on a full pod",
    paper=PODRACER,
    place="section on Sebulba",
    claim="A pod of 2,048 TPU cores processes 43 M frames of Atari a second.",
    measures="rate",
    published=(
        Curve("TPU cores", ((8, 200e3), (2048, 43e6)), "published", Reading.PRINTED),
    ),
    axes=Axes("TPU cores", "emulator frames a second", log_x=True, log_y=True),
    impossible="It needs 256 hosts with accelerators; nothing here is extrapolated to them.",
)  # fmt: skip
