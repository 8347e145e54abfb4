"""Copies of runs in a store, and how they come back.

A copy has the run directory's own files: `config.json`, `saved.json`, the records up to the newest
seal, and the checkpoints. A checkpoint is taken back only if its seal agrees with every byte, so it
does not matter what a store has lost, cut off or mixed up.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from podracer.errors import CheckpointError
from podracer.io.reading import read_object
from podracer.io.run_directory import write_bytes
from podracer.io.seal import CHECKPOINTS, CONFIG, MANIFEST, encode_sealed, is_there
from podracer.io.steps import (
    SAVED,
    Choice,
    best_step,
    newest_saved,
    read_meta,
    step_directories,
    step_name,
)
from podracer.io.text import mode_of
from podracer_cloud import store as stores
from podracer_cloud.contents import Contents, Report

_STEP = re.compile(rf"{CHECKPOINTS}/([0-9]{{12}})")
_RECORDS = re.compile(r"[a-z_]+\.jsonl")


class RunCopy:
    """Copy of a run in a store, see `Copy`."""

    kind, mark, gather_seconds = "run", CONFIG, 0.0

    def __init__(self, directory: Path, contents: Contents) -> None:
        self._run, self._contents = directory, contents

    def __str__(self) -> str:
        names = _steps_of(self._contents.committed)
        return f"update {int(max(names))}" if names else "no checkpoint"

    def is_same(self) -> bool:
        """Return whether the configurations are of one run."""
        identity = self._contents.read_json(CONFIG).get("run")
        return identity is not None and identity == read_object(self._run / CONFIG).get("run")

    def is_newer(self) -> bool:
        """Return whether the store has a newer step than the run has ever sealed."""
        step = newest_saved(self._run)
        return self._saved() > (-1 if step is None else step)

    def update(self) -> None:
        """Make the store like the disk: new steps first, then without what was retired."""
        contents = self._contents
        contents.put(CONFIG, (self._run / CONFIG).read_bytes())
        paths = step_directories(self._run / CHECKPOINTS)
        steps = {path.name: path for path in paths if is_there(path / MANIFEST)}
        newest = max(steps, default="")
        for name in sorted(steps, reverse=True):
            try:
                if name == newest:
                    put_records(contents, "", steps[name])
                contents.put_step(f"{CHECKPOINTS}/{name}", steps[name])
                if name == newest:
                    contents.put(SAVED, encode_sealed({"step": int(name)}))
            except (CheckpointError, OSError):
                if is_there(steps[name]):  # otherwise it was retired meanwhile
                    raise
            else:
                contents.commit()
        if newest in (stored := _steps_of(contents.parts)):
            for name in stored - steps.keys():
                del contents.parts[f"{CHECKPOINTS}/{name}"]
        contents.commit()

    def fetch(self, report: Report, choice: Choice | Literal["all", "none"] = "all") -> None:
        """Bring the steps of a choice and the other files of the run, `config.json` last.

        Raises `CheckpointError` if none of the steps is whole.
        """
        (self._run / CHECKPOINTS).mkdir(exist_ok=True)
        for _ in range(stores.READS):
            self._contents.refresh()
            saved, names = self._saved(), _steps_of(self._contents.parts)
            if type(choice) is int:
                names &= {step_name(choice)}
            is_whole = self._fetch_steps(sorted(names, reverse=True), choice, report)
            is_unsaved = not is_whole and saved < 0 and choice == "all"
            if is_whole or is_unsaved or choice == "none":
                break
        else:
            steps = "checkpoint" if type(choice) is not int else f"checkpoint of update {choice}"
            raise CheckpointError(f"the store has no {steps} that is whole.")
        # Where no checkpoint was copied the run begins again, with records of its own.
        saved_file = [SAVED] if choice == "all" else []
        fetch_files(self._contents, "", self._run, saved_file, records=not is_unsaved)

    def _saved(self) -> int:
        """Return the newest step that was copied, -1 without one."""
        step = self._contents.read_json(SAVED).get("step")
        return step if type(step) is int and 0 <= step < 10**12 else -1

    def _fetch_steps(self, names: list[str], choice: Choice | str, report: Report) -> bool:
        """Bring the steps of a choice, and return whether one is whole."""

        def fetch(name: str) -> bool:
            part = f"{CHECKPOINTS}/{name}"
            return self._contents.fetch_step(part, self._run / part, report)

        whole = (name for name in names if choice != "none" and fetch(name))
        newest = next(whole, None)
        if choice == "all":
            list(whole)
        if choice == "best" and newest is not None:
            best = best_step(read_meta(self._run / CHECKPOINTS / newest)["metadata"])
            if best is not None:
                fetch(step_name(best))
        return newest is not None


def _steps_of(parts: Iterable[str]) -> set[str]:
    """Return the names of the steps among parts."""
    return {match[1] for match in map(_STEP.fullmatch, parts) if match}


def put_records(contents: Contents, prefix: str, step: Path) -> None:
    """Copy the records of a run up to the seal of a step."""
    for name, seal in read_meta(step)["metadata"]["records"].items():
        with open(step.parents[1] / name, "rb") as file:
            contents.put(f"{prefix}{name}", file.read(seal["size"]))


def fetch_files(
    contents: Contents, prefix: str, run: Path, names: list[str], *, records: bool = True
) -> None:
    """Bring files of a run, and by default its records; `config.json` last."""
    parts = {part.removeprefix(prefix) for part in contents.parts if part.startswith(prefix)}
    files = sorted(filter(_RECORDS.fullmatch, parts)) if records else []
    for name in (*files, *names, CONFIG):
        if (content := contents.read(f"{prefix}{name}")) is not None:
            mode = mode_of(json.loads(content)) if name == CONFIG else 0o644
            write_bytes(run / name, content, mode=mode)
