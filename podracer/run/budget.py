"""Frames of a run: when it evaluates, and when it ends.

How many of the steps of an update are frames is known when it was made. So a run goes as far as it
may if all of them are, and looks there.
"""

from __future__ import annotations

import math
from bisect import bisect

from podracer.config.experiment import Experiment
from podracer.run.records import Totals


class Budget:
    """Frames of a run and of its evaluations; those of a population are of each pod, on average."""

    def __init__(self, experiment: Experiment) -> None:
        self._marks = experiment.evaluation_frames
        self._frames = experiment.frames
        self._steps_per_update = experiment.driver.steps_per_update
        self._num_pods = max(1, len(experiment.pods))
        self._last_mark = 0  # number of marks at the newest evaluation, or where the run began

    def begin(self, totals: Totals) -> None:
        """Begin at these totals, or evaluate there: no earlier evaluation is due any more."""
        self._last_mark = bisect(self._marks, self.frames(totals))

    def frames(self, totals: Totals) -> int:
        """Return the frames of the run so far."""
        return totals.frames // self._num_pods

    def is_spent(self, totals: Totals) -> bool:
        """Return whether the run has all its frames."""
        return self.frames(totals) >= self._frames

    def is_due(self, frames: int) -> bool:
        """Return whether an evaluation is due after as many frames, as it is at the end."""
        return frames >= self._frames or bisect(self._marks, frames) > self._last_mark

    def most_frames(self, totals: Totals, updates: int) -> int:
        """Return the frames after a number of updates, if all steps since the totals are frames."""
        return self.frames(totals) + (updates - totals.updates) * self._steps_per_update

    def num_updates(self, totals: Totals, updates: int) -> int:
        """Return how many updates the run has at least, after a number of them."""
        missing = max(0, self._frames - self.most_frames(totals, updates))
        return updates + math.ceil(missing / self._steps_per_update)
