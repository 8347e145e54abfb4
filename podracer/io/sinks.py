"""Sinks of a run's records: `metrics.jsonl`, TensorBoard, the terminal, or a user's own.

A record is a flat dictionary, one for each logged chunk, with a strictly increasing `updates`.
The JSON lines are written synchronously. Every other sink runs behind a bounded queue on its own
thread: one that raises or blocks loses its output and never stops the run.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from podracer.errors import StorageError
from podracer.io.reading import parse_object, read_lines

Record = Mapping[str, Any]
TASK_REWARD = "reward_"  # prefix of the metric `reward_TASK`, the mean reward of a step in a task
PARENT, HYPERPARAMETER = "parent", "hyperparameter_"  # in records of pods: a name, a prefix

_LOG = logging.getLogger("podracer")
_RUN_KEYS = frozenset({"updates", "frames", "seconds", "frames_per_second", "episodes"})
_SEBULBA_KEYS = frozenset({
    "lag_mean", "lag_max", "queue_occupancy", "actor_idle", "learner_idle",
    "steps_collected", "steps_learned", "steps_in_flight", "steps_dropped", "emulator_frames",
})  # fmt: skip
_SEBULBA_PREFIXES = ("actor_time_", "learner_time_", "environment_faults")


class Sink(Protocol):
    """Receiver of records, called from one thread until it is closed.

    It may have a method `open`, which is called before that with the `RunInfo`, and it may lack
    `close`. A sink that needs long to close, such as one that sends its records elsewhere, says so
    by an attribute `close_seconds`.
    """

    def write(self, record: Record) -> None: ...

    def close(self) -> None: ...


def group(key: str) -> str:
    """Return the category of a metric.

    It is run, episode, evaluation, time, mirror, machine, sebulba or learn. `sebulba` holds policy
    lag, queue occupancy and idle shares; `learn` holds the agent's metrics.
    """
    if key in _RUN_KEYS:
        return "run"
    if key in _SEBULBA_KEYS or key.startswith(_SEBULBA_PREFIXES):
        return "sebulba"
    prefix = key.partition("_")[0]
    return prefix if prefix in ("episode", "evaluation", "time", "mirror", "machine") else "learn"


def scalars(record: Record) -> dict[str, float]:
    """Return the numbers of a record but `updates`, named `group/metric` as trackers show them."""
    return {
        f"{group(key)}/{key.removeprefix(group(key) + '_')}": value
        for key, value in record.items()
        if isinstance(value, int | float) and key != "updates"
    }


def vectors(record: Record) -> dict[str, Any]:
    """Return the arrays `[n]` of a record of one run, named as `scalars` names numbers."""
    return {f"{group(key)}/{key}": x for key, x in record.items() if getattr(x, "ndim", 0) == 1}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return all records of a `metrics.jsonl`, oldest first, without a torn last line.

    There are none where there is no file.
    Raises `StorageError` for any other line that is not a record: an object of numbers, lists of
    numbers and nulls.
    """
    records = []
    lines = read_lines(path) if os.path.exists(path) else ()
    for number, line in enumerate(lines, 1):
        if (record := parse_record(line)) is not None:
            records.append(record)
        elif line.endswith(b"\n"):
            raise StorageError(f"{path}: line {number} is not a record of numbers.")
    return records


def parse_record(line: bytes) -> dict[str, Any] | None:
    """Return the record in a line, None if it is none."""
    record = parse_object(line)
    return record if record and all(map(is_numeric, record.values())) else None


def is_numeric(value: Any) -> bool:
    """Return whether a value of JSON may stand in a record: a number, null, or a list of them."""
    if isinstance(value, list):
        return all(map(is_numeric, value))
    if isinstance(value, int):  # what numpy cannot hold would end a report
        return abs(value) < 2**63
    return value is None or isinstance(value, float)


class TensorBoardSink:
    """Sink that writes scalars over updates to a TensorBoard event file, named `group/metric`.

    Metrics of several numbers become histograms of those that are finite.
    After a resume TensorBoard ignores records of earlier files after `resume_updates`. The file
    is opened by the first record, so that a slow or full disk only affects the sink's own thread.
    """

    def __init__(self, directory: Path, *, resume_updates: int | None = None) -> None:
        self._directory = Path(directory)
        self._resume_updates = resume_updates
        self._file: Any = None

    def write(self, record: Record) -> None:
        from tensorboardX.proto.event_pb2 import Event  # type: ignore[attr-defined]
        from tensorboardX.proto.summary_pb2 import Summary  # type: ignore[attr-defined]

        self._file = self._file or self._open()
        values = [
            Summary.Value(tag=name, simple_value=value) for name, value in scalars(record).items()
        ]
        for name, array in vectors(record).items():
            from tensorboardX.summary import histogram

            if (finite := array[abs(array) < math.inf]).size:
                # "auto" of older NumPy takes billions of bins where one value is far off.
                values += histogram(name, finite, "sturges").value
        step = int(record["updates"] or 0)
        self._file.write_event(
            Event(wall_time=time.time(), step=step, summary=Summary(value=values))
        )
        self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _open(self) -> Any:
        # tensorboardX's own SummaryWriter hides faults of the disk in a thread of its own.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog  # type: ignore[attr-defined]

        from podracer.io.run_directory import own_directory

        own_directory(self._directory)
        resumed = self._resume_updates
        # File names count in seconds: a resume within one must not overwrite its predecessor.
        suffix = "" if resumed is None else f".{resumed}"
        file = EventsWriter(str(self._directory / "events"), suffix)
        if resumed is not None:
            start = SessionLog(status=SessionLog.START)
            file.write_event(Event(wall_time=time.time(), step=resumed + 1, session_log=start))
        return file


class Sinks(contextlib.AbstractContextManager["Sinks"]):
    """All sinks of a run. The first is written by the caller; the others have a thread each.

    Each background sink has a queue of `queue_size` records that drops its oldest when full. A sink
    that raises is removed with one warning. Leaving the context closes all sinks within
    `close_seconds`, or those of the sink; one that is still busy then is abandoned with a warning.
    """

    def __init__(
        self, sinks: Sequence[Sink], *, queue_size: int = 1024, close_seconds: float = 5.0
    ) -> None:
        self._record: Sink | None = sinks[0] if sinks else None
        self._workers = [_Worker(sink, queue_size, close_seconds) for sink in sinks[1:]]

    def write(self, record: Record) -> None:
        """Pass a record to every sink; never raise an error of a sink, never wait for one."""
        if self._record is not None:
            try:
                self._record.write(record)
            except Exception as error:
                _warn_dropped(self._record, error)
                with contextlib.suppress(Exception):
                    self._record.close()
                self._record = None
        for worker in self._workers:
            worker.put(record)

    def __exit__(self, *_: object) -> None:
        """Flush and close every sink."""
        start = time.monotonic()
        for worker in self._workers:
            worker.finish()
        if self._record is not None:
            try:
                self._record.close()
            except Exception as error:
                _warn_dropped(self._record, error)
        for worker in self._workers:
            worker.join(start + worker.close_seconds)


class _Worker:
    """Thread of one sink, behind a queue whose `put` never waits and drops the oldest record."""

    def __init__(self, sink: Sink, queue_size: int, close_seconds: float) -> None:
        self.close_seconds = getattr(sink, "close_seconds", close_seconds)
        self.dropped = 0
        self._sink, self._size, self._failed = sink, queue_size, False
        self._records = queue.SimpleQueue[Record | None]()  # None is the end
        self._thread = threading.Thread(target=self._run, name=_name(sink), daemon=True)
        self._thread.start()

    def put(self, record: Record) -> None:
        if self._failed:
            return
        if self._records.qsize() >= self._size:
            with contextlib.suppress(queue.Empty):  # the thread has just taken it
                self._records.get_nowait()
                self.dropped += 1
        self._records.put(dict(record))

    def finish(self) -> None:
        self._records.put(None)

    def join(self, deadline: float) -> None:
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            _LOG.warning("%s did not finish in time and was left behind.", _name(self._sink))
        if self.dropped:
            _LOG.warning("%s was too slow for %d records.", _name(self._sink), self.dropped)

    def _run(self) -> None:
        try:
            while (record := self._records.get()) is not None:
                self._sink.write(record)
        except BaseException as error:  # SystemExit, too, which ends a thread without a word
            self._failed = True
            _warn_dropped(self._sink, error)
        try:
            getattr(self._sink, "close", lambda: None)()
        except BaseException as error:
            if not self._failed:
                _warn_dropped(self._sink, error)


def _name(sink: Sink) -> str:
    return type(sink).__name__


def _warn_dropped(sink: Sink, error: BaseException) -> None:
    _LOG.warning(
        "%s failed and gets no more records; the run continues. %s: %s",
        _name(sink), type(error).__name__, error,
    )  # fmt: skip
