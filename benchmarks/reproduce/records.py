"""Records of measured cases: JSON lines, those of the project and those of a user's folder."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.reproduce.figure import Record
from podracer.errors import ConfigError
from podracer.io.reading import naming, read_limited

SHIPPED = Path(__file__).parent / "records.jsonl"  # measured by the project
RESULTS = Path(__file__).parents[1] / "results"
_COMMANDS_KERNELS = "--xla_gpu_deterministic_ops=true"


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


def project_records() -> list[Record]:
    """Return what the project measured: by the figures' commands and by other benchmarks."""
    suite, accelerator = (RESULTS / name for name in ("suite.jsonl", "accelerator.jsonl"))
    return [*read_records(SHIPPED), *suite_records(suite), *accelerator_records(accelerator)]


def suite_records(path: Path) -> list[Record]:
    """Return the newest scores of `results_suite.py` that are cases of figures."""
    newest: dict[tuple[str, str], Record] = {}
    for row in map(json.loads, path.read_text().splitlines()):
        figure, case = _SCORES.get((row["task"], row["library"], row["agent"]), ("", ""))
        if figure:
            record = _of_suite(row, figure, case.format(row["seed"]))
            newest[figure, record.case] = record
    return list(newest.values())


_SCORES = {("pong", "podracer", "impala"): ("impala", "pong-{}")}  # figure and case of a seed


def _of_suite(row: dict[str, Any], figure: str, case: str) -> Record:
    frames, returns = zip(*row["curve"], strict=True)
    context = {name: row[name] for name in ("machine", "commit", "seconds")}
    context |= {"cores": row["processors"], "jax": row["versions"]["jax"]}
    context["commands"] = [f"podracer train {row['command']} --seed {row['seed']}"]
    return Record(figure, case, "laptop", {"frames": frames, "returns": returns}, context)


def accelerator_records(path: Path) -> list[Record]:
    """Return the newest figures of `accelerator.py` that are points of published ones.

    One with the kernels of commands comes before a newer one with others.
    """
    newest: dict[tuple[str, str], Record] = {}
    rows = map(json.loads, path.read_text().splitlines())
    chosen = [row for row in rows if "value" in row and row["platform"] != "cpu"]
    for row in sorted(chosen, key=_has_kernels_of_commands):
        kind, _, size = row["case"].partition("/")
        for figure, case in _POINTS.get(kind, ()):
            record = _of_accelerator(row, figure, case.format(size))
            newest[figure, record.case] = record
    return list(newest.values())


_POINTS = {  # figure and case of a measurement
    "catch": (("notebook", "{}-environments"),),
    "lpg": (("lpg-rate", "{}-environments"), ("lpg-price", "rate")),
}


def _has_kernels_of_commands(row: dict[str, Any]) -> bool:
    return _COMMANDS_KERNELS in row["settings"].get("XLA_FLAGS", "")


def _of_accelerator(row: dict[str, Any], figure: str, case: str) -> Record:
    values = {"environments": row["environments"], "steps_per_second": row["value"]}
    context = {name: row[name] for name in ("jax", "commit")}
    context["machine"] = f"{row['device']} with {row['cores']} cores"
    context["seconds"] = row["case_seconds"]
    context["commands"] = [f"python benchmarks/accelerator.py --only {row['case']}"]
    if not _has_kernels_of_commands(row):
        context["note"] = "with XLA's fastest kernels, which commands do not use"
    return Record(figure, case, "accelerator", values, context)


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
