"""Steps of a run on disk: which are whole, which belong to the run, and where the others go."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, TypeVar

from podracer.errors import CheckpointError, ConfigError, StorageError
from podracer.io import text
from podracer.io.models import check_promoted
from podracer.io.reading import MALFORMED, read_limited
from podracer.io.run_directory import own_directory, unused
from podracer.io.seal import (
    CHECKPOINTS,
    CONFIG,
    MANIFEST,
    is_there,
    read_sealed_json,
    retry_reading,
    verify_seal,
)

T = TypeVar("T")
Choice = Literal["newest", "best"] | int
"""Checkpoint of a run: the newest valid one, that of its best evaluation, or by its updates."""

SAVED = "saved.json"  # outlives `checkpoints/`, so that its loss is noticed
FORMAT = 2
_STEP = re.compile(r"[0-9]{12}")
_RETRIES = 4  # where a run deletes what is read


def read_chosen(run: Path, choice: Choice, read: Callable[[Path], T]) -> T:
    """Return `read(path)` of the step of a choice, which is whole and of this run.

    A model of a directory must be what was promoted, see `check_promoted`. A run that goes on may
    delete the step meanwhile: then it is chosen again. Raises as `chosen_step` and `read` do.
    """
    check_promoted(run)
    directory = run / CHECKPOINTS

    def attempt() -> T:
        return read(directory / step_name(chosen_step(run, choice)))

    for _ in range(_RETRIES):
        steps = step_directories(directory)
        try:
            return attempt()
        except CheckpointError:
            if all(map(is_there, steps)):
                raise
    return attempt()


def chosen_step(run: Path, choice: Choice) -> int:
    """Return the step of a choice, whole and of this run.

    Raises `CheckpointError` if there is none: only in the place of a newest one comes another, and
    `ConfigError` for what is no choice.
    """
    if choice not in ("newest", "best") and type(choice) is not int:
        raise ConfigError(f"a checkpoint is newest, best or a number of updates, not {choice!r}.")
    if choice == "newest":
        return valid_step(run)
    if choice != "best":
        return verified_step(run, choice)
    saved, newest = newest_saved(run) or 0, valid_step(run)  # in this order: a run may be saving
    if newest < saved:
        raise CheckpointError(f"the best checkpoint is lost: only step {saved} named it.")
    step = best_step(read_meta(run / CHECKPOINTS / step_name(newest))["metadata"])
    if step is None:
        raise CheckpointError(f"{run} has no best checkpoint, as no evaluation kept one.")
    try:
        return verified_step(run, step)
    except CheckpointError as error:
        raise CheckpointError(f"the best checkpoint is lost: {error}") from error


def check_holds_no_run(directory: Path) -> None:
    """Raise `ConfigError` if a directory, which something else is to have, holds a run."""
    if is_there(directory / CONFIG) or step_directories(directory / CHECKPOINTS):
        raise ConfigError(f"{directory} holds a run: choose another name.")


def best_step(metadata: dict[str, Any]) -> int | None:
    """Return the step that is best by the metadata of a checkpoint, None if it names none.

    That is `metadata["best"]["updates"]`; it is kept as long as the checkpoint that names it.
    """
    best = metadata.get("best")
    step = best.get("updates") if isinstance(best, dict) else None
    return step if type(step) is int else None


def verified_step(run: Path, step: int) -> int:
    """Return `step` if it is whole and belongs to the run; raise `CheckpointError` if not."""
    directory = run / CHECKPOINTS
    path = directory / step_name(step)
    if not is_there(path):
        steps = ", ".join(str(int(path.name)) for path in step_directories(directory)) or "none"
        raise CheckpointError(f"{run} has no checkpoint of update {step}, but of {steps}.")
    _verify(path, identity_of(run))
    return step


def valid_step(run: Path, quarantine: Path | None = None) -> int:
    """Return the newest step that is whole and belongs to the run; print what is not."""
    directory, identity = run / CHECKPOINTS, identity_of(run)
    newest = newest_saved(run)  # before the list: a run may be saving
    valid, refused = None, dict[Path, CheckpointError]()
    for path in reversed(step_directories(directory)):
        try:
            _verify(path, identity)
            valid = path
            break
        except CheckpointError as fault:
            if not is_there(path):  # deleted by a run that goes on, see `read_chosen`
                raise
            refused[path] = fault
    outcome = f"step {int(valid.name)} is used instead" if valid else "no other one is valid"
    for path, fault in refused.items():
        moved = f"; moved to {_move(path, quarantine)}" if quarantine else ""
        text.print_stderr(f"checkpoint skipped: {fault}{moved}; {outcome}.")
    newest_path = None if newest is None else directory / step_name(newest)
    if valid and newest_path and newest_path > valid and newest_path not in refused:
        text.print_stderr(f"checkpoint {newest_path} was saved and is gone; {outcome}.")
    if not valid:
        raise CheckpointError(
            f"{run} has no valid checkpoint"
            + (", but one was saved: bring it back, or begin a new run." if newest_path else ".")
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
    """Return the newest step that was ever sealed, None if none was; it may be lost.

    Raises `CheckpointError` for a sealed number that is no step's: another program wrote it.
    """
    if not is_there(run / SAVED):
        return None
    try:
        step = read_sealed_json(run / SAVED).get("step", 0)
    except CheckpointError:
        return 0  # damaged: some step was saved
    if type(step) is not int or not 0 <= step < 10**12:
        raise CheckpointError(
            f"{run / SAVED} says that the newest step is {str(step)[:40]!r}, which is none: bring "
            "the file back as it was."
        )
    return step


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
    except (FileNotFoundError, NotADirectoryError, *MALFORMED) as error:
        raise CheckpointError(f"{path}: meta.json is not usable: {error}") from error


def step_name(step: int) -> str:
    """Return the name of a step's directory."""
    return f"{step:012d}"


def saved_updates(run: Path) -> int:
    """Return the updates at the newest sealed checkpoint of a run, 0 if there is none yet."""
    names = [path.parent.name for path in (run / CHECKPOINTS).glob(f"*/{MANIFEST}")]
    return max((int(name) for name in names if _STEP.fullmatch(name)), default=0)


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
