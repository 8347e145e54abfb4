"""A discovered rule on Catch."""

from podracer.reproduce.figure import Axes, Curve, Figure, Reading
from podracer.reproduce.figures.papers import DISCORL

FIGURE = Figure(
    name="disco-catch",
    title="Disco103 learns Catch",
    paper=DISCORL,
    place="notebook on Catch, and the README of a port of it",
    claim="The rule Disco103 learns Catch to 99 % in 1,000 updates; a port reports 36, 95 and "
    "100 % after 300, 350 and 400.",
    measures="learning",
    published=(
        Curve(
            "the port disco-torch",
            ((300, 0.36), (350, 0.95), (400, 1.0)),
            "published",
            Reading.SECONDARY,
        ),
    ),
    axes=Axes("updates", "share of balls that are caught"),
    impossible="It needs a file that users bring: podracer train catch_disco --update-rule FILE.",
)
