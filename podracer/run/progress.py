"""Progress of a run where somebody watches: on a terminal, or in a notebook."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from podracer.devices.memory import format_bytes
from podracer.io.sinks import Sink
from podracer.run.result import MakeSink, RunInfo

if TYPE_CHECKING:
    from podracer.reports.console import Console


def with_progress(
    sinks: Sequence[Sink | MakeSink], progress: bool | None
) -> Sequence[Sink | MakeSink]:
    """Return the sinks, after the `console` if progress is to be shown; None asks `is_watched`."""
    is_shown = is_watched() if progress is None else progress
    return [console, *sinks] if is_shown and console not in sinks else sinks


def is_watched() -> bool:
    """Return whether what is printed is for somebody's eyes: in a terminal or a notebook."""
    from rich.console import Console as Terminal

    return Terminal().is_jupyter or (sys.stdout is not None and sys.stdout.isatty())


def console(run: RunInfo) -> Console:
    """Return the sink that shows a run on the terminal or in a notebook, as `train` does."""
    from podracer.reports.console import Console
    from podracer.scores.runs import acting_text

    experiment = run.experiment
    return Console(
        experiment.frames * max(1, len(experiment.pods)),
        run.run_dir.name,
        recipe=experiment.recipe,
        devices=run.devices,
        memory=format_bytes(run.state_bytes),
        resumed_from=run.resumed_from,
        acting=acting_text(experiment.evaluation_policy, experiment.evaluation_epsilon)
        if experiment.evaluations
        else "",
    )
