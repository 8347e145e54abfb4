"""Reports: what the attempt at a round hands in, or why it has ended without."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

from podracer.errors import PodracerError
from podracer.io.exits import how_killed
from podracer.io.json_schema import count, unsound_fields
from podracer.io.reading import LARGE_FILE, read_limited
from podracer.io.text import redact
from podracer.tournament.events import Submitted

REPORT = "report.json"

_KINDS = {"int": count, "float": float, "str": str}
_OF_THE_ENGINE = ("pod", "round", "evaluation", "time")  # fields of `Submitted`
_SCHEMA = {
    field.name: _KINDS[str(field.type)]
    for field in dataclasses.fields(Submitted)
    if field.name not in _OF_THE_ENGINE
}


def read_report(directory: Path, token: int) -> dict[str, Any] | None:
    """Return the report of the attempt, or None if it is missing or belongs to another attempt.

    Raises `PodracerError` if it is damaged.
    """
    try:
        report = json.loads(read_limited(directory / REPORT))
    except OSError:
        return None
    except (ValueError, RecursionError) as error:
        raise PodracerError(f"its {REPORT} is damaged: {error}") from error
    if not isinstance(report, dict) or report.get("token") != token:
        return None
    report = {"unfinished": 0, **report}
    if damaged := unsound_fields(report, _SCHEMA):
        fields = ", ".join(map(repr, damaged))[:200]
        raise PodracerError(
            f"its {REPORT} is damaged: {fields} missing, unknown or of another type"
        )
    return report


def reason_of_failure(directory: Path, code: int) -> str:
    """Return in one line why the attempt of a `task.json` ended without a report."""
    if code < 0:
        return f"killed by {how_killed(-code)}"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, PodracerError):
        path, task = directory / "crash.json", directory / "task.json"
        if path.stat().st_mtime_ns >= task.stat().st_mtime_ns:  # not an earlier attempt's
            crash = json.loads(read_limited(path))
            return f"exit code {code}: {crash['message']}"[:500]
    line = last_line(directory / "log.txt").removeprefix("podracer: ")
    return f"exit code {code}: {line}"[:500] if line else f"exit code {code}"


def last_line(log: Path) -> str:
    """Return the last line of a process's output, "" if it has none or cannot be read."""
    with contextlib.suppress(OSError, IndexError, PodracerError):
        text = read_limited(log, LARGE_FILE).decode(errors="replace")
        return redact(text.strip().splitlines()[-1])[:500]
    return ""
