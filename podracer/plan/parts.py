"""Times of the parts of an update, and how they add up."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

Schedule = Literal["one after another", "one device", "split devices"]
"""How the parts share the machine: all on the same cores or in one program; actors and learner on
one device, simulators on the host; or actors and learners on devices of their own."""


@dataclasses.dataclass(frozen=True)
class Part:
    """A part of an update: its seconds, and where they come from."""

    name: str
    seconds: float | None  # None where nothing is known
    source: str


def update_seconds(
    parts: list[Part], schedule: Schedule, *, threads: int = 1, lag: int | None = 1
) -> float:
    """Return the seconds of one update. What is unknown counts as nothing.

    `threads` is the number of actor threads of each actor device: with two or more, the device acts
    for one while the environments of another step. With `lag` 0 acting waits for learning.
    """
    known = {part.name: part.seconds or 0.0 for part in parts}
    simulator = known.get("simulator", 0.0)
    acting = known.get("acting", 0.0) + known.get("transfer", 0.0)
    learning = known.get("learning", 0.0) + known.get("reduction", 0.0)
    if schedule == "one after another":
        return simulator + acting + learning
    actors = max(simulator, acting) if threads > 1 else simulator + acting
    if lag == 0:
        return actors + learning
    return max(actors, acting + learning if schedule == "one device" else learning)


def ring_seconds(size: float, num_devices: int, bytes_per_second: float | None) -> float | None:
    """Return the seconds to average `size` bytes over devices in a ring; None if it is unknown."""
    if num_devices == 1 or not size:
        return 0.0
    if bytes_per_second is None:
        return None
    return 2 * (num_devices - 1) / num_devices * size / bytes_per_second


def affine_fit(points: list[tuple[float, float]]) -> tuple[float, float]:
    """Return intercept and slope of the line through two points `(x, y)`."""
    (x0, y0), (x1, y1) = points
    slope = (y1 - y0) / (x1 - x0)
    return y0 - slope * x0, slope


def largest_multiple(intercept: float, slope: float, limit: float, multiple: int) -> int:
    """Return the largest multiple n for which `intercept + slope n` is at most the limit, or 0."""
    if intercept + slope * multiple > limit:
        return 0
    if slope <= 0:
        raise ValueError("the limit bounds nothing")
    return math.floor((limit - intercept) / slope / multiple) * multiple
