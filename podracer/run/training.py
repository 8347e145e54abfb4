"""Training: a run from its first or restored state to its end, recorded, evaluated and saved."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax

from podracer import recipes
from podracer.arguments import typed
from podracer.config.experiment import Experiment, check_types
from podracer.config.serialization import recipe_name, saved_devices
from podracer.devices import peers
from podracer.devices.mesh import check_same_configuration, wait_for_all_processes
from podracer.devices.startup import compilation_cache
from podracer.errors import ConfigError
from podracer.io.directories import is_tournament
from podracer.io.paths import user_path
from podracer.io.run_directory import RunLock, run_directory
from podracer.io.seal import CONFIG, check_is_run
from podracer.io.sinks import Sink
from podracer.io.steps import CHECKPOINTS, newest_saved, step_directories
from podracer.run.callbacks import Evaluator, Function, Writers, find_callbacks
from podracer.run.console import with_progress
from podracer.run.errors import StallError, classify_error
from podracer.run.loop import Callback, Run
from podracer.run.result import Boundary, Result
from podracer.run.setup import make_driver
from podracer.run.sweep import RECORDS
from podracer.run.warm_start import FirstState, Weights, begin_of
from podracer.run.warnings import run_warnings

_LOG = logging.getLogger("podracer")


@typed
@peers.leaves_on_error()
@compilation_cache()
def train(
    experiment: Experiment | str,
    *,
    run_dir: str | Path | None = None,
    resume: bool = False,
    begin: Weights | FirstState | None = None,
    callbacks: Sequence[Callback | Callable[[Boundary], bool | None] | Sink | str] = (),
    progress: bool | None = None,
    size: recipes.Size | None = None,
    **overrides: Any,
) -> Result:
    """Run an experiment, or a recipe by its name, to its end; write everything to `run_dir`.

    A recipe given by name is run at the size `laptop`, by default, or `accelerator`; a resumed run
    keeps its own.

    `overrides` replace fields of the experiment, such as its seed or its environment; a dictionary
    replaces fields of a part: `agent={"learning_rate": 1e-3}`. In another environment than the
    recipe's its target return does not count, and one of the host is trained under Sebulba.

    With `resume` the run continues exactly from the newest valid checkpoint of `run_dir`. A new run
    begins with what another has learned, `begin=podracer.Weights(RUN)`, or with the state that the
    function `begin` of the driver and the run's key returns.

    Callbacks are called in order, see `podracer.Callback`. A function is called at each boundary,
    that is where the run evaluates or saves, before the save, and ends the run by returning True.
    An object with a method `write` gets the record of every chunk, in a thread of its own, besides
    `metrics.jsonl` and TensorBoard. A string names a callback of an installed package:
    `"mirror:s3://bucket/run"` of podracer-cloud copies each checkpoint in the background. Those of
    the experiment's field `callbacks` come first. `podracer resume` goes on with them and with
    those whose file `NAME.json` is in `run_dir`, without the others.

    Ctrl-C, a notebook's interrupt, saves the run after the current chunk and raises
    `KeyboardInterrupt`; a second one raises it at once, and a resume goes on from the last save.
    SIGTERM saves and raises `SystemExit` of code 75. In the main thread only.

    `progress` shows the run, by default only in a terminal or a notebook.

    Raises `ConfigError` before anything is compiled if the run is impossible, `StorageError` if its
    directory cannot be saved to; later `NonFiniteError`, `CheckpointError`, `StorageError`,
    `DeviceError` or `StallError`, with the reason in `crash.json`.
    """
    run_dir = None if run_dir is None else user_path(run_dir)
    if resume and (run_dir is None or isinstance(begin, Weights)):
        raise ConfigError(
            "a run is resumed in its directory, with its own weights: give run_dir, and no Weights."
        )
    recorded, num_saved = None, 0
    if run_dir is not None and resume:
        recorded, num_saved = recipe_name(run_dir), saved_devices(run_dir)
    if isinstance(experiment, str):
        name, experiment = experiment, recipes.find(experiment)
        if size or recorded == f"{experiment.recipe}{recipes.SUFFIX}":
            experiment = recipes.with_size(experiment, name, size or "accelerator")
        environment = overrides.get("environment", experiment.environment)
        experiment = experiment.with_environment(environment)
    elif size is not None:
        raise ConfigError("a size is a recipe's: name the recipe as text, or leave `size` out.")
    experiment = experiment.with_fields(overrides)
    check_types(experiment)
    experiment.check()
    if recorded is not None:  # a run keeps its name
        experiment = dataclasses.replace(experiment, recipe=recorded)
    driver = make_driver(experiment, num_saved)
    directory = name_run_directory(experiment, run_dir)
    run = Run(experiment, driver, directory, _callbacks(experiment, callbacks, progress, directory))
    for sentence in run_warnings(experiment, driver.blueprint) if run.is_main else ():
        _LOG.warning(sentence)
    if jax.process_count() > 1:
        weights = [str(begin.run), begin.checkpoint] if isinstance(begin, Weights) else []
        command = {"run_dir": run_dir, "resume": resume, "weights": weights}
        check_same_configuration({**run.config, "run": command})
    beginning = None if begin is None else begin_of(begin, driver)
    for callback in run.callbacks:
        callback.check(run)
    check = partial(check_claim, directory, resume)
    check()
    wait_for_all_processes("directory claimed")  # or a slow process finds the run of a fast one
    lock = RunLock(directory, check, driver.saved_bytes)
    with lock if run.is_main else contextlib.nullcontext(), peers.reports_loss(run.report_fault):
        try:
            return run.execute(resume, beginning)
        except Exception as error:
            failure = classify_error(error)
            # A refusal harms no run, and a stall was reported with its stacks.
            is_refusal = resume and run.progress is None and isinstance(failure, ConfigError)
            if not is_refusal and not isinstance(failure, StallError):
                run.report_fault(failure)
            if failure is error:
                raise
            raise failure from error


def _callbacks(
    experiment: Experiment, items: Sequence[Any], progress: bool | None, directory: Path
) -> list[Callback]:
    """Return a run's callbacks in order: the user's before the writers of records."""
    names = [*(experiment.callbacks or ()), *(x for x in items if isinstance(x, str))]
    items = [*find_callbacks(names, directory), *(x for x in items if not isinstance(x, str))]
    items = [x if isinstance(x, Callback | type) or not callable(x) else Function(x) for x in items]
    callbacks = [x for x in items if isinstance(x, Callback)]
    sinks = [x for x in items if not isinstance(x, Callback)]
    evaluator = [Evaluator()] if experiment.evaluations else []
    return [*evaluator, *callbacks, Writers(with_progress(sinks, progress))]


def name_run_directory(experiment: Experiment, run_dir: Path | None) -> Path:
    """Return the path of a run's directory, by default a new one in `runs/`; create nothing."""
    if run_dir is not None:
        return run_directory(run_dir.parent, run_dir.name)
    if jax.process_count() > 1:
        raise ConfigError("several processes need a run directory that all of them share.")
    moment = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    return run_directory(user_path("runs"), f"{experiment.recipe}-s{experiment.seed}-{moment}")


def check_claim(directory: Path, resume: bool) -> None:
    """Raise `ConfigError` unless a new run, or with `resume` the one in it, can go on there.

    What is checked here is checked again under the directory's lock, see `RunLock`.
    """
    places = directory, directory / CHECKPOINTS  # a run's own `checkpoints`, or a run
    if is_tournament(directory):
        raise ConfigError(f"{directory} holds a tournament: choose another name.")
    if resume:
        check_is_run(directory)
    elif (directory / CONFIG).exists():
        raise ConfigError(f"{directory} already holds a run: resume it, or choose another name.")
    elif any(map(step_directories, places)) or newest_saved(directory) is not None:
        raise ConfigError(
            f"{directory} holds checkpoints, but not the config.json of their run: bring it back, "
            "or choose another name."
        )
    elif any(directory.glob("*/config.json")):
        raise ConfigError(f"{directory} holds other runs: name one in it, {directory / 'NAME'}.")
    elif records := [x for x in ("metrics.jsonl", RECORDS) if os.path.lexists(directory / x)]:
        raise ConfigError(
            f"{directory} holds the {records[0]} of another run: move it away, or choose another "
            "name."
        )
