"""Scores in `results/suite.jsonl`: one JSON object for each seed of each contender.

A contender is `task/library/agent`. A score is the mean return of the last evaluation; `curve` has
the mean returns of all evaluations as pairs `[frames, return]`. Seconds are a seed's share of the
whole process, with its start and compilation. `configuration` is a digest of the settings.
`distinct_episodes` differ in return, length or actions, those of other libraries in the first two.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from machine import processor

SUITE = Path(__file__).parent / "results" / "suite.jsonl"
ROOT = Path(__file__).parents[1]
Row = dict[str, Any]


def read(path: Path = SUITE) -> list[Row]:
    """Return all rows, oldest first."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append(path: Path, rows: Iterable[Row]) -> None:
    """Add rows, each with the machine and the commit of the code that was measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for row in rows:
            file.write(json.dumps({**row, **_machine()}) + "\n")


def name_of(row: Row) -> str:
    return f"{row['task']}/{row['library']}/{row['agent']}"


def newest(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return each contender's rows of the configuration that was measured last, by seed."""
    last = {name_of(row): row["configuration"] for row in rows}
    groups: dict[str, dict[int, Row]] = {}
    for row in rows:
        if row["configuration"] == last[name_of(row)]:
            groups.setdefault(name_of(row), {})[row["seed"]] = row
    return {name: [group[seed] for seed in sorted(group)] for name, group in groups.items()}


def quiet(rows: Sequence[Row]) -> list[Row]:
    """Return the rows whose seconds count: the machine had no more to do than this at their end."""
    return [row for row in rows if row["load"] <= row["processors"] + 0.5]


def missing(rows: Sequence[Row], name: str, configuration: str, seeds: Sequence[int]) -> list[int]:
    """Return the seeds of a contender that have no row with this configuration."""
    finished = {
        row["seed"]
        for row in rows
        if name_of(row) == name and row["configuration"] == configuration
    }
    return [seed for seed in seeds if seed not in finished]


def _machine() -> dict[str, Any]:
    return {
        "machine": f"{os.cpu_count()} x {processor()}",
        "processors": os.cpu_count(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "commit": commit(),
    }


def commit() -> str:
    """Return the commit of the checkout, `-dirty` if the library differs from it."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    return git("rev-parse", "HEAD") + ("-dirty" if git("status", "-s", "--", "podracer") else "")
