"""A run: the loop over a driver's reports, and what callbacks see of it."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import logging
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from podracer.agent import Blueprint
from podracer.config.experiment import Experiment
from podracer.devices.mesh import largest_of_processes
from podracer.devices.peers import PeerLostError
from podracer.drivers.driver import Driver
from podracer.drivers.progress import Orders, Progress, Request
from podracer.drivers.state import TrainState
from podracer.errors import ConfigError
from podracer.evaluate import Evaluation
from podracer.io.checkpoint import Checkpointer
from podracer.io.crash import CRASH, retire_crash, write_crash
from podracer.io.differences import leaves
from podracer.io.exits import PREEMPTED
from podracer.io.seal import CONFIG, encode_json, seal_json
from podracer.io.signals import StopSignals, Watchdog
from podracer.io.steps import saved_updates
from podracer.io.text import redact
from podracer.run import resume
from podracer.run.budget import Budget
from podracer.run.changes import changed_blueprint, in_json, merged
from podracer.run.errors import StallError, tag_component
from podracer.run.records import Recorder, Stopwatch
from podracer.run.result import Boundary, Result, RunInfo
from podracer.run.setup import run_metadata
from podracer.run.sweep import readable_records
from podracer.run.warm_start import Begin, recorded_begin

_LOG = logging.getLogger("podracer")


class Wish(enum.IntEnum):
    """Wish of a callback at a boundary; the largest one of all callbacks and processes counts."""

    NONE = 0
    SAVE = 1
    LEAVE = 2
    """Save and stop, to be resumed later."""
    END = 3
    """Save and stop: the run is done."""


class Callback:
    """Part of a run beside its loop. Each method does nothing by default.

    A run calls its callbacks in their order, in each process its own. An exception ends the run.
    Context managers entered on `run.stack`, an `ExitStack`, are exited when the run ends, even
    after a fault.
    """

    def check(self, run: Run) -> None:
        """Raise `ConfigError` where the run cannot have it, before anything is compiled."""

    def on_open(self, run: Run) -> None:
        """Begin, with the run's directory locked and nothing recorded in it."""

    def restore(self, run: Run, saved: Mapping[str, Any]) -> None:
        """Take from a checkpoint's metadata what `saved` gave it, of all callbacks."""

    def on_start(self, run: Run) -> None:
        """Begin with the first or the restored state, `run.state`, unless the run is over."""

    def on_record(self, run: Run, record: dict[str, Any]) -> None:
        """Look at the record of a chunk, or add numbers to it before it is written."""

    def on_boundary(self, run: Run) -> Wish | bool | None:
        """Look at `run.boundary()`, before its save; True ends the run."""

    def saved(self) -> Mapping[str, Any]:
        """Return entries for the metadata of a checkpoint, in JSON."""
        return {}

    def on_save(self, run: Run) -> None:
        """Read the checkpoint of this boundary, now that it is on the disk."""

    def on_seal(self) -> None:
        """Follow a sealed file at once, in a thread of the checkpointer, on process 0."""


class Run:
    """One process's part in a run."""

    def __init__(
        self, experiment: Experiment, driver: Driver, directory: Path, callbacks: Sequence[Callback]
    ) -> None:
        self.experiment, self.driver, self.directory = experiment, driver, directory
        self.callbacks = callbacks
        self.config = run_metadata(experiment, driver)
        """Content of `config.json`."""
        self.blueprint, self.agent = driver.blueprint, driver.agent
        self.budget, self.recorder = Budget(experiment), Recorder(experiment, driver.env)
        self.history, self.times = resume.History([driver.topology]), Stopwatch()
        self.is_main = jax.process_index() == 0
        self.changes: dict[str, Any] = {}
        """Numbers that have changed since the run began, as nested fields."""
        self.progress: Progress | None = None
        """Newest report of the driver."""
        self.record: dict[str, Any] = {}
        self.is_due = False
        """Whether an evaluation is due at this report."""
        self.evaluation: Evaluation | None = None
        self.resumed_from: int | None = None
        """None for a new run, else the number of updates at the restored checkpoint."""
        self.state: TrainState
        """State of the newest boundary, at first the one that the run begins with."""
        self._pending: Blueprint | None = None  # with changes that the driver has not taken

    # --- what callbacks see and do ----------------------------------------------------------------

    @property
    def totals(self) -> resume.Totals:
        """Counters of the whole run."""
        return self.recorder.totals

    @property
    def info(self) -> RunInfo:
        """Facts about the run."""
        facts = (self.driver.topology, self.driver.state_bytes, self.resumed_from)
        return RunInfo(self.experiment, self.directory, *facts)

    def boundary(self) -> Boundary:
        """Return the state of the run at this boundary."""
        learner = self.state.learner
        return Boundary(self.agent, learner, self.record, self.evaluation, self.directory)

    def change(self, fields: Mapping[str, Any]) -> None:
        """Go on with other numbers, `{"agent": {"learning_rate": 1e-4}, "environment": {...}}`.

        Nothing is compiled again, and checkpoints and records have them. All processes change the
        same. Raises `ConfigError` for a field that is unknown, out of range or compiled in.
        """
        if self.driver.num_pods:
            raise ConfigError(
                "a population is changed by its selection alone: train each seed by itself where a "
                "callback changes numbers."
            )
        driver, values = self.driver, merged(self.changes, fields)
        self.blueprint = changed_blueprint(self.experiment, driver.blueprint, driver.env, values)
        self._pending = self.blueprint
        self.agent, self.changes = self.blueprint.build(), in_json(values)
        numbers = [(name, x) for name, x in leaves(self.changes) if isinstance(x, int | float)]
        self.recorder.change(self.blueprint.settings, dict(numbers))

    # --- the run ----------------------------------------------------------------------------------

    def execute(self, is_resumed: bool, begin: Begin | None) -> Result:
        """Run from the first or the restored state to the end."""
        stopped = f"Saved in {self.directory}; train with resume=True goes on."
        self.signals = StopSignals(stopped=stopped)
        with contextlib.ExitStack() as self.stack:
            self.stack.enter_context(self.signals.installed())
            for callback in self.callbacks:
                callback.on_open(self)
            watchdog = Watchdog(self.experiment.stall_seconds, self._stalled)
            self.watchdog = self.stack.enter_context(watchdog)
            checkpointer = Checkpointer(self.directory, sealed=self._sealed)
            self.checkpointer = self.stack.enter_context(checkpointer)
            restored = self._restored_state() if is_resumed else None
            self.state, saved = restored or self._first_state(begin)
            self.resumed_from = self.totals.updates if is_resumed else None
            if saved:
                self._restore_parts(saved)
            if self.is_main:
                retire_crash(self.directory)
                self._sealed()  # `config.json` is there, and what an earlier process left
            exit_code = 0
            self.budget.pass_marks(self.totals)
            if not self.budget.reason_to_end(self.totals):
                self.driver.compile_in_thread()
                for callback in self.callbacks:
                    callback.on_start(self)
                self.checkpointer.load_orbax()  # once all is traced, as both need Python's lock
                exit_code = self._loop()
        self.record = self.record or [{}, *deque(readable_records(self.directory), maxlen=1)][-1]
        reason = "signal" if exit_code else self.budget.reason_to_end(self.totals) or "callback"
        return Result(**vars(self.boundary()), exit_code=exit_code, reason=reason)

    def _loop(self) -> int:
        """Call the callbacks at each report; at boundaries save, and stop as they wish."""
        exit_code, self.times = 0, Stopwatch()
        with contextlib.closing(self.driver.run(self.state, self._orders())) as reports:
            for progress in reports:
                self.watchdog.alive()
                with tag_component("checkpointer"):
                    self.checkpointer.check()
                self.progress = progress
                self.record = self.recorder.record(
                    progress, self.times, self.driver.compile_in_thread.seconds
                )
                self.is_due = self.budget.is_due(self.budget.frames(self.totals))
                at_boundary = progress.state if progress.request or self.is_due else None
                if at_boundary is not None:
                    self.state = at_boundary
                    if self.is_due:
                        self.budget.pass_marks(self.totals)
                with tag_component("callback"):
                    for callback in self.callbacks:
                        callback.on_record(self, self.record)
                if at_boundary is None:
                    continue
                wish = self._wish()
                if wish >= Wish.SAVE or progress.request:
                    self._save()
                if wish is Wish.LEAVE:  # the signal may have been another process's
                    exit_code = self.signals.exit_code or PREEMPTED
                if wish >= Wish.LEAVE:
                    break
        with tag_component("checkpointer"):
            self.checkpointer.wait()
        return exit_code

    def _wish(self) -> Wish:
        """Return the largest wish of all processes, whose clocks and signals differ."""
        with tag_component("callback"):
            answers = [callback.on_boundary(self) for callback in self.callbacks]
            for x in answers:
                is_bool = np.asarray(x).dtype == bool and np.asarray(x).ndim == 0
                if not (x is None or isinstance(x, Wish) or is_bool):
                    raise ConfigError(f"a callback returns True, a Wish or None, not {x!r:.80}.")
            wishes = [x if isinstance(x, Wish) else Wish.END if x else Wish.NONE for x in answers]
        if self.budget.reason_to_end(self.totals):
            wishes.append(Wish.END)
        elif self.signals.exit_code is not None:
            wishes.append(Wish.LEAVE)
        return Wish(largest_of_processes(max(wishes, default=Wish.NONE)))

    def _orders(self) -> Orders:
        budget, interval = self.budget, self.experiment.save_seconds

        def request() -> Request:
            """Ask for a boundary, to stop or to save, whatever the length of a chunk."""
            unsaved = self.times.since("time_save")
            is_over = budget.reason_to_end(self.totals, self.times.since_lap())
            if self.signals.exit_code or is_over or unsaved >= interval > 0:
                return Request.UPDATE_END
            is_last_chance = unsaved + self.recorder.chunk_seconds >= interval
            return Request.CHUNK_END if is_last_chance else Request.NONE

        def change() -> Blueprint | None:
            blueprint, self._pending = self._pending, None
            return blueprint

        return Orders(
            num_updates=lambda updates: budget.num_updates(self.totals, updates),
            is_boundary=lambda updates: budget.is_due(budget.most_frames(self.totals, updates)),
            request=request,
            change=change,
        )

    def _save(self) -> None:
        best = self.recorder.best_saved()
        metadata = {
            "totals": dataclasses.asdict(self.totals),
            "experiment": redact(self.config["experiment"], stable=True),
            **dataclasses.asdict(self.history),
            "best": None if best is None else dataclasses.asdict(best),
            "changes": self.changes,
        }
        for callback in self.callbacks:
            kind, saved = type(callback).__name__, callback.saved()
            try:
                encode_json(dict(saved))
            except TypeError as error:
                raise ConfigError(f"{kind} saves what is no object of JSON: {error}.") from error
            if repeated := metadata.keys() & saved.keys():
                names = ", ".join(sorted(repeated))
                raise ConfigError(f"{kind} saves {names}, as another part does.")
            metadata |= saved
        with tag_component("checkpointer"):
            self.checkpointer.save(self.totals.updates, self.state, metadata)
        for callback in self.callbacks:
            if type(callback).on_save is not Callback.on_save:
                with tag_component("checkpointer"):
                    self.checkpointer.wait()
                with tag_component("callback"):
                    callback.on_save(self)
        self.times.add("time_save")
        self.watchdog.alive()

    def _sealed(self) -> None:
        with tag_component("callback"):
            for callback in self.callbacks:
                callback.on_seal()

    def _first_state(self, begin: Begin | None) -> tuple[TrainState, Mapping[str, Any]]:
        begin = begin or recorded_begin(self.directory, self.driver)
        if self.is_main:
            seal_json(self.directory / CONFIG, self.config | (begin.entries if begin else {}))
        self.driver.compile_in_thread()  # compiles side by side with that of the initial state
        if begin is None:
            return self.driver.init(self.experiment.key), {}
        state, totals, *saved = begin.first_state(self.driver, self.experiment.key)
        self.recorder.restore(totals)
        # The files of records that a checkpoint of another run seals are in that run's directory.
        return state, {**saved[0], "records": {}} if saved else {}

    def _restored_state(self) -> tuple[TrainState, Mapping[str, Any]] | None:
        """Return the newest checkpoint, None if the run ended before its first save."""
        resume.check_same_environment(self.directory, self.driver.env)
        if not self.checkpointer.has_saved():
            resume.check_may_begin_again(self.directory, self.experiment)
            if self.is_main:
                _LOG.warning("The run ended before its first save, so it begins again.")
            return None
        restored = self.checkpointer.restore(self.driver.abstract_state)
        metadata, state = restored.metadata, restored.state
        resume.check_metadata(metadata)
        resume.check_same_experiment(metadata["experiment"], self.experiment)
        totals, best = resume.Totals(**metadata["totals"]), metadata.get("best")
        self.budget.check_left(metadata["experiment"]["frames"], totals)
        self.history.restore(metadata, self.directory)
        if self.is_main:
            resume.update_config(self.directory, self.config["experiment"])
            if not self.driver.continues_episodes(state):
                _LOG.warning("The environments begin new episodes; all else continues as saved.")
            self.history.warn()
        records = readable_records(self.directory)
        self.recorder.restore(totals, best and resume.Best(**best), records)
        return state, metadata

    def _restore_parts(self, metadata: Mapping[str, Any]) -> None:
        """Go on with the numbers that had changed, and with what the callbacks had saved."""
        if changed := metadata.get("changes"):
            self.change(changed)
            names = ", ".join(name for name, _ in leaves(self.changes))
            _LOG.warning("The run goes on with the numbers that have changed: %s.", names)
        for callback in self.callbacks:
            callback.restore(self, metadata)

    def _stalled(self, message: str) -> None:
        error = StallError(f"{message}: the run in {self.directory} is ended, and can be resumed.")
        self.report_fault(error)
        self.signals.abort(error)

    def report_fault(self, error: Exception) -> None:
        """Write `crash.json`; the loss of a process is not written over the fault that it had."""
        if isinstance(error, PeerLostError) and (self.directory / CRASH).exists():
            return
        last_checkpoint = 0
        with contextlib.suppress(OSError):  # the disk may be at fault
            last_checkpoint = saved_updates(self.directory)
        write_crash(
            self.directory,
            error,
            component=getattr(error, "component", "learner"),
            last_update=self.totals.updates,
            last_checkpoint=last_checkpoint or None,
            experiment=self.config["experiment"],
        )
