"""Training: a run from its first or restored state to its end, recorded, evaluated and saved."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Generator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax

from podracer import recipes
from podracer.agent import Blueprint
from podracer.arguments import typed
from podracer.config.experiment import Experiment
from podracer.config.field_types import check_types
from podracer.config.serialization import recipe_name, saved_devices
from podracer.devices import peers
from podracer.devices.mesh import any_process, find_devices, wait_for_all_processes
from podracer.devices.startup import compilation_cache
from podracer.drivers.common import Orders, Progress, Request, TrainState
from podracer.errors import ConfigError
from podracer.evaluate import Evaluation
from podracer.io.attachments import Attachment, MakeAttachment, find_attachments
from podracer.io.checkpoint import Checkpointer
from podracer.io.crash import CRASH, retire_crash, write_crash
from podracer.io.jsonl import JsonlSink
from podracer.io.paths import user_path
from podracer.io.run_directory import RunLock
from podracer.io.seal import CONFIG, seal_json
from podracer.io.signals import PREEMPTED, StopSignals, Stopwatch, Watchdog
from podracer.io.sinks import Sink, Sinks, TensorBoardSink
from podracer.io.steps import Choice
from podracer.io.text import redact
from podracer.run import warm_start
from podracer.run.claim import check_claim, name_run_directory
from podracer.run.console import with_progress
from podracer.run.control import Control, Controller, check_control
from podracer.run.errors import StallError, classify_error, tag_component
from podracer.run.history import History
from podracer.run.records import Recorder
from podracer.run.result import Boundary, Callback, MakeSink, Result, RunInfo, check_functions
from podracer.run.resume import (
    Best,
    Totals,
    check_may_begin_again,
    check_metadata,
    check_same_environment,
    check_same_experiment,
    update_config,
)
from podracer.run.setup import RunSetup, make_run_setup, run_metadata
from podracer.run.sweep import RECORDS, read_run
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
    weights: str | Path | None = None,
    checkpoint: Choice = "newest",
    begin: warm_start.FirstState | None = None,
    attach: Sequence[MakeAttachment | str] = (),
    sinks: Sequence[Sink | MakeSink] = (),
    callbacks: Sequence[Callback] = (),
    control: Control | None = None,
    progress: bool | None = None,
    size: recipes.Size | None = None,
    **overrides: Any,
) -> Result:
    """Run an experiment, or a recipe by its name, to its end; write everything to `run_dir`.

    A recipe's name is at the size `laptop` or `accelerator`, by default the one for this device
    unless overrides choose the environments or few frames; a resumed run keeps its own.

    `overrides` replace fields of the experiment, such as its seed or its environment; a dictionary
    replaces fields of a part: `agent={"learning_rate": 1e-3}`. In another environment than the
    recipe's its target return does not count, and one of the host is trained under Sebulba.

    With `resume` the run continues exactly from the newest valid checkpoint of `run_dir`. A new run
    begins with what the agent of the run `weights` has learned at a `checkpoint`, see
    `warm_start` and `podracer.load`, or with the state that `begin` returns.

    To `attach` what follows each seal, give functions of the `RunInfo` that return an `Attachment`,
    or names of packages: `"mirror:s3://bucket/run"` of podracer-cloud copies each checkpoint in the
    background. A resumed run goes on with an attachment whose file `NAME.json` is in `run_dir`.

    Ctrl-C, a notebook's interrupt, saves the run after the current chunk and raises
    `KeyboardInterrupt`; a second one raises it at once, and a resume goes on from the last save.
    SIGTERM saves and raises `SystemExit` of code 75. In the main thread only.

    `progress` shows the run; by default where somebody watches, in a terminal or in a notebook.
    `sinks` get the record of every chunk besides `metrics.jsonl` and TensorBoard, each in a thread
    of its own; a function is called with the `RunInfo` and returns one. `callbacks` are called in
    order at each boundary, that is where the run evaluates or saves, after its save; the run is
    saved and ends there if one returns True. With several processes, each calls its own, and the
    run ends if one returns True in any process.

    `control` is called after each evaluation and returns other numbers for the agent or the
    environment, see `Control`: nothing is compiled again, the records and checkpoints have them,
    and a resumed run goes on with them.

    Raises `ConfigError` before anything is compiled if the run is impossible; later
    `NonFiniteError`, `CheckpointError`, `StorageError`, `DeviceError` or `StallError`, with the
    reason in `crash.json`.
    """
    if isinstance(experiment, str):
        recorded = recipe_name(user_path(run_dir)) if resume and run_dir is not None else None
        experiment = _find_recipe(experiment, size, recorded, overrides)
    elif size is not None:
        raise ConfigError("a size is a recipe's: name the recipe as text, or leave `size` out.")
    experiment = experiment.with_fields(overrides)
    check_types(experiment)
    experiment.check()
    check_functions(sinks, callbacks)
    check_control(control, experiment)
    if weights is not None and (resume or begin is not None):
        raise ConfigError("a run begins in one way: give weights without resume and begin.")
    if weights is None and checkpoint != "newest":
        raise ConfigError("a checkpoint is that of another run: name the run by weights.")
    if resume and run_dir is None:
        raise ConfigError("a run is resumed in its directory: name it by run_dir.")
    run_dir, num_saved = None if run_dir is None else user_path(run_dir), 0
    if resume and run_dir is not None:
        num_saved = saved_devices(run_dir)
        name = recipe_name(run_dir) or experiment.recipe  # a run keeps its name
        experiment = dataclasses.replace(experiment, recipe=name)
    setup = make_run_setup(experiment, num_saved)
    config = run_metadata(experiment, setup)
    is_main = jax.process_index() == 0
    for sentence in run_warnings(experiment, setup.blueprint) if is_main else ():
        _LOG.warning(sentence)
    if jax.process_count() > 1:
        command = {"run_dir": run_dir, "resume": resume, "weights": [weights, checkpoint]}
        peers.check_same_configuration({**config, "run": command})
    beginning = None if begin is None else warm_start.begin_of(begin)
    if weights is not None:
        beginning = warm_start.begin_with_weights(weights, setup, checkpoint)
    directory = name_run_directory(experiment, run_dir)
    info = RunInfo(experiment, directory, setup.topology, setup.state_bytes)
    makers = find_attachments(attach, directory)
    attachments = [make(info) for make in makers] if is_main else []
    check = partial(check_claim, directory, resume)
    check()
    wait_for_all_processes("directory claimed")  # or a slow process finds the run of a fast one
    recorder, sinks = Recorder(experiment, setup.env), with_progress(sinks, progress)
    run = Run(setup, config, recorder, info, sinks, callbacks, control, beginning, attachments)
    lock = RunLock(directory, check, setup.saved_bytes) if is_main else contextlib.nullcontext()
    with lock, peers.reports_loss(run.report_fault):
        try:
            return run.execute(resume)
        except Exception as error:
            error = classify_error(error)
            # A refusal harms no run, and a stall was reported with its stacks.
            is_refusal = resume and isinstance(error, ConfigError)
            if not is_refusal and not isinstance(error, StallError):
                run.report_fault(error)
            raise error from error.__cause__


def _find_recipe(
    name: str, size: recipes.Size | None, recorded: str | None, overrides: Mapping[str, Any]
) -> Experiment:
    """Return a recipe's experiment at a size, in the environment that overrides name.

    `recorded` is the name of the experiment that is resumed.
    """
    experiment = recipes.find(name)
    environment = overrides.get("environment", experiment.environment)
    if size is None and recorded is not None:
        size = "accelerator" if recorded.endswith(recipes.SUFFIX) else "laptop"
    elif size is None:
        changed = experiment.with_environment(environment).with_fields(overrides)
        check_types(changed)
        size = recipes.fitting_size(name, find_devices()[0].platform, changed, experiment)
    return recipes.with_size(experiment, name, size).with_environment(environment)


class Run:
    """One process's part in a run."""

    def __init__(
        self,
        setup: RunSetup,
        config: dict[str, Any],
        recorder: Recorder,
        info: RunInfo,
        sinks: Sequence[Sink | MakeSink] = (),
        callbacks: Sequence[Callback] = (),
        control: Control | None = None,
        begin: warm_start.Begin | None = None,
        attachments: Sequence[Attachment] = (),
    ) -> None:
        self.setup, self.recorder, self.begin = setup, recorder, begin
        self.attachments = attachments
        self.config, self.settings = config, config["experiment"]
        self.agent, self.budget = setup.blueprint.build(), setup.budget
        self.directory, self.info = info.run_dir, info
        self.sinks, self.callbacks = sinks, callbacks
        self.controller = Controller(control, info.experiment, setup.blueprint, setup.env)
        self.is_main = jax.process_index() == 0
        self.history = History([setup.topology])
        self.saved: int | None = None  # updates at the newest checkpoint
        self._pods: Sinks | None = None  # a record of each pod of a population
        self._files: dict[str, JsonlSink] = {}  # files of records, by name
        self._sealed: dict[str, Any] = {}  # these files at the restored checkpoint

    def execute(self, resume: bool) -> Result:
        """Run from the first or the restored state to the end."""
        signals = StopSignals(stopped=f"Saved in {self.directory}; train with resume=True goes on.")
        with contextlib.ExitStack() as stack:
            stack.enter_context(signals.installed())
            for attachment in self.attachments:  # left after the watchdog has gone
                stack.enter_context(attachment)
            stalled = partial(self._stalled, signals)
            watchdog = stack.enter_context(Watchdog(self.setup.stall_seconds, stalled))
            checkpointer = Checkpointer(self.directory, sealed=self._tell_attachments)
            stack.enter_context(checkpointer)
            state = self._restored_state(checkpointer) if resume else None
            if state is None:
                state = self._initial_state()
            if self.is_main:
                retire_crash(self.directory)
            self._tell_attachments()  # `config.json` is there, and what an earlier process left
            updates = self.totals.updates if resume else None
            sinks = stack.enter_context(self._make_sinks(updates))
            if self.setup.num_pods:
                self._pods = stack.enter_context(Sinks([self._records(RECORDS, updates)]))
            return self._consume(state, checkpointer, sinks, signals, watchdog)

    def _tell_attachments(self) -> None:
        for attachment in self.attachments:
            attachment.sealed()

    def _initial_state(self) -> TrainState:
        begin = self.begin or warm_start.recorded_begin(self.directory, self.setup)
        if self.is_main:
            seal_json(self.directory / CONFIG, self.config | (begin.entries if begin else {}))
        self.setup.start_compile()  # compiles side by side with that of the initial state
        if begin is None:
            return self.setup.init()
        state, totals = begin.first_state(self.setup)
        self.recorder.restore(totals)
        return state

    def _restored_state(self, checkpointer: Checkpointer) -> TrainState | None:
        """Return the newest checkpoint's state, None if the run ended before its first save."""
        check_same_environment(self.directory, self.setup.env)
        if not checkpointer.has_saved():
            check_may_begin_again(self.directory, self.settings)
            if self.is_main:
                _LOG.warning("The run ended before its first save, so it begins again.")
            return None
        restored = checkpointer.restore(self.setup.abstract_state)
        metadata, state = restored.metadata, restored.state
        check_metadata(metadata)
        check_same_experiment(metadata["experiment"], self.settings)
        totals, best = Totals(**metadata["totals"]), metadata.get("best")
        self.budget.check_left(metadata["experiment"]["frames"], totals)
        self.history.restore(metadata, self.directory)
        if self.is_main:
            update_config(self.directory, self.settings)
            if not self.setup.continues_episodes(state):
                _LOG.warning("The environments begin new episodes; all else continues as saved.")
            self.history.warn()
        self.recorder.restore(totals, best and Best(**best))
        self._change(self.controller.restore(metadata.get("changes") or {}))
        self._sealed = metadata["records"]
        self.saved = restored.step
        return state

    @property
    def totals(self) -> Totals:
        return self.recorder.totals

    def _make_sinks(self, resumed_from: int | None) -> Sinks:
        if not self.is_main:
            return Sinks([])
        sinks: list[Sink] = [
            self._records("metrics.jsonl", resumed_from),
            TensorBoardSink(self.directory / "tensorboard", resume_updates=resumed_from),
        ]
        info = dataclasses.replace(self.info, resumed_from=resumed_from)
        for sink in self.sinks:
            try:
                sinks.append(sink(info) if callable(sink) else sink)
            except Exception as error:
                _LOG.warning("a sink could not be made; the run continues. %r", error)
        return Sinks(sinks)

    def _records(self, name: str, resumed_from: int | None) -> JsonlSink:
        """Return the sink of a file of records, which every checkpoint seals."""
        path, sealed = self.directory / name, self._sealed.get(name)
        self._files[name] = JsonlSink(path, resume_updates=resumed_from, sealed=sealed)
        return self._files[name]

    def _start_compile(self, state: TrainState, checkpointer: Checkpointer) -> None:
        """Compile what the run needs beside each other, unless it was over before."""
        if self.budget.reason_to_end(self.totals):
            return
        self.setup.start_compile()
        if self.budget.evaluates:
            with tag_component("evaluator"):
                self.setup.start_evaluation(state)
        checkpointer.start()  # once all is traced, as both need Python's lock

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
        self.budget.begin(self.totals)
        self._start_compile(state, checkpointer)
        reports = self._progress(state, signals, times)
        with contextlib.closing(reports) as progresses:
            for progress in progresses:
                watchdog.alive()
                with tag_component("checkpointer"):
                    checkpointer.check()
                record = self.recorder.record(progress, times, self.setup.start_compile.seconds)
                for attachment in self.attachments:
                    record |= attachment.figures()
                is_due = self.budget.is_due(self.budget.frames(self.totals))
                if progress.state is None or not (progress.request or is_due):
                    self._write(sinks, record, progress)
                    continue
                learner = progress.state.learner
                if is_due and self.budget.evaluates:
                    evaluation = self._evaluate(progress, progress.state, record, times)
                    watchdog.alive()
                self._write(sinks, record, progress)
                boundary = Boundary(self.agent, learner, record, evaluation, self.directory)
                if is_due:
                    self._change(self.controller.ask(boundary))
                # Decided together: clocks and signals of several processes differ.
                is_over, is_stopped, is_due = any_process(
                    bool(self.budget.reason_to_end(self.totals)),
                    signals.exit_code is not None,
                    self._is_save_due(),
                )
                is_saved = is_over or is_stopped or is_due or bool(progress.request)
                if is_saved:
                    self._save(checkpointer, progress.state)
                (is_ended,) = any_process(self._call_back(boundary, checkpointer))
                if is_ended and not is_saved:
                    self._save(checkpointer, progress.state)
                if is_ended or is_saved:
                    times.add("time_save")
                    watchdog.alive()
                if is_over or is_ended or is_stopped:
                    is_signal = not (is_over or is_ended)
                    exit_code = (signals.exit_code or PREEMPTED) if is_signal else 0
                    break
        with tag_component("checkpointer"):
            checkpointer.wait()
        if not record:  # the run was over before
            record = [{}, *read_run(self.directory)][-1]
        reason = self.budget.reason_to_end(self.totals) or "callback"
        reason = "signal" if exit_code else reason
        return Result(self.agent, learner, record, evaluation, self.directory, exit_code, reason)

    def _evaluate(
        self, progress: Progress, state: TrainState, record: dict[str, Any], times: Stopwatch
    ) -> Evaluation:
        """Evaluate a state; add the evaluation and its seconds to the record."""
        self.budget.begin(self.totals)
        with tag_component("evaluator"):
            program = self.setup.start_evaluation(state)
            if not program.done():
                program.result()
                times.add("time_compile")
            evaluation = self.setup.evaluate(state)
        self.recorder.add_evaluation(evaluation, record, progress)
        times.add("time_evaluate")
        self.recorder.add_seconds(record, times)
        return evaluation

    def _write(self, sinks: Sinks, record: dict[str, Any], progress: Progress) -> None:
        # The pods' first: their file lacks an evaluation of the other only if it cannot be written.
        if self._pods is not None and progress.pods is not None:
            self._pods.write({"updates": progress.updates, **progress.pods})
        sinks.write(record)

    def _progress(
        self, state: TrainState, signals: StopSignals, times: Stopwatch
    ) -> Generator[Progress]:
        budget, interval = self.budget, self.setup.save_seconds
        if budget.reason_to_end(self.totals):
            return

        def request() -> Request:
            """Ask for a boundary, to stop or to save, whatever the length of a chunk."""
            unsaved = times.since("time_save")
            is_over = budget.reason_to_end(self.totals, times.since_lap())
            if signals.exit_code or is_over or unsaved >= interval > 0:
                return Request.UPDATE_END
            is_last_chance = unsaved + self.recorder.chunk_seconds >= interval
            return Request.CHUNK_END if is_last_chance else Request.NONE

        orders = Orders(
            num_updates=lambda updates: budget.num_updates(self.totals, updates),
            is_boundary=lambda updates: budget.is_due(budget.most_frames(self.totals, updates)),
            request=request,
            change=self.controller.take,
        )
        yield from self.setup.drive(state, orders)

    def _change(self, blueprint: Blueprint | None) -> None:
        """Go on with a blueprint that `control` changed, which the driver takes."""
        if blueprint is not None:
            self.agent = blueprint.build()
            self.recorder.change(blueprint.settings, self.controller.record)

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

    def _save(self, checkpointer: Checkpointer, state: TrainState) -> None:
        best = self.recorder.best_saved()
        metadata = {
            "totals": dataclasses.asdict(self.totals),
            "experiment": redact(self.settings, stable=True),
            **dataclasses.asdict(self.history),
            "records": {name: file.seal() for name, file in self._files.items()},
            "best": None if best is None else dataclasses.asdict(best),
            "changes": self.controller.changes,
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
            experiment=self.settings,
        )
