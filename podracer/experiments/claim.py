"""The claim of a directory: a new run takes one that is unused, a resumed one its own."""

from __future__ import annotations

import datetime
import os
from pathlib import Path

import jax

from podracer.experiments.experiment import Experiment
from podracer.experiments.sweep import RECORDS
from podracer.io.directories import is_tournament
from podracer.io.run_directory import run_directory
from podracer.io.seal import check_is_run
from podracer.io.steps import CHECKPOINTS, newest_saved, step_directories
from podracer.types import ConfigError


def claim_run_directory(experiment: Experiment, run_dir: str | Path | None, resume: bool) -> Path:
    """Return the run's directory: a new one, or with `resume` one that holds a run."""
    if run_dir is None:
        if jax.process_count() > 1:
            raise ConfigError("several processes need a run directory that all of them share.")
        moment = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        run_dir = Path("runs") / f"{experiment.recipe}-s{experiment.seed}-{moment}"
    path = Path(run_dir)
    directory = run_directory(path.parent, path.name)
    exists = (directory / "config.json").exists()
    if resume:
        check_is_run(directory)
    if exists and not resume:
        raise ConfigError(f"{directory} already holds a run: resume it, or choose another name.")
    if not resume and (
        step_directories(directory / CHECKPOINTS) or newest_saved(directory) is not None
    ):
        raise ConfigError(
            f"{directory} holds checkpoints, but not the config.json of their run: bring it back, "
            "or choose another name."
        )
    if is_tournament(directory):
        raise ConfigError(f"{directory} holds a tournament: choose another name.")
    if not exists and any(directory.glob("*/config.json")):
        raise ConfigError(f"{directory} holds other runs: name one in it, {directory / 'NAME'}.")
    records = [name for name in ("metrics.jsonl", RECORDS) if os.path.lexists(directory / name)]
    if not resume and records:
        raise ConfigError(
            f"{directory} holds the {records[0]} of another run: move it away, or choose another "
            "name."
        )
    return directory
