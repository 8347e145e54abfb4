"""The index of a leaderboard: its entries for SQL queries, and how long its log must be.

`DIR/leaderboard.sqlite` follows the log and is rebuilt from it whenever it is damaged; no decision
depends on it. As it is written after the log, a log that holds less than it has lost lines.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import sqlite3
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path

from podracer.errors import CheckpointError
from podracer.io.directories import LOG
from podracer.tournament.events import Entry

INDEX = "leaderboard.sqlite"

_COLUMNS = [field.name for field in dataclasses.fields(Entry)]
_INSERT = f"INSERT INTO entries VALUES (?{', ?' * len(_COLUMNS)})"


class Index:
    """Writer of a new index, which replaces the one in the directory.

    Its view `board` shows the best entries, at most `size`.
    """

    def __init__(self, directory: Path, size: int) -> None:
        path = directory / INDEX
        for old in (path, path.with_name(f"{INDEX}-journal")):
            old.unlink(missing_ok=True)
        path.touch(stat.S_IMODE((directory / LOG).stat().st_mode))  # whose secrets it has
        self._connection = sqlite3.connect(path, timeout=1.0)
        self._connection.execute("PRAGMA synchronous = OFF")  # it is rebuilt from the log
        with self._connection:
            self._connection.execute("BEGIN")
            self._connection.execute(
                f"CREATE TABLE entries (id PRIMARY KEY, {', '.join(_COLUMNS)})"
            )
            self._connection.execute("CREATE TABLE log (events, checksum, sha256)")
            self._connection.execute("INSERT INTO log VALUES (0, '', '')")
            self._connection.execute(
                "CREATE VIEW board AS SELECT * FROM entries "
                f"ORDER BY score DESC, frames, pod, round LIMIT {size:d}"
            )

    def add(self, entries: Iterable[Entry], events: int, checksum: str) -> None:
        """Add entries, and note the log's number of events and the checksum of the last one.

        Raises `sqlite3.Error` if the file is damaged, or locked by a reader.
        """
        with self._connection:
            for entry in entries:
                values = [getattr(entry, name) for name in _COLUMNS]
                texts = (json.dumps(x) if isinstance(x, dict | tuple) else x for x in values)
                self._connection.execute(_INSERT, [entry.id, *texts])
            self._connection.execute(
                "UPDATE log SET events = ?, checksum = ?, sha256 = ?",
                (events, checksum, _seal(events, checksum)),
            )

    def close(self) -> None:
        self._connection.close()


def read_length(directory: Path) -> tuple[int, str]:
    """Return the number of events that the index has noted and the checksum of the last one.

    They are 0 and "" if there is no index, or a damaged one.
    """
    uri = f"{(directory / INDEX).absolute().as_uri()}?mode=ro"
    with contextlib.suppress(sqlite3.Error, TypeError, ValueError):
        with contextlib.closing(sqlite3.connect(uri, uri=True, timeout=1.0)) as connection:
            events, checksum, sha256 = connection.execute("SELECT * FROM log").fetchone()
        if sha256 == _seal(events, checksum):
            return events, checksum
    return 0, ""


def check_length(log: Path, checksums: Sequence[str], length: tuple[int, str]) -> None:
    """Raise `CheckpointError` if a log with these checksums is not as long as the index says."""
    events, checksum = length
    if events and checksums[events - 1 : events] != [checksum]:
        raise CheckpointError(
            f"{log} holds {len(checksums)} events, but not all of the {events} that {INDEX} has "
            f"noted: it was cut or replaced. Restore it from a copy, or delete {INDEX} to go on "
            "with what is left."
        )


def _seal(events: int, checksum: str) -> str:
    return hashlib.sha256(f"{events} {checksum}".encode()).hexdigest()
