"""Records of measured cases: JSON lines, those of the project and those of a user's folder."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
from collections.abc import Iterable
from pathlib import Path

from benchmarks.reproduce.figure import Record
from podracer.errors import ConfigError
from podracer.io.reading import naming, read_limited

SHIPPED = Path(__file__).parent / "records.jsonl"  # measured by the project


def read_records(path: Path) -> list[Record]:
    """Return the newest record of each case in a file, none if there is no file.

    A torn last line, which a kill leaves, is ignored. Raises `ConfigError` for any other line that
    is not a record.
    """
    newest: dict[tuple[str, str, str], Record] = {}
    lines = read_limited(path).decode().splitlines(keepends=True) if path.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            record = Record(**json.loads(line))
        except (ValueError, TypeError):
            if not line.endswith("\n"):
                break
            raise ConfigError(f"{path}: line {number} is not a record of a figure.") from None
        newest[record.figure, record.scale, record.case] = record
    return list(newest.values())


def append_record(path: Path, record: Record) -> None:
    """Append a record to a file, durably, in the place of a torn line at its end."""
    line = json.dumps(dataclasses.asdict(record)) + "\n"
    with naming(path), path.open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # what another process has written in part is not torn
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(line.encode())
        file.flush()
        os.fsync(file.fileno())


def shown_records(own: Iterable[Record], shipped: Iterable[Record]) -> list[Record]:
    """Return a user's records, and the project's of those figures that he has not measured.

    A user's records and the project's are never mixed within a figure: failures alone give way to
    the project's.
    """
    own = list(own)
    measured = {record.figure for record in own if not record.error}
    kept = [record for record in shipped if record.figure not in measured]
    shown = measured | ({record.figure for record in own} - {record.figure for record in kept})
    return [*(record for record in own if record.figure in shown), *kept]
