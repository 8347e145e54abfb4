"""Steps of a run on disk: which are whole, which belong to the run, and where the others go."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from podracer.io.run_directory import own_directory, read_limited, unused
from podracer.io.seal import (
    CONFIG,
    is_there,
    read_sealed_json,
    retry_reading,
    verify_seal,
)
from podracer.types import CheckpointError, StorageError

Report = Callable[[str], None]

CHECKPOINTS = "checkpoints"
SAVED = "saved.json"  # outlives `checkpoints/`, so that its loss is noticed
FORMAT = 2
_STEP = re.compile(r"[0-9]{12}")


def valid_step(run: Path, step: int | None, report: Report, quarantine: Path | None = None) -> int:
    """Return the newest step that is whole and belongs to the run; report what is not."""
    directory, identity = run / CHECKPOINTS, identity_of(run)
    if step is not None:
        _verify(directory / step_name(step), identity)
        return step
    newest = newest_saved(run)  # before the list: a run may be saving
    refused: dict[Path, CheckpointError] = {}
    for path in reversed(step_directories(directory)):
        try:
            _verify(path, identity)
            valid = path
            break
        except CheckpointError as fault:
            refused[path] = fault
    else:
        valid = None
    outcome = f"step {int(valid.name)} is used instead" if valid else "no other one is valid"
    for path, fault in refused.items():
        moved = f"; moved to {_move(path, quarantine)}" if quarantine else ""
        report(f"checkpoint skipped: {fault}{moved}; {outcome}.")
    lost = None if newest is None else directory / step_name(newest)
    if valid and lost and lost > valid and lost not in refused:
        report(f"checkpoint {lost} was saved and is gone; {outcome}.")
    if not valid:
        raise CheckpointError(
            f"{run} has no valid checkpoint"
            + (", but one was saved: bring it back, or begin a new run." if lost else ".")
        )
    return int(valid.name)


def _verify(path: Path, identity: Any) -> None:
    """Raise `CheckpointError` unless a step is whole and belongs to the run of this identity."""
    verify_seal(path)
    owner = read_meta(path)["run"]
    if owner != identity:
        raise CheckpointError(
            f"{path} belongs to {_spell_run(owner)}, and {CONFIG} to {_spell_run(identity)}"
        )


def identity_of(run: Path) -> Any:
    """Return what `config.json` says of a run: its id and the digest of its experiment.

    None for checkpoints without a run. Raises `CheckpointError` if the file has changed.
    """
    return read_sealed_json(run / CONFIG).get("run") if is_there(run / CONFIG) else None


def _spell_run(identity: Any) -> str:
    if not isinstance(identity, dict):
        return "no run"
    run_id, experiment = (str(identity.get(key))[:12] for key in ("id", "experiment"))
    return f"run {run_id!r} of experiment {experiment!r}"


def newest_saved(run: Path) -> int | None:
    """Return the newest step that was ever sealed, None if none was; it may be lost."""
    if not is_there(run / SAVED):
        return None
    try:
        return int(read_sealed_json(run / SAVED)["step"])
    except (CheckpointError, KeyError, TypeError, ValueError):
        return 0  # damaged: some step was saved


def _move(path: Path, folder: Path) -> Path:
    own_directory(folder)
    try:
        return path.rename(unused(folder / path.name))
    except OSError as error:
        raise StorageError(f"{path} cannot be moved to {folder}: {error.strerror}.") from error


def read_meta(path: Path) -> dict[str, Any]:
    """Parse `meta.json` of a verified step; it is untrusted, so check every type."""
    try:
        meta = json.loads(retry_reading(lambda: read_limited(path / "meta.json")))
        if meta["format"] != FORMAT:
            raise CheckpointError(f"{path} has format {meta['format']!r}, not {FORMAT}")
        schema = {path: [list(s), str(d), i] for path, (s, d, i) in meta["schema"].items()}
        return {"run": meta["run"], "schema": schema, "metadata": dict(meta["metadata"])}
    except (
        FileNotFoundError,
        NotADirectoryError,
        AttributeError,
        KeyError,
        TypeError,
        ValueError,
        RecursionError,
    ) as error:
        raise CheckpointError(f"{path}: meta.json is not usable: {error}") from error


def step_name(step: int) -> str:
    """Return the name of a step's directory."""
    if not 0 <= step < 10**12:
        raise ValueError(f"step {step} is not within 0 and 10**12")
    return f"{step:012d}"


def step_directories(directory: Path) -> list[Path]:
    """Return what has the name of a step, oldest first, whatever it is."""
    return [path for path in paths_in(directory) if _STEP.fullmatch(path.name)]


def paths_in(directory: Path) -> list[Path]:
    """Return what is in a directory, sorted; nothing if there is none."""
    try:
        return sorted(directory / name for name in retry_reading(lambda: os.listdir(directory)))
    except StorageError:
        raise
    except OSError:  # missing, no directory, or links in a circle
        return []
