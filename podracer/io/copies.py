"""Copies of runs in a store, and how they come back: to be resumed in a directory, or to be read.

A copy has the run directory's own files: `config.json`, `saved.json`, the records up to the newest
seal, and the checkpoints. A checkpoint is taken back only if its seal agrees with every byte, so it
does not matter what a store has lost, cut off or mixed up.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from podracer.errors import CheckpointError, ConfigError, StorageError
from podracer.io import store as stores
from podracer.io.contents import Contents
from podracer.io.directories import LOG
from podracer.io.edits import encode_sealed, read_object
from podracer.io.lease import Lease
from podracer.io.mirror import MIRROR, Copy, identify, recorded_address
from podracer.io.paths import COPIES, address_of, user_path
from podracer.io.run_directory import RunLock, write_bytes
from podracer.io.seal import CHECKPOINTS, CONFIG, MANIFEST, is_there
from podracer.io.steps import (
    SAVED,
    Choice,
    Report,
    best_step,
    newest_saved,
    read_meta,
    step_directories,
    step_name,
)
from podracer.io.text import mode_of, print_stderr

_STEP = re.compile(rf"{CHECKPOINTS}/([0-9]{{12}})")
_ROUND = re.compile(r"(.+)/(pods/p[0-9]+r[0-9]+)")
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


# --- a copy to resume -----------------------------------------------------------------------------

Kinds = Mapping[str, Callable[[Path, Contents], Copy]]


def restore(
    address: str,
    directory: Path,
    kinds: Kinds = MappingProxyType({"run": RunCopy}),
    *,
    report: Report = print_stderr,
) -> None:
    """Bring the run at an address into a directory, to be resumed there.

    The directory is new, or holds the same run: then it gets what is newer in the store, and goes
    on as it is where the store has nothing or cannot be read. `kinds` are those that may come back.
    Raises `ConfigError` if there is no run, if another machine writes it, or if the directory has
    something else; `CheckpointError` if no checkpoint is whole.
    """
    try:
        store = stores.open_store(address)
        contents = _contents(store, address, *kinds)
        copy = kinds[contents.kind](directory, contents)
    except (ConfigError, StorageError) as error:
        has_begun = any(is_there(directory / mark) for mark in (CONFIG, LOG))
        if not has_begun or recorded_address(directory) != address:
            raise
        kind = "run" if is_there(directory / CONFIG) else "tournament"
        report(f"{error} The {kind} in {directory} goes on.")
        return

    def check() -> None:
        files = {path.name for path in directory.glob("*")} - {"lock", MIRROR}
        is_begun = copy.mark not in files and recorded_address(directory) == address
        with stores.reading(address):
            if files and not is_begun and not copy.is_same():
                raise ConfigError(f"{directory} holds something else: name a new directory.")

    def is_complete() -> bool:
        with stores.reading(address):
            contents.refresh()
            return is_there(directory / copy.mark) and not copy.is_newer()

    if is_complete():
        check()
        return
    with RunLock(directory, check, wait=True):  # several processes share a directory
        if is_complete():
            return
        lease = Lease(store, address, identify(directory, address), copy.kind)
        with stores.writing(address):
            lease.claim(time.sleep, report)
            contents.refresh()
            contents.adopt(lease)
            contents.commit()
        with stores.reading(address):
            copy.fetch(report)
        with stores.writing(address):
            lease.release()


def _contents(store: Any, address: str, *kinds: str, folder: str = "") -> Contents:
    contents = Contents(store, folder)
    with stores.reading(address):
        contents.refresh()
    if contents.kind in kinds:
        return contents
    raise ConfigError(f"{address} holds no {' and no '.join(kinds)}.")


# --- a copy to read -------------------------------------------------------------------------------


def local_run(
    run: str | Path, choice: Choice | None = None, *, report: Report = print_stderr
) -> Path:
    """Return the directory of a run: a path, or for an address that of a copy, to be read.

    The copy has the checkpoint of the choice, none without one, and is deleted with the process. Of
    a tournament it has the log alone.
    """
    address = address_of(run)
    return user_path(run) if address is None else _copy(address, choice, report)


def output_folder(directory: Path) -> Path:
    """Return where a command writes a file about a run by default: not in a copy, which ends."""
    return Path() if directory in COPIES else directory


@functools.cache
def _copy(address: str, choice: Choice | None, report: Report) -> Path:
    contents = _contents_to_read(address)
    folder = Path(tempfile.mkdtemp(prefix="podracer-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    directory = folder / (re.sub(r"[^A-Za-z0-9._-]", "_", address.rpartition("/")[2]) or "run")
    directory.mkdir()
    with stores.reading(address):
        if contents.kind == "run":
            RunCopy(directory, contents).fetch(report, choice or "none")
        else:
            write_bytes(directory / LOG, contents.read_log(), mode=0o600)
    COPIES[directory] = address
    return directory


def _contents_to_read(address: str) -> Contents:
    if match := _ROUND.fullmatch(address):  # a round of a tournament is a run
        with contextlib.suppress(ConfigError, StorageError):
            return _contents(stores.open_store(match[1]), match[1], "run", folder=f"{match[2]}/")
    return _contents(stores.open_store(address), address, "run", "tournament")
