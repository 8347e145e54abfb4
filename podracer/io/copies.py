"""Runs that come back from a store: to be resumed in a directory, or to be read.

A checkpoint is taken only if its seal agrees with every byte, so it does not matter what a store
has lost, cut off or mixed up.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import re
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from podracer.errors import CheckpointError, ConfigError, StorageError
from podracer.io.lease import Lease
from podracer.io.mirror import MIRROR, identify, is_same_run, newest_step, recorded_address
from podracer.io.paths import address_of, user_path
from podracer.io.run_directory import RunLock, check_room, fsync_directory, write_bytes
from podracer.io.seal import CHECKPOINTS, CONFIG, MANIFEST, is_there, verify_seal
from podracer.io.steps import SAVED, Choice, Report, best_step, read_meta, step_name
from podracer.io.store import (
    manifest_of,
    open_store,
    read_json,
    read_object,
    reading,
    saved_step,
    step_names,
)
from podracer.io.text import mode_of, print_stderr

_CHUNK = 2**23  # bytes of a request, which has a time limit
_RECORDS = re.compile(r"[a-z_]+\.jsonl")
_ATTEMPTS = 4  # where a run goes on to save while it is read
_COPIES: set[Path] = set()


def restore(address: str, directory: Path, *, report: Report = print_stderr) -> None:
    """Bring the run at an address into a directory, to be resumed there.

    The directory is new, or holds the same run: then it gets what is newer in the store, and goes
    on as it is where the store has nothing or cannot be read. Raises `ConfigError` if there is no
    run, if another machine writes it, or if the directory has something else; `CheckpointError` if
    no checkpoint is whole.
    """
    store = open_store(address)
    try:
        config = _config_at(store, address)
    except (ConfigError, StorageError) as error:
        if not is_there(directory / CONFIG) or recorded_address(directory) != address:
            raise
        report(f"{error} The run in {directory} goes on.")
        return

    def check() -> None:
        files = {path.name for path in directory.glob("*")} - {"lock", MIRROR}
        is_begun = CONFIG not in files and recorded_address(directory) == address
        if files and not is_begun and not is_same_run(config, directory):
            raise ConfigError(f"{directory} holds something else: name a new directory.")

    def is_complete() -> bool:
        with reading(address):
            return is_there(directory / CONFIG) and saved_step(store) <= newest_step(directory)

    if is_complete():
        check()
        return
    with RunLock(directory, check, wait=True):  # several processes share a directory
        if is_complete():
            return
        with reading(address):
            lease = Lease(store, address, identify(directory, address))
            lease.claim(time.sleep, report)
            _fetch(store, address, directory, "all", report)
            lease.release()


def local_run(
    run: str | Path, choice: Choice | None = None, *, report: Report = print_stderr
) -> Path:
    """Return the directory of a run: a path, or for an address that of a copy, to be read.

    The copy has the checkpoint of the choice, none without one, and is deleted with the process.
    """
    address = address_of(run)
    return user_path(run) if address is None else _copy(address, choice, report)


def output_folder(directory: Path) -> Path:
    """Return where a command writes a file about a run by default: not in a copy, which ends."""
    return Path() if directory in _COPIES else directory


@functools.cache
def _copy(address: str, choice: Choice | None, report: Report) -> Path:
    store = open_store(address)
    _config_at(store, address)
    folder = Path(tempfile.mkdtemp(prefix="podracer-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    directory = folder / (re.sub(r"[^A-Za-z0-9._-]", "_", address.rpartition("/")[2]) or "run")
    directory.mkdir()
    with reading(address):
        _fetch(store, address, directory, choice or "none", report)
    _COPIES.add(directory)
    return directory


def _config_at(store: Any, address: str) -> dict[str, Any]:
    with reading(address):
        if config := read_json(store, CONFIG):
            return config
    raise ConfigError(f"{address} holds no run: there is no {CONFIG} in it.")


def _fetch(
    store: Any,
    address: str,
    directory: Path,
    choice: Choice | Literal["all", "none"],
    report: Report,
) -> None:
    """Bring the files of a run, `config.json` last."""
    (directory / CHECKPOINTS).mkdir(exist_ok=True)
    for _ in range(_ATTEMPTS):
        saved = saved_step(store)
        # A list may be stale.
        names = step_names(store) | ({step_name(saved)} if saved >= 0 else set())
        if type(choice) is int:
            names &= {step_name(choice)}
        is_whole = _fetch_steps(store, directory, sorted(names, reverse=True), choice, report)
        is_unsaved = not is_whole and saved < 0 and choice == "all"
        if is_whole or is_unsaved or choice == "none":
            break
    else:
        steps = "checkpoint" if type(choice) is not int else f"checkpoint of update {choice}"
        raise CheckpointError(f"{address} has no {steps} that is whole.")
    listed = (item["path"] for item in store.list_with_delimiter()["objects"])
    # Where no checkpoint was copied the run begins again, with records of its own.
    records = set() if is_unsaved else {"metrics.jsonl", *filter(_RECORDS.fullmatch, listed)}
    for name in (*sorted(records), *([SAVED] if choice == "all" else []), CONFIG):
        if (content := read_object(store, name)) is not None:
            mode = mode_of(json.loads(content)) if name == CONFIG else 0o644
            write_bytes(directory / name, content, mode=mode)


def _fetch_steps(
    store: Any, directory: Path, names: list[str], choice: Choice | str, report: Report
) -> bool:
    """Bring the steps of a choice, and return whether one is whole; report what is not."""
    paths = [directory / CHECKPOINTS / name for name in names if choice != "none"]
    whole = (path for path in paths if _fetch_step(store, path, report))
    newest = next(whole, None)
    if choice == "all":
        list(whole)
    if choice == "best" and newest is not None:
        best = best_step(read_meta(newest)["metadata"])
        if best is not None:
            _fetch_step(store, newest.with_name(step_name(best)), report)
    return newest is not None


def _fetch_step(store: Any, target: Path, report: Report) -> bool:
    """Bring a step, and return whether it is whole."""
    prefix = f"{CHECKPOINTS}/{target.name}"
    manifest = read_object(store, manifest_of(target.name))
    if manifest is None:
        return False
    if is_there(target / MANIFEST) and (target / MANIFEST).read_bytes() == manifest:
        return True
    shutil.rmtree(target, ignore_errors=True)
    try:
        sizes = {
            _checked(name): facts["size"] for name, facts in json.loads(manifest)["files"].items()
        }
        check_room(target, sum(sizes.values()))
        with ThreadPoolExecutor(8) as pool:
            tasks = [
                pool.submit(_download, store, f"{prefix}/{name}", target / name, size)
                for name, size in sizes.items()
            ]
        for task in tasks:
            task.result()
        write_bytes(target / MANIFEST, manifest)
        for folder, _, _ in os.walk(target):
            fsync_directory(Path(folder))
        verify_seal(target)
    except FileNotFoundError as fault:
        report(f"checkpoint skipped: {prefix} is not whole in the store: {fault}.")
    except (CheckpointError, ValueError, TypeError, KeyError, AttributeError) as fault:
        report(f"checkpoint skipped: {fault}.")
    else:
        return True
    shutil.rmtree(target, ignore_errors=True)
    return False


def _download(store: Any, name: str, target: Path, size: int) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if store.head(name)["size"] != size:
        raise CheckpointError(f"{name} has not the size that was sealed")
    with open(target, "xb") as file:
        for start in range(0, size, _CHUNK):
            file.write(store.get_range(name, start=start, end=min(size, start + _CHUNK)))
        file.flush()
        os.fsync(file.fileno())


def _checked(name: str) -> str:
    """Return the name of a file of a step; raise `CheckpointError` for one that leads elsewhere."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or path.as_posix() != name or name == MANIFEST:
        raise CheckpointError(f"{name[:80]!r} cannot be the name of a file of a checkpoint")
    return name
