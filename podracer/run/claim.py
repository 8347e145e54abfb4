"""The claim of a directory: a new run takes one that is unused, a resumed one its own.

What is checked here is checked again under the directory's lock, see `RunLock`.
"""

from __future__ import annotations

import datetime
import os
from pathlib import Path

import jax

from podracer.config.experiment import Experiment
from podracer.errors import ConfigError
from podracer.io.directories import is_tournament
from podracer.io.paths import user_path
from podracer.io.run_directory import run_directory
from podracer.io.seal import CONFIG, check_is_run
from podracer.io.steps import CHECKPOINTS, newest_saved, step_directories
from podracer.run.sweep import RECORDS


def name_run_directory(experiment: Experiment, run_dir: Path | None) -> Path:
    """Return the path of a run's directory, by default a new one in `runs/`; create nothing."""
    if run_dir is None:
        if jax.process_count() > 1:
            raise ConfigError("several processes need a run directory that all of them share.")
        moment = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
        run_dir = Path("runs") / f"{experiment.recipe}-s{experiment.seed}-{moment}"
    path = user_path(run_dir)
    return run_directory(path.parent, path.name)


def check_claim(directory: Path, resume: bool) -> None:
    """Raise `ConfigError` unless a new run, or with `resume` the one in it, can go on there."""
    exists = (directory / CONFIG).exists()
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
