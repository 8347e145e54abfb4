"""Training: a run from its first or restored state to its end, recorded, evaluated and saved."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Generator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax

from podracer import recipes
from podracer.config.experiment import Experiment
from podracer.config.field_types import check_types
from podracer.config.serialization import (
    check_same_experiment,
    read_config,
    recipe_name,
    saved_devices,
    to_json,
    update_config,
)
from podracer.devices import peers
from podracer.devices.mesh import any_process, wait_for_all_processes
from podracer.devices.startup import compilation_cache
from podracer.drivers.common import Progress, Request, TrainState
from podracer.drivers.sebulba import SebulbaConfig, continues_episodes
from podracer.errors import CheckpointError, ConfigError
from podracer.evaluate import Evaluation
from podracer.io.checkpoint import Checkpointer
from podracer.io.crash import CRASH, retire_crash, write_crash
from podracer.io.jsonl import JsonlSink
from podracer.io.paths import user_path
from podracer.io.run_directory import RunLock
from podracer.io.seal import CONFIG, seal_json
from podracer.io.signals import PREEMPTED, StopSignals, Stopwatch, Watchdog
from podracer.io.sinks import Sink, Sinks, TensorBoardSink
from podracer.io.steps import Choice
from podracer.io.text import redact_settings
from podracer.run.budget import Budget
from podracer.run.claim import check_claim, name_run_directory
from podracer.run.errors import StallError, classify_error, tag_component
from podracer.run.history import History
from podracer.run.progress import with_progress
from podracer.run.records import Best, Recorder, Totals, check_metadata, shows_saves
from podracer.run.result import Boundary, Callback, MakeSink, Result, RunInfo
from podracer.run.setup import (
    RunSetup,
    check_functions,
    check_same_environment,
    make_run_setup,
    run_metadata,
)
from podracer.run.sweep import RECORDS, read_run
from podracer.run.warm_start import Begin, Weights, describe_begin, recorded_begin
from podracer.run.warnings import run_warnings

_LOG = logging.getLogger("podracer")


@peers.leaves_on_error()
@compilation_cache()
def train(
    experiment: Experiment | str,
    *,
    run_dir: str | Path | None = None,
    resume: bool = False,
    weights: str | Path | None = None,
    checkpoint: Choice = "newest",
    begin: Begin | None = None,
    sinks: Sequence[Sink | MakeSink] = (),
    callbacks: Sequence[Callback] = (),
    progress: bool | None = None,
    **overrides: Any,
) -> Result:
    """Run an experiment, or a recipe by its name, to its end; write everything to `run_dir`.

    `overrides` replace fields of the experiment, such as its seed or its environment; a dictionary
    replaces fields of a part: `agent={"learning_rate": 1e-3}`. In another environment than the
    recipe's its target return does not count, and one of the host is trained under Sebulba.

    With `resume` the run continues exactly from the newest valid checkpoint of `run_dir`. A new run
    begins with what the agent of the run `weights` has learned at a `checkpoint`, see `Weights` and
    `podracer.load`, or with the state that `begin` returns.

    Ctrl-C, a notebook's interrupt, saves the run after the current chunk and raises
    `KeyboardInterrupt`; a second one raises it at once, and a resume goes on from the last save.
    SIGTERM saves and raises `SystemExit` of code 75. In the main thread only.

    `progress` shows the run; by default where somebody watches, in a terminal or in a notebook.
    `sinks` get the record of every chunk besides `metrics.jsonl` and TensorBoard, each in a thread
    of its own; a function is called with the `RunInfo` and returns one. `callbacks` are called in
    order at each boundary, that is where the run evaluates or saves, after its save; the run is
    saved and ends there if one returns True. With several processes, each calls its own, and the
    run ends if one returns True in any process.

    Raises `ConfigError` before anything is compiled if the run is impossible; later
    `NonFiniteError`, `CheckpointError`, `StorageError`, `DeviceError` or `StallError`, with the
    reason in `crash.json`.
    """
    run_dir = None if run_dir is None else user_path(run_dir)
    if isinstance(experiment, str):
        experiment = recipes.find(experiment)
        experiment = experiment.with_environment(
            overrides.get("environment", experiment.environment)
        )
    experiment = experiment.with_fields(overrides)
    check_types(experiment)
    experiment.check()
    check_functions(sinks, callbacks)
    sinks = with_progress(sinks, progress)
    saved = saved_devices(run_dir) if resume and run_dir is not None else 0
    if resume and run_dir is not None and (name := recipe_name(run_dir)):
        experiment = dataclasses.replace(experiment, recipe=name)  # a run keeps its name
    setup = make_run_setup(experiment, saved)
    if jax.process_index() == 0:
        for sentence in run_warnings(experiment, setup.blueprint):
            _LOG.warning(sentence)
    if jax.process_count() > 1:
        command = {"run_dir": run_dir, "resume": resume, "weights": [weights, checkpoint]}
        peers.check_same_configuration({**run_metadata(experiment, setup), "run": command})
    if weights is not None:
        if resume or begin is not None:
            raise ConfigError("a run begins in one way: give weights without resume and begin.")
        begin = Weights(weights, setup, experiment, checkpoint)
    elif checkpoint != "newest":
        raise ConfigError("a checkpoint is that of another run: name the run by weights.")
    directory = name_run_directory(experiment, run_dir)
    check = functools.partial(check_claim, directory, resume)
    check()
    wait_for_all_processes("directory claimed")  # or a slow process finds the run of a fast one
    run = Run(experiment, setup, directory, sinks, callbacks, begin)
    lock = RunLock(directory, check, setup.saved_bytes) if run.is_main else contextlib.nullcontext()
    with lock, peers.reports_loss(run.report_fault):
        try:
            return run.execute(resume)
        except Exception as error:
            error = classify_error(error)
            is_refusal = resume and isinstance(error, ConfigError)  # which harms no run
            if not is_refusal and not isinstance(error, StallError):  # reported with its stacks
                run.report_fault(error)
            raise error from error.__cause__


class Run:
    """One process's part in a run."""

    def __init__(
        self,
        experiment: Experiment,
        setup: RunSetup,
        directory: Path,
        sinks: Sequence[Sink | MakeSink] = (),
        callbacks: Sequence[Callback] = (),
        begin: Begin | None = None,
    ) -> None:
        self.experiment, self.setup, self.begin = experiment, setup, begin
        self.agent, self.env, self.mesh = setup.blueprint.build(), setup.env, setup.mesh
        self.directory, self.sinks, self.callbacks = directory, sinks, callbacks
        self.recorder = Recorder(experiment, setup.env)
        self.is_main = jax.process_index() == 0
        self.history = History([setup.topology])
        self.saved: int | None = None  # updates at the newest checkpoint
        self._budget = Budget(experiment)
        self._pods: Sinks | None = None  # of a population: a record of each pod
        self._files: dict[str, JsonlSink] = {}  # of records, by name
        self._sealed: dict[str, Any] = {}  # these files at the restored checkpoint

    def execute(self, resume: bool) -> Result:
        """Run from the first or the restored state to the end."""
        signals = StopSignals(stopped=f"Saved in {self.directory}; train with resume=True goes on.")
        with contextlib.ExitStack() as stack:
            stack.enter_context(signals.installed())
            stalled = partial(self._stalled, signals)
            watchdog = stack.enter_context(Watchdog(self.experiment.stall_seconds, stalled))
            checkpointer = stack.enter_context(Checkpointer(self.directory))
            state = self._restored_state(checkpointer) if resume else None
            if state is None:
                state = self._initial_state()
            if self.is_main:
                retire_crash(self.directory)
            sinks = stack.enter_context(self._make_sinks(resume))
            if self.experiment.pods:
                self._pods = stack.enter_context(Sinks([self._records(RECORDS, resume)]))
            return self._consume(state, checkpointer, sinks, signals, watchdog)

    def _initial_state(self) -> TrainState:
        begin = self.begin
        if begin is None:
            begin = recorded_begin(self.directory, self.setup, self.experiment)
        if self.is_main:
            about = describe_begin(begin)
            seal_json(self.directory / CONFIG, run_metadata(self.experiment, self.setup) | about)
        self.setup.start_compile()  # compiles side by side with that of the initial state
        if begin is None:
            return self.setup.init()
        state, totals = begin(self.setup)
        self.recorder.restore(totals)
        return state

    def _restored_state(self, checkpointer: Checkpointer) -> TrainState | None:
        """Return the newest checkpoint's state, None if the run ended before its first save."""
        check_same_environment(self.directory, self.env)
        if not checkpointer.has_saved():
            if shows_saves(self.directory / "metrics.jsonl"):
                raise CheckpointError(
                    f"{self.directory} has no checkpoint, but its records show that one was "
                    "saved: bring it back, or begin a new run."
                )
            began = read_config(self.directory / CONFIG)["experiment"]
            check_same_experiment(began, to_json(self.experiment))
            if self.is_main:
                _LOG.warning("The run ended before its first save, so it begins again.")
            return None
        restored = checkpointer.restore(self.setup.abstract_state)
        check_metadata(restored.metadata)
        check_same_experiment(restored.metadata["experiment"], to_json(self.experiment))
        frames = restored.metadata["experiment"]["frames"]
        num_frames = self._budget.frames(Totals(**restored.metadata["totals"]))
        if self.experiment.frames < frames and self.experiment.num_steps < num_frames:
            raise ConfigError(
                f"frames is {self.experiment.frames:,}, but the run has made {num_frames:,} "
                "already."
            )
        if self.is_main:
            update_config(self.directory, self.experiment)
            driver, state = self.experiment.driver, restored.state
            if isinstance(driver, SebulbaConfig) and not continues_episodes(driver, state):
                _LOG.warning("The environments begin new episodes; all else continues as saved.")
        self.history.restore(restored.metadata, self.directory)
        if self.is_main:
            self.history.warn()
        best = restored.metadata.get("best")
        self.recorder.restore(Totals(**restored.metadata["totals"]), best and Best(**best))
        self._sealed = restored.metadata["records"]
        self.saved = restored.step
        return restored.state

    @property
    def totals(self) -> Totals:
        """Counters of the run."""
        return self.recorder.totals

    def _make_sinks(self, resume: bool) -> Sinks:
        if not self.is_main:
            return Sinks([])
        updates = self.totals.updates if resume else None
        sinks: list[Sink] = [
            self._records("metrics.jsonl", resume),
            TensorBoardSink(self.directory / "tensorboard", resume_updates=updates),
        ]
        info = RunInfo(
            self.experiment, self.directory, self.setup.topology, self.setup.state_bytes, updates
        )
        for sink in self.sinks:
            try:
                sinks.append(sink(info) if callable(sink) else sink)
            except Exception as error:
                _LOG.warning("a sink could not be made; the run continues. %r", error)
        return Sinks(sinks)

    def _records(self, name: str, resume: bool) -> JsonlSink:
        """Return the sink of a file of records, which every checkpoint seals."""
        updates = self.totals.updates if resume else None
        path, sealed = self.directory / name, self._sealed.get(name)
        self._files[name] = JsonlSink(path, resume_updates=updates, sealed=sealed)
        return self._files[name]

    def _consume(
        self,
        state: TrainState,
        checkpointer: Checkpointer,
        sinks: Sinks,
        signals: StopSignals,
        watchdog: Watchdog,
    ) -> Result:
        """Record each chunk; at boundaries evaluate, save, call back and stop."""
        record: dict[str, Any] = {}
        evaluation: Evaluation | None = None
        times, exit_code, learner = Stopwatch(), 0, state.learner
        self._budget.begin(self.totals)
        with contextlib.closing(self._progress(state, signals, times)) as progresses:
            for progress in progresses:
                watchdog.alive()
                with tag_component("checkpointer"):
                    checkpointer.check()
                record = self.recorder.record(progress, times, self.setup.start_compile.seconds)
                is_due = self._budget.is_due(self._budget.frames(self.totals))
                if progress.state is None or not (progress.request or is_due):
                    self._write(sinks, record, progress)
                    continue
                learner = progress.state.learner
                if is_due and self.experiment.evaluations:
                    self._budget.begin(self.totals)
                    with tag_component("evaluator"):
                        evaluation = self.setup.evaluate(progress.state)
                    self.recorder.add_evaluation(evaluation, record, progress)
                    times.add("time_evaluate")
                    watchdog.alive()
                self._write(sinks, record, progress)
                # Decided together: clocks and signals of several processes differ.
                done, stopped, is_due = any_process(
                    bool(self._reason_to_end()), signals.exit_code is not None, self._is_save_due()
                )
                is_saved = done or stopped or is_due or bool(progress.request)
                if is_saved:
                    self._save(checkpointer, progress.state)
                boundary = Boundary(self.agent, learner, record, evaluation, self.directory)
                (ended,) = any_process(self._call_back(boundary, checkpointer))
                if ended and not is_saved:
                    self._save(checkpointer, progress.state)
                if ended or is_saved:
                    times.add("time_save")
                    watchdog.alive()
                done = done or ended
                if done or stopped:
                    exit_code = 0 if done else signals.exit_code or PREEMPTED
                    break
        with tag_component("checkpointer"):
            checkpointer.wait()
        if not record:  # the run was over before
            record = [{}, *read_run(self.directory)][-1]
        reason = "signal" if exit_code else self._reason_to_end() or "callback"
        return Result(self.agent, learner, record, evaluation, self.directory, exit_code, reason)

    def _write(self, sinks: Sinks, record: dict[str, Any], progress: Progress) -> None:
        # The pods' first: their file lacks an evaluation of the other only if it cannot be written.
        if self._pods is not None and progress.pods is not None:
            self._pods.write({"updates": progress.updates, **progress.pods})
        sinks.write(record)

    def _progress(
        self, state: TrainState, signals: StopSignals, times: Stopwatch
    ) -> Generator[Progress]:
        experiment, budget = self.experiment, self._budget
        if self._reason_to_end():
            return

        def request() -> Request:
            """Ask for a boundary, to stop or to save, whatever the length of a chunk."""
            unsaved, interval = times.since("time_save"), experiment.save_seconds
            is_over = signals.exit_code or self._reason_to_end(times.since_lap())
            if is_over or unsaved >= interval > 0:
                return Request.UPDATE_END
            is_last_chance = unsaved + self.recorder.chunk_seconds >= interval
            return Request.CHUNK_END if is_last_chance else Request.NONE

        yield from self.setup.drive(
            state=state,
            num_updates=lambda updates: budget.num_updates(self.totals, updates),
            request=request,
            boundary=lambda updates: budget.is_due(budget.most_frames(self.totals, updates)),
        )

    def _call_back(self, boundary: Boundary, checkpointer: Checkpointer) -> bool:
        """Call all callbacks, with the last save done; return whether one of them ends the run."""
        if self.callbacks:
            with tag_component("checkpointer"):
                checkpointer.wait()
        with tag_component("callback"):
            return any([callback(boundary) for callback in self.callbacks])

    def _is_save_due(self) -> bool:
        """Return whether this update has the best evaluation so far, or calls back unsaved."""
        best = self.recorder.best
        is_best = best is not None and best.updates == self.totals.updates
        return is_best or (bool(self.callbacks) and self.saved is None)

    def _reason_to_end(self, unrecorded_seconds: float = 0.0) -> str:
        """Return the field of the experiment by which the run is done, "" if it is not."""
        if self._budget.is_spent(self.totals):
            return "frames"
        target, reached = self.experiment.target_return, self.totals.evaluation_return
        if target is not None and reached is not None and reached >= target:
            return "target_return"
        limit = self.experiment.max_seconds
        if limit is not None and self.totals.seconds + unrecorded_seconds >= limit:
            return "max_seconds"
        return ""

    def _save(self, checkpointer: Checkpointer, state: TrainState) -> None:
        best = self.recorder.best_saved()
        metadata = {
            "totals": dataclasses.asdict(self.totals),
            "experiment": redact_settings(to_json(self.experiment)),
            **dataclasses.asdict(self.history),
            "records": {name: file.seal() for name, file in self._files.items()},
            "best": None if best is None else dataclasses.asdict(best),
        }
        with tag_component("checkpointer"):
            checkpointer.save(self.totals.updates, state, metadata)
        self.saved = self.totals.updates

    def _stalled(self, signals: StopSignals, message: str) -> None:
        error = StallError(f"{message}: the run in {self.directory} is ended, and can be resumed.")
        self.report_fault(error)
        signals.abort(error)

    def report_fault(self, error: Exception) -> None:
        """Write `crash.json`; the loss of a process is not written over the fault that it had."""
        if isinstance(error, peers.PeerLostError) and (self.directory / CRASH).exists():
            return
        write_crash(
            self.directory,
            error,
            component=getattr(error, "component", "learner"),
            last_update=self.totals.updates,
            last_checkpoint=self.saved,
            experiment=to_json(self.experiment),
        )
