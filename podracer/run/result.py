"""What a run gives to callbacks, to sinks and to whoever started it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from podracer.agent import Agent
from podracer.config.experiment import Experiment
from podracer.evaluate import Evaluation
from podracer.types import LearnerState


@dataclasses.dataclass(frozen=True, repr=False)
class Boundary:
    """State of a run at a boundary: an update after which it evaluates, saves or ends."""

    agent: Agent
    state: LearnerState
    metrics: dict[str, Any]  # the last record
    evaluation: Evaluation | None  # the last one of this process
    run_dir: Path

    def __repr__(self) -> str:
        """Without the arrays."""
        return f"{type(self).__name__}(run_dir={str(self.run_dir)!r}, metrics={self.metrics})"


@dataclasses.dataclass(frozen=True, repr=False)
class Result(Boundary):
    """State of a run at its end."""

    exit_code: int  # 0 done; in the command line 75 preempted, 130 stopped by the user, both saved
    reason: str  # `frames`, `target_return`, `max_seconds`, `callback` or `signal`


@dataclasses.dataclass(frozen=True)
class RunInfo:
    """Facts about a run for sinks and attachments, known before the first record."""

    experiment: Experiment
    run_dir: Path
    devices: str  # number and kind, such as "8 x TPU v4"
    state_bytes: int  # size of the training state on each device
    resumed_from: int | None = None  # updates at the checkpoint, 0 without one; None for a new run
