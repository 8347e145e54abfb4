"""Callbacks of every run, and those that a user's objects become."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from podracer.devices.mesh import gather_texts
from podracer.drivers.driver import CompileInThread
from podracer.environment import features
from podracer.errors import ConfigError
from podracer.io.attachments import Attachment, MakeAttachment, find_attachments
from podracer.io.entry_points import installed
from podracer.io.jsonl import JsonlSink
from podracer.io.sinks import Sink, Sinks, TensorBoardSink, is_numeric
from podracer.io.text import plain
from podracer.run.errors import tag_component
from podracer.run.loop import Callback, Run, Wish
from podracer.run.result import Boundary
from podracer.run.setup import make_evaluator
from podracer.run.sweep import RECORDS

_LOG = logging.getLogger("podracer")


class Evaluator(Callback):
    """Evaluates where that is due, adds the result to the record, and saves the best one."""

    def check(self, run: Run) -> None:
        if features(env := run.driver.env).shared:
            raise ConfigError(
                f"{env.spec.name} exists once, and training has it: take `evaluations=0`, and "
                "`podracer eval` afterwards."
            )
        self._play = make_evaluator(run.experiment, run.driver)
        self._compile = CompileInThread(self._play.lower)

    def on_start(self, run: Run) -> None:
        with tag_component("evaluator"):
            self._compile(run.state)

    def on_record(self, run: Run, record: dict[str, Any]) -> None:
        progress = run.progress
        if not run.is_due or progress is None or progress.state is None:
            return
        with tag_component("evaluator"):
            program = self._compile(progress.state)
            if not program.done():
                program.result()
                run.times.add("time_compile")
            run.evaluation = self._play(progress.state)
        run.recorder.add_evaluation(run.evaluation, record, progress)
        run.times.add("time_evaluate")
        run.recorder.add_seconds(record, run.times)
        run.watchdog.alive()

    def on_boundary(self, run: Run) -> Wish:
        best = run.recorder.best
        is_best = best is not None and best.updates == run.totals.updates
        return Wish.SAVE if is_best else Wish.NONE


class Writers(Callback):
    """Writes each record: to `metrics.jsonl` and TensorBoard, and to sinks, which have threads."""

    def __init__(self, sinks: Sequence[Sink] = ()) -> None:
        self._given = sinks
        self._sinks, self._pods = Sinks([]), Sinks([])
        self._files: dict[str, JsonlSink] = {}  # files of records, by name
        self._sealed: Mapping[str, Any] = {}  # these files at the restored checkpoint

    def check(self, run: Run) -> None:
        """Refuse what would fail only at the first record."""
        for sink in self._given:
            if isinstance(sink, type) or not callable(getattr(sink, "write", None)):
                raise ConfigError(
                    "a callback is a function of the Boundary, a podracer.Callback, an object with "
                    f"a method `write` for records, or the name of a package's, not {sink!r}."
                )

    def restore(self, run: Run, saved: Mapping[str, Any]) -> None:
        self._sealed = saved["records"]
        for name in self._sealed.keys() & {"metrics.jsonl", RECORDS} if run.is_main else ():
            self._file(run, name)  # cut now: nothing follows where the run is over

    def on_start(self, run: Run) -> None:
        if not run.is_main:
            return
        sinks: list[Sink] = [
            self._file(run, "metrics.jsonl"),
            TensorBoardSink(run.directory / "tensorboard", resume_updates=run.resumed_from),
        ]
        for sink in self._given:
            try:
                if open_sink := getattr(sink, "open", None):
                    open_sink(run.info)
                sinks.append(sink)
            except Exception as error:
                _LOG.warning("a sink could not be opened; the run continues. %r", error)
        self._sinks = run.stack.enter_context(Sinks(sinks))
        if run.driver.num_pods:
            self._pods = run.stack.enter_context(Sinks([self._file(run, RECORDS)]))

    def _file(self, run: Run, name: str) -> JsonlSink:
        """Return the sink of a file of records, which every checkpoint seals."""
        if name not in self._files:
            path, sealed = run.directory / name, self._sealed.get(name)
            self._files[name] = JsonlSink(path, resume_updates=run.resumed_from, sealed=sealed)
            run.stack.callback(self._files[name].close)
        return self._files[name]

    def on_record(self, run: Run, record: dict[str, Any]) -> None:
        if wrong := [name for name, value in record.items() if not is_numeric(plain(value))]:
            raise ConfigError(f"records have numbers, and {wrong[0]!r} of a callback is none.")
        for name, number in run.recorder.numbers.items():
            if record.get(name) is not number:
                raise ConfigError(f"a callback adds to a record, but one has changed its {name!r}.")
        # The pods' first: a record that is missing there could not be written.
        if run.progress is not None and run.progress.pods is not None:
            self._pods.write({"updates": run.progress.updates, **run.progress.pods})
        self._sinks.write(record)

    def saved(self) -> Mapping[str, Any]:
        return {"records": {name: file.seal() for name, file in self._files.items()}}


class Function(Callback):
    """Calls a function of the `Boundary`, which returns what `on_boundary` does."""

    def __init__(self, function: Callable[[Boundary], Any]) -> None:
        self._function = function

    def on_boundary(self, run: Run) -> Wish | bool | None:
        return self._function(run.boundary())


class Control(Callback):
    """Changes numbers of the agent or the environment after each evaluation, see `Run.change`.

    The function of the `Boundary` returns fields to change, as
    `{"agent": {"learning_rate": 1e-4}, "environment": {"wind": 0.5}}`, or None.
    """

    def __init__(self, function: Callable[[Boundary], Mapping[str, Any] | None]) -> None:
        self._function = function

    def check(self, run: Run) -> None:
        if not callable(self._function):
            raise ConfigError(f"control must be a function of a boundary, not {self._function!r}.")
        if run.experiment.pods:
            raise ConfigError("a population is changed by its selection: leave control out.")
        if not run.experiment.evaluations:
            raise ConfigError("control is called after each evaluation: take evaluations above 0.")

    def on_boundary(self, run: Run) -> None:
        if not run.is_due:
            return
        with tag_component("control"):
            fields = self._function(run.boundary())
            if len(set(gather_texts(json.dumps(fields, default=str)))) > 1:
                raise ConfigError("control returned something else in another process of the run.")
            if fields is not None:
                run.change(fields)


class Attached(Callback):
    """Runs an attachment of a package in process 0, see `io.attachments`."""

    def __init__(self, make: MakeAttachment) -> None:
        self._make = make
        self._attachment: Attachment | None = None  # in process 0

    def check(self, run: Run) -> None:
        if jax.process_index() == 0:
            self._attachment = self._make(run.info)

    def on_open(self, run: Run) -> None:
        if self._attachment is not None:
            run.stack.enter_context(self._attachment)

    def on_record(self, run: Run, record: dict[str, Any]) -> None:
        if self._attachment is not None:
            record |= self._attachment.figures()

    def on_seal(self) -> None:
        if self._attachment is not None:
            self._attachment.sealed()


def find_callbacks(names: Sequence[str], directory: Path) -> list[Any]:
    """Return what packages have for each `NAME:ARGUMENT`, with the attachments of a directory.

    Raises `ConfigError` for a name that no installed package has.
    """
    entries, texts = installed("callbacks"), [name.partition(":") for name in names]
    parts = [entries[kind].load()(argument) for kind, _, argument in texts if kind in entries]
    attachments = [name for name in names if name.partition(":")[0] not in entries]
    return [*parts, *map(Attached, find_attachments(attachments, directory))]
