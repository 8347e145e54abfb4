"""Gossip between actor-learners."""

from podracer.reproduce.figure import Axes, Figure
from podracer.reproduce.figures.papers import GALA

FIGURE = Figure(
    name="gala",
    title="Gossip instead of synchronous averaging",
    paper=GALA,
    place="abstract",
    claim="Learners that average parameters by gossip on a directed graph stay close to each "
    "other, have a higher frame rate and are more robust than synchronous A2C.",
    measures="learning",
    axes=Axes("steps", "return"),
    impossible="podracer averages gradients only; it has no gossip.",
)
