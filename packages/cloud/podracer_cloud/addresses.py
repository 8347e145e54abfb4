"""Runs and tournaments at addresses: they come to a directory to be resumed, or to be read."""

from __future__ import annotations

import atexit
import contextlib
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from podracer.errors import ConfigError, StorageError
from podracer.io.directories import LOG
from podracer.io.run_directory import RunLock, write_bytes
from podracer.io.seal import CONFIG, is_there
from podracer.io.steps import Choice
from podracer.io.text import print_stderr
from podracer_cloud import store as stores
from podracer_cloud.contents import Contents, Report
from podracer_cloud.lease import Lease
from podracer_cloud.mirror import MIRROR, Copy, identify, recorded_address
from podracer_cloud.runs import RunCopy
from podracer_cloud.tournaments import TournamentCopy

KINDS: dict[str, Callable[[Path, Contents], Copy]] = {
    "run": RunCopy,
    "tournament": TournamentCopy,
}
_READ: dict[tuple[str, Choice | None], tuple[dict[str, Any], Path]] = {}  # contents and copies
_ROUND = re.compile(r"(.+)/(pods/p[0-9]+r[0-9]+)")


def resolve(address: str, choice: Choice | None, directory: Path | None) -> Path:
    """Return the directory of the run at an address, see `podracer.io.addresses.local_run`."""
    if directory is None:
        return read_copy(address, choice)
    restore(address, directory)
    return directory


def restore(address: str, directory: Path, *, report: Report = print_stderr) -> None:
    """Bring the run or tournament at an address into a directory, to be resumed there.

    The directory is new, or holds the same run: then it gets what is newer in the store, and goes
    on as it is where the store has nothing or cannot be read.
    Raises `ConfigError` if there is no run, if another machine writes it, or if the directory has
    something else; `CheckpointError` if no checkpoint is whole.
    """
    try:
        store = stores.open_store(address)
        contents = _contents(store, address, *KINDS)
        copy = KINDS[contents.kind](directory, contents)
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


def read_copy(address: str, choice: Choice | None, report: Report = print_stderr) -> Path:
    """Return the directory of a copy to be read, which is deleted with the process.

    It has the checkpoint of the choice, none without one. Of a tournament it has the log alone. It
    is brought once, and again where the store has changed: then the former copy is deleted.
    """
    contents = _contents_to_read(address)
    version, copy = _READ.get((address, choice), (None, None))
    if copy is None or version != contents.parts:
        version, former = dict(contents.parts), copy
        copy = _bring(address, contents, choice, report)
        _READ[address, choice] = version, copy
        if former is not None:
            shutil.rmtree(former.parent, ignore_errors=True)
    return copy


def _bring(address: str, contents: Contents, choice: Choice | None, report: Report) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="podracer-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    directory = folder / (re.sub(r"[^A-Za-z0-9._-]", "_", address.rpartition("/")[2]) or "run")
    directory.mkdir()
    with stores.reading(address):
        if contents.kind == "run":
            RunCopy(directory, contents).fetch(report, choice or "none")
        else:
            write_bytes(directory / LOG, contents.read_log(), mode=0o600)
    return directory


def _contents_to_read(address: str) -> Contents:
    if match := _ROUND.fullmatch(address):  # a round of a tournament is a run
        with contextlib.suppress(ConfigError, StorageError):
            return _contents(stores.open_store(match[1]), match[1], "run", folder=f"{match[2]}/")
    return _contents(stores.open_store(address), address, "run", "tournament")
