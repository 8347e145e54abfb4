"""Reading of files that somebody else writes at the same time, without a trace in them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from podracer.io.edits import open_file
from podracer.io.sinks import PARENT, parse_record

KEPT_RECORDS = 4000  # records of a file, at least, once it has more
_LONGEST_LINE = 2**24  # bytes


def signature(path: Path) -> tuple[int, ...]:
    """Return what changes when a file does; nothing if there is none."""
    try:
        status = os.lstat(path)
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


class Tail:
    """Records of a file that grows, of which only what is new is read.

    Of a long file some are left out, evenly, but none with an evaluation or a selection and not the
    last one. A file that was replaced, as by a resumed run, is read anew.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begin_anew(None)

    @property
    def records(self) -> list[dict[str, Any]]:
        """Records, oldest first."""
        return [record for _, record in self._kept] + self._last

    def update(self) -> None:
        """Read the whole lines that are new."""
        try:
            file = open_file(self._path)
        except OSError:
            self._begin_anew(None)
            return
        with file:
            status = os.fstat(file.fileno())
            if self._inode != status.st_ino or status.st_size < self._size:
                self._begin_anew(status.st_ino)
            file.seek(self._size)
            while line := file.readline(_LONGEST_LINE):
                is_whole = line.endswith(b"\n")
                if not is_whole and len(line) < _LONGEST_LINE:
                    break  # it is being written
                self._size += len(line)
                record = parse_record(line)
                if record is None:
                    self.unreadable += 1
                else:
                    self._add(record)

    def _begin_anew(self, inode: int | None) -> None:
        self._inode, self._size = inode, 0
        self._stride, self._count, self._most = 1, 0, 2 * KEPT_RECORDS
        self._kept: list[tuple[int, dict[str, Any]]] = []  # with their numbers
        self._last: list[dict[str, Any]] = []  # one that is not kept
        self.unreadable = 0  # lines that are no records

    def _add(self, record: dict[str, Any]) -> None:
        entry = (self._count, record)
        self._count += 1
        self._last = [] if self._stays(entry) else [record]
        if self._stays(entry):
            self._kept.append(entry)
        if len(self._kept) > self._most:
            self._stride *= 2
            self._kept = [entry for entry in self._kept if self._stays(entry)]
            self._most = len(self._kept) + KEPT_RECORDS

    def _stays(self, entry: tuple[int, dict[str, Any]]) -> bool:
        number, record = entry
        return number % self._stride == 0 or "evaluation_return" in record or PARENT in record
