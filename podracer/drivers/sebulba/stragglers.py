"""Finding of actors whose environments are much slower than the others'."""

from __future__ import annotations

import logging
import statistics
from collections import deque

ROLLOUTS = 5  # rollouts of an actor, whose median time is compared
FACTOR = 5.0  # times slower than the median of the other actors

_LOG = logging.getLogger("podracer")


class Stragglers:
    """Times that the newest rollouts of each actor spent in its environments."""

    def __init__(self) -> None:
        self._seconds: dict[str, deque[float]] = {}
        self.named: set[str] = set()
        """Actors that the log has named."""

    def record(self, actor: str, seconds: float) -> None:
        """Add the time of a rollout; log an actor that proves to be slow, once."""
        times = self._seconds.setdefault(actor, deque(maxlen=ROLLOUTS))
        times.append(seconds)
        if len(times) < ROLLOUTS or actor in self.named:
            return
        median = statistics.median(times)
        medians = [statistics.median(x) for name, x in self._seconds.items() if name != actor]
        if medians and median > FACTOR * (usual := statistics.median(medians)):
            self.named.add(actor)
            _LOG.warning(
                "the environments of %s are %.0f times slower than other actors', %.3g s for a "
                "rollout: with `driver.policy_lag=None` the others do not wait for them.",
                actor,
                median / usual,
                median,
            )
