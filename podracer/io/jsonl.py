"""Files of records, one JSON object a line, which a resumed run continues to the byte."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from podracer.errors import StorageError
from podracer.io.reading import LARGE_FILE, read_limited
from podracer.io.run_directory import fsync_directory, unused, write_bytes
from podracer.io.seal import retry_reading
from podracer.io.sinks import Record, parse_record
from podracer.io.text import plain

_LOG = logging.getLogger("podracer")


class JsonlSink:
    """Sink that writes one JSON object per line; non-finite values become null.

    The file of a new run must not exist (`FileExistsError`). With `resume_updates` an existing file
    is continued after its records up to that update, which are exactly those that were `sealed`
    with the checkpoint. Otherwise, which a warning says, the readable ones are continued, and the
    file as it was is kept beside it.
    """

    def __init__(
        self,
        path: Path,
        *,
        resume_updates: int | None = None,
        sealed: Mapping[str, Any] | None = None,
    ) -> None:
        content, self._updates = b"", -math.inf
        if resume_updates is not None:
            content, self._updates = _continued(Path(path), resume_updates, sealed)
        self._digest, self._size = hashlib.sha256(content), len(content)
        self._file = open(path, "xb" if resume_updates is None else "ab")  # noqa: SIM115
        fsync_directory(Path(path).parent)

    def write(self, record: Record) -> None:
        """Append a record. Raises `ValueError` if its `updates` is not above the last one."""
        updates = record["updates"]
        if updates is None or updates <= self._updates:
            raise ValueError(f"a record of update {updates} came after that of {self._updates}")
        line = json.dumps(plain(record)).encode() + b"\n"
        try:
            self._file.write(line)
            self._file.flush()
        except OSError as error:
            error.filename = self._file.name  # a run has several such files
            raise
        self._digest.update(line)
        self._size += len(line)
        self._updates = updates

    def seal(self) -> dict[str, Any]:
        """Make all records durable; return their size and SHA-256, which a checkpoint keeps."""
        if not self._file.closed:  # a record that could not be written closes it
            try:
                os.fsync(self._file.fileno())
            except OSError as error:
                _LOG.warning("%s may not survive a power cut: %s", self._file.name, error.strerror)
        return {"size": self._size, "sha256": self._digest.hexdigest()}

    def close(self) -> None:
        self._file.close()


def read_sealed(path: Path, sealed: Mapping[str, Any]) -> bytes | None:
    """Return the records that a checkpoint sealed, however many; None if a file has others."""
    data = read_records(path, sealed["size"])
    is_whole = len(data) == sealed["size"] and hashlib.sha256(data).hexdigest() == sealed["sha256"]
    return data if is_whole else None


def read_records(path: Path, size: int | None = None) -> bytes:
    """Return the content of a file of records, or its first bytes; nothing if there is none.

    Raises `StorageError` if it cannot be read, `CheckpointError` if it is no file of records.
    """
    limit = LARGE_FILE if size is None else size
    try:
        return retry_reading(lambda: read_limited(path, limit, cut=size is not None))
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error


def _continued(path: Path, updates: int, sealed: Mapping[str, Any] | None) -> tuple[bytes, float]:
    """Cut a file of records back to an update, atomically; return what is left and its update."""
    if path.is_fifo():
        raise StorageError(f"{path} is a pipe, not a file.")
    records = None if sealed is None else read_sealed(path, sealed)
    if records is not None:
        last = _readable(records[records.rfind(b"\n", 0, -1) + 1 :], updates)[1]
    else:
        data = read_records(path)
        records, last, is_sound = _readable(data, updates)
        if sealed is not None or not is_sound:
            copy = unused(path.with_name(f"{path.name}.damaged"))
            write_bytes(copy, data)
            outcome = f"the readable records are continued, and it is kept as {copy.name}."
            _LOG.warning("%s is not as it was at update %d: %s", path, updates, outcome)
    write_bytes(path, records)
    return records, last


def _readable(data: bytes, updates: int) -> tuple[bytes, float, bool]:
    """Return the increasing records up to an update, the last one's, and whether all are sound."""
    lines, last, is_sound = [], -math.inf, True
    for line in data.splitlines(keepends=True):
        record = parse_record(line)
        count = None if record is None else record.get("updates")
        if isinstance(count, int) and last < count <= updates:
            lines.append(line.rstrip(b"\n") + b"\n")
            last = count
        elif line.endswith(b"\n"):  # not torn
            is_sound = is_sound and isinstance(count, int) and count > updates
    return b"".join(lines), last, is_sound
