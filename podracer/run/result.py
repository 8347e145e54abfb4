"""What a run gives to callbacks, to sinks and to whoever started it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from podracer.agent import Agent
from podracer.config.experiment import Experiment
from podracer.errors import ConfigError
from podracer.evaluate import Evaluation
from podracer.io.sinks import Sink
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


Callback = Callable[[Boundary], bool | None]
"""Function that is called at each boundary of a run, after its save; the first one is always saved.

Where it returns True, the run is saved and ends."""


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


MakeSink = Callable[[RunInfo], Sink]


def check_functions(sinks: Sequence[Any], callbacks: Sequence[Any]) -> None:
    """Raise `ConfigError` for what would fail only at the first boundary."""
    if wrong := [x for x in sinks if not (callable(x) or callable(getattr(x, "write", None)))]:
        raise ConfigError(
            f"a sink must have a method `write`, or be a function of the RunInfo that returns one, "
            f"such as podracer.reports.tracking.wandb, and not {wrong[0]!r}."
        )
    if wrong := [callback for callback in callbacks if not callable(callback)]:
        raise ConfigError(f"a callback must be a function of the boundary, not {wrong[0]!r}.")
