"""Pong in less than a minute."""

from benchmarks.reproduce.figure import Axes, Curve, Figure, Reading
from benchmarks.reproduce.figures.papers import PODRACER

FIGURE = Figure(
    name="pong-minute",
    title="Pong in less than a minute",
    paper=PODRACER,
    place="section on Sebulba",
    claim="On 2,048 TPU cores Pong is solved in less than a minute; what counts as solved is not "
    "said.",
    measures="rate",
    published=(Curve("seconds, at most", ((2048, 60),), "published", Reading.PRINTED),),
    axes=Axes("TPU cores", "seconds"),
    impossible="It needs 256 hosts with accelerators.",
)
