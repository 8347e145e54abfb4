"""Budget of a run: when it evaluates, and when and why it ends.

How many frames an update has is known only afterwards. So the budget plans as if each step were a
frame, and checks again there.
"""

from __future__ import annotations

import math
from bisect import bisect

from podracer.config.experiment import Experiment
from podracer.errors import ConfigError
from podracer.run.resume import Totals


class Budget:
    """Frames of a run and of its evaluations; those of a population are of each pod, on average."""

    def __init__(self, experiment: Experiment) -> None:
        self._experiment, self._marks = experiment, experiment.evaluation_frames
        self._steps_per_update = experiment.driver.steps_per_update
        self._num_pods = max(1, len(experiment.pods))
        self._last_mark = 0  # number of marks at the newest evaluation, or where the run began

    def pass_marks(self, totals: Totals) -> None:
        """Take evaluations up to these totals as made, where the run begins or evaluates."""
        self._last_mark = bisect(self._marks, self.frames(totals))

    def check_left(self, saved_frames: int, totals: Totals) -> None:
        """Raise `ConfigError` for other frames that change nothing.

        These are fewer than the run has made already, or more where it has ended for another
        reason.
        """
        frames = self._experiment.frames
        num_frames, reason = self.frames(totals), self.reason_to_end(totals)
        if frames < saved_frames and self._experiment.num_steps < num_frames:
            raise ConfigError(f"frames is {frames:,}, but the run has made {num_frames:,} already.")
        if frames > saved_frames and reason not in ("", "frames"):
            raise ConfigError(
                f"the run has ended by its `{reason}`, so `frames` alone make it no longer: give "
                f"another `{reason}`, too, or None."
            )

    def frames(self, totals: Totals) -> int:
        """Return the frames of the run so far."""
        return totals.frames // self._num_pods

    def reason_to_end(self, totals: Totals, unrecorded_seconds: float = 0.0) -> str:
        """Return the field of the experiment by which the run is done, "" if it is not."""
        if self.frames(totals) >= self._experiment.frames:
            return "frames"
        target, reached = self._experiment.target_return, totals.evaluation_return
        if target is not None and reached is not None and reached >= target:
            return "target_return"
        limit = self._experiment.max_seconds
        if limit is not None and totals.seconds + unrecorded_seconds >= limit:
            return "max_seconds"
        return ""

    def is_due(self, frames: int) -> bool:
        """Return whether an evaluation is due after as many frames, as it is at the end."""
        return frames >= self._experiment.frames or bisect(self._marks, frames) > self._last_mark

    def most_frames(self, totals: Totals, updates: int) -> int:
        """Return the frames after a number of updates, if all steps since the totals are frames."""
        return self.frames(totals) + (updates - totals.updates) * self._steps_per_update

    def num_updates(self, totals: Totals, updates: int) -> int:
        """Return how many updates the run has at least, after a number of them."""
        missing = max(0, self._experiment.frames - self.most_frames(totals, updates))
        return updates + math.ceil(missing / self._steps_per_update)
