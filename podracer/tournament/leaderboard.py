"""The leaderboard: an append-only log of events, and the state that follows from it.

    leaderboard.jsonl --read_events--> events --state_after--> TournamentState, with the leaderboard

`DIR/leaderboard.jsonl` is the source of truth. Each line is one event, synced to disk before it is
acknowledged, and ends with a checksum over itself and the previous line: damage is reported with
its line number; a torn last line was never acknowledged and is cut off. `DIR/length.json` has the
number of lines and is written after the log: a log that holds fewer has lost some.

One process writes, under `DIR/lock`; any process may read at any time. The meaning of the events is
in `events.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import math
import os
import re
import shutil
import threading
import time
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from podracer.errors import CheckpointError, ConfigError, PodracerError
from podracer.io.differences import differences
from podracer.io.directories import LOG
from podracer.io.paths import user_path
from podracer.io.reading import MALFORMED, naming, read_lines
from podracer.io.run_directory import RunLock, fsync_directory
from podracer.io.seal import encode_sealed, read_sealed_json
from podracer.io.steps import CHECKPOINTS, check_holds_no_run
from podracer.io.text import mode_of
from podracer.tournament import events

LENGTH = "length.json"
_SHA256 = re.compile(r"[0-9a-f]{64}")


# --- the log --------------------------------------------------------------------------------------


def read_events(directory: Path) -> list[events.Event]:
    """Read the events of a tournament, which may still be running.

    Raises `ConfigError` if there is none or another version wrote it, `CheckpointError` if a line
    is damaged or missing.
    """
    path = user_path(directory) / LOG
    if not path.is_file():
        raise ConfigError(
            f"{directory} holds no tournament and no sweep: there is no {LOG} in it. To compare "
            "runs: podracer report RUN RUN."
        )
    length = _read_length(path.parent)  # before the log, which may be growing
    history, checksums, _ = read_log(path)
    _check_length(path, checksums, length)
    if not history:
        raise ConfigError(f"{directory} holds no tournament yet: {LOG} is empty.")
    return history


def read_log(
    path: Path, lines: Iterable[bytes] | None = None
) -> tuple[list[events.Event], list[str], int]:
    """Read the events, their checksums, and the number of bytes they take.

    `lines` are those that the file is going to have.
    """
    history, checksums = list[events.Event](), list[str]()
    size = 0
    for number, line in enumerate(read_lines(path) if lines is None else lines, 1):
        if not line.endswith(b"\n"):
            break  # torn: its writer was killed before it was acknowledged
        try:
            fields = json.loads(line)
            del fields["sha256"]
            expected, checksum = encode_line(fields, checksums[-1] if checksums else "")
            if line != expected:
                raise ValueError
            history.append(_decode(fields))
            checksums.append(checksum)
        except MALFORMED:
            raise CheckpointError(
                f"{path}: line {number} is damaged, so this and all that follows cannot be "
                "trusted; restore the file from a copy"
            ) from None
        size += len(line)
    return history, checksums, size


def _read_length(directory: Path) -> tuple[int, str]:
    """Return the number of events that were noted and the checksum of the last one.

    They are 0 and "" if nothing was noted, or if the file is damaged.
    """
    with contextlib.suppress(PodracerError, *MALFORMED):
        noted = read_sealed_json(directory / LENGTH)
        return int(noted["events"]), str(noted["checksum"])
    return 0, ""


def _check_length(log: Path, checksums: list[str], length: tuple[int, str]) -> None:
    """Raise `CheckpointError` if a log with these checksums is not as long as was noted."""
    events, checksum = length
    if events and checksums[events - 1 : events] != [checksum]:
        raise CheckpointError(
            f"{log} holds {len(checksums)} events, but not all of the {events} that {LENGTH} has "
            f"noted: it was cut or replaced. Restore it from a copy, or delete {LENGTH} to go on "
            "with what is left."
        )


def _fields(event: events.Event) -> dict[str, Any]:
    return {"event": type(event).__name__.lower(), **vars(event)}


def encode_line(fields: Mapping[str, Any], previous_checksum: str) -> tuple[bytes, str]:
    """Encode a line canonically, with the checksum that chains it to the previous line."""
    text = json.dumps(fields, allow_nan=False)
    checksum = hashlib.sha256((previous_checksum + text).encode()).hexdigest()[:16]
    return (json.dumps({**fields, "sha256": checksum}) + "\n").encode(), checksum


def _decode(fields: Mapping[str, Any]) -> events.Event:
    if fields["event"] == "header" and fields["format"] != events.FORMAT:
        raise ConfigError(
            f"the tournament has format {fields['format']}, this version reads {events.FORMAT}: "
            "use the version that wrote it."
        )
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items() if k != "event"}
    return events.EVENTS[fields["event"]](**values)


# --- the writer -----------------------------------------------------------------------------------


class Leaderboard(contextlib.AbstractContextManager["Leaderboard"]):
    """The single writer of a tournament's log; a context manager, for one thread.

    A `header` begins a new tournament, or must equal the header in `directory`; without a
    header the tournament must exist. Once a method has returned, its effect survives any kill. If a
    write fails, `OSError` is raised and nothing has changed.

    Raises `ConfigError` if another process writes, if there is no tournament, a different one or
    a run; `CheckpointError` if the log is damaged.
    """

    def __init__(self, directory: Path, header: events.Header | None = None) -> None:
        self.directory = user_path(directory).resolve()
        check = read_events if header is None else check_holds_no_run
        if header is not None:
            try:  # before a file is made
                encode_line(_fields(header), "")
            except ValueError as error:
                raise ConfigError(
                    "a tournament takes finite numbers only, also in the agents of its recipes, as "
                    f"its log can hold no others ({error})."
                ) from error
        with contextlib.ExitStack() as stack:
            stack.enter_context(RunLock(self.directory, partial(check, self.directory)))
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(self.directory / LOG, flags, mode_of(header and header.tournament))
            self._file = stack.enter_context(open(descriptor, "r+b", buffering=0))
            fsync_directory(self.directory)
            history, checksums, self._size = read_log(self.directory / LOG)
            _check_length(self.directory / LOG, checksums, _read_length(self.directory))
            self._checksum = checksums[-1] if checksums else ""
            self._epoch = max([time.time(), *(e.time for e in history[-1:])]) - time.monotonic()
            if not history and header is not None:
                history = [self.append(header)]
            self.state = events.state_after(history)
            if header is not None:
                _check_same(self.state.header, header)
            names = {entry.checkpoint for entry in events.accepted_entries(history).values()}
            self._existing = {name for name in names if os.path.lexists(self.directory / name)}
            self._with_others = set(self._existing)  # perhaps beside earlier steps
            self._lock, self._copied = threading.Lock(), set[str]()  # see `snapshot`
            self._note_length()
            self._stack = stack.pop_all()

    def start(
        self,
        pod: int,
        round: int,
        *,
        parents: tuple[str, ...] = (),
        hyperparameters: Mapping[str, float],
        experiment: Mapping[str, Any],
    ) -> events.Started:
        """Begin an attempt at a round; reports of the pod's earlier attempts are then refused.

        For a retry pass the fields of the pod's last `attempt` again. Rounds may be skipped, never
        repeated. Raises `ValueError` for a round that has ended, a quarantined pod, and a parent
        that `find_entry` does not return.
        """
        pod_state = self.state.pod(pod)
        if pod_state.status == "quarantined" or round < pod_state.round:
            raise ValueError(
                f"pod {pod} ({pod_state.status}, round {pod_state.round}) cannot start {round}"
            )
        for entry_id in parents:
            events.find_entry(self.state, pod, entry_id)
        token = self.state.events
        self.record(events.Started(pod, round, token, tuple(parents), hyperparameters, experiment))
        attempt = self.state.pods[pod].attempt
        assert attempt is not None
        return attempt

    def submit(self, report: events.Submitted) -> str | None:
        """End a round. Returns None if the report is accepted, else the reason for refusing it.

        A repeated report counts once. The checkpoint must be complete and synced.
        """
        newest = self.state.pod(report.pod).newest
        if newest and (newest.round, newest.token) == (report.round, report.token):
            return None
        reason = _unusable(report, self.state.header) or self._misplaced(report)
        return self._end(report, reason)

    def fail(self, failure: events.Failed) -> str | None:
        """End an attempt without a report. Returns as `submit` does."""
        return self._end(failure, None)

    def _end(self, event: events.Submitted | events.Failed, reason: str | None) -> str | None:
        """Record the end of an attempt, or that it is refused; return the reason for that."""
        pod, attempt = self.state.pod(event.pod), (event.pod, event.round, event.token)
        current = pod.attempt if pod.status == "running" else None
        if current is None or (current.pod, current.round, current.token) != attempt:
            reason = f"attempt {event.token} at round {event.round} is not the current one"
        self.record(events.Rejected(*attempt, reason) if reason else event)
        return reason

    def release(self, pod: int) -> None:
        """Let a quarantined pod start again. Raises `ConfigError` if it is none, or cannot."""
        pod_state = self.state.pods.get(pod)
        if pod_state is None or pod_state.status != "quarantined":
            quarantined = [n for n, x in self.state.pods.items() if x.status == "quarantined"]
            names = ", ".join(map(str, quarantined)) or "there are none"
            raise ConfigError(f"pod {pod} is not quarantined; quarantined pods: {names}.")
        for entry in pod_state.entries:
            if not os.path.lexists(self.directory / entry.checkpoint):
                raise ConfigError(
                    f"pod {pod} cannot be released: the checkpoint of {entry.id}, which it "
                    "continues, is gone."
                )
        self.record(events.Released(pod))

    def collect_garbage(self) -> tuple[str, ...]:
        """Delete the checkpoints that no pod can start from any more; return those that are gone.

        Those of a `snapshot` stay. Other checkpoints of a round, from before the one of its entry,
        go with the first call. They can never be referenced again, so an interrupted deletion is
        harmless and the next call completes it.
        """
        with self._lock:
            names = sorted(self._existing - self._kept() - self._copied)
            for name in names:
                if _is_inside(self.directory, name):
                    shutil.rmtree(self.directory / name, ignore_errors=True)
            for checkpoint in (self.directory / name for name in self._with_others):
                if checkpoint.parent.name != CHECKPOINTS:
                    continue
                for path in checkpoint.parent.glob("[0-9]*"):  # earlier steps
                    name = path.relative_to(self.directory).as_posix()
                    if path != checkpoint and _is_inside(self.directory, name):
                        shutil.rmtree(path, ignore_errors=True)
            self._with_others.clear()
            deleted = [n for n in names if not os.path.lexists(self.directory / n)]
            self._existing.difference_update(deleted)
            return tuple(deleted)

    def _kept(self) -> set[str]:
        """Return the checkpoints that a pod may need."""
        return {entry.checkpoint for entry in events.kept_entries(self.state)}

    def snapshot(self) -> tuple[events.TournamentState, int]:
        """Return the state and the bytes of the log that has led to it, from any thread.

        The checkpoints that this state needs are kept until the next call, so that they can be
        copied.
        """
        with self._lock:
            self._copied = self._kept()
            return self.state, self._size

    def close(self) -> None:
        """Release the lock, so that another process may write."""
        self._stack.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def record(self, event: events.Event) -> None:
        """Append an event that needs no check."""
        with self._lock:
            # The written event is applied, so a replay cannot differ.
            self.state = events.apply_event(self.state, self.append(event))
            is_entry = isinstance(event, events.Submitted)
            entry = self.state.pods[event.pod].newest if is_entry else None
            if entry is not None:
                self._existing.add(entry.checkpoint)
                self._with_others.add(entry.checkpoint)
            self._note_length()

    def append(self, event: events.Event) -> events.Event:
        """Write an event to the log, durably; return it with its time, as it is read back."""
        event = dataclasses.replace(event, time=self._epoch + time.monotonic())  # never back
        line, checksum = encode_line(_fields(event), self._checksum)
        self._file.truncate(self._size)  # remains of an earlier call that failed
        self._file.seek(self._size)
        try:
            with naming(self.directory / LOG):
                if self._file.write(line) != len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(self._file.fileno())
        except OSError:
            with contextlib.suppress(OSError):  # else the next one that reads it finds the event
                self._file.truncate(self._size)
            raise
        self._checksum, self._size = checksum, self._size + len(line)
        return _decode({k: v for k, v in json.loads(line).items() if k != "sha256"})

    def _misplaced(self, report: events.Submitted) -> str | None:
        if not _is_inside(self.directory, name := report.checkpoint):
            return f"the checkpoint {name[:200]!r} is not a directory inside the tournament's"
        # One round, one directory: to delete or overwrite one must not touch another.
        expected = f"pods/p{report.pod}r{report.round}/{CHECKPOINTS}"
        is_of_round = str(PurePosixPath(name).parent) == expected
        return None if is_of_round else f"the checkpoint {name!r} is not in {expected}"

    def _note_length(self) -> None:
        noted = {"events": self.state.events, "checksum": self._checksum}
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
        with contextlib.suppress(OSError):  # the event is in the log, and the next one tries again
            descriptor = os.open(self.directory / LENGTH, flags, 0o644)
            with open(descriptor, "wb") as file:
                file.write(encode_sealed(noted))


def _check_same(saved: events.Header, header: events.Header) -> None:
    from podracer.config.serialization import of_this_version  # slow, but whoever begins has it

    fields = of_this_version(json.loads(json.dumps(dataclasses.asdict(header))))
    saved_fields = of_this_version(dataclasses.asdict(saved))
    changed = [
        f"{name} was {old} and is {new}"
        for name, (old, new) in differences(saved_fields, fields).items()
        if name != "time"
    ]
    if changed:
        raise ConfigError(
            "another tournament is in this directory, or one of another version: "
            f"{'; '.join(changed)}."
        )


def _unusable(report: events.Submitted, header: events.Header) -> str | None:
    """Return why a score cannot be ranked, or None."""
    if not (math.isfinite(report.score) and math.isfinite(report.standard_error)):
        return f"the score is {report.score}, with a standard error of {report.standard_error}"
    if report.episodes < header.episodes:
        return f"it was evaluated in {report.episodes} episodes, not {header.episodes} or more"
    if report.evaluation != header.evaluation:
        return f"the evaluation was {report.evaluation!r}, not {header.evaluation!r}"
    if not 0 <= report.frames < 2**63 or not 0 <= report.seconds < math.inf:
        return f"it took {report.frames} frames and {report.seconds} seconds"
    if not _SHA256.fullmatch(report.digest):
        return f"the digest {report.digest[:80]!r} is not a SHA-256 in hexadecimal"
    return None


def _is_inside(directory: Path, name: str) -> bool:
    """Return whether a relative path is canonical and leads to a directory below, without links."""
    path = directory / name
    if not os.path.isdir(path) or os.path.isabs(name) or PurePosixPath(name).as_posix() != name:
        return False
    return path != directory and path.resolve() == path
