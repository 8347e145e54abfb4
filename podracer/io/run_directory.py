"""Run directories: names, locks and atomic files."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import re
import shutil
import socket
import stat
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from podracer.errors import ConfigError, StorageError
from podracer.io.reading import naming
from podracer.io.text import mode_of

_NAME = re.compile(r"[A-Za-z0-9._-]([A-Za-z0-9._ -]{0,78}[A-Za-z0-9._-])?")
_HOST = re.sub(r"[^A-Za-z0-9]", "-", socket.gethostname())[:40]
SPARE_BYTES = 2**20  # bytes that are free wherever something is to be saved


def run_directory(root: Path, name: str) -> Path:
    """Return the path of the run `name` directly under `root`; create nothing.

    A name has 1 to 80 of `A-Z a-z 0-9 . _ -` and spaces between them, and does not start with a
    dot. Raises `ConfigError` for any other, and for a path that is a symbolic link or a file;
    `StorageError` for one that this user may not open.
    """
    if not _NAME.fullmatch(name) or name.startswith("."):
        raise ConfigError(
            f"run name {name[:80]!r} is not usable: take 1 to 80 of A-Z, a-z, 0-9, '.', '_' or "
            "'-', and spaces between them, not starting with '.'"
        )
    root = Path(root).resolve()
    path = root / name
    try:
        if path.is_symlink() or path.resolve().parent != root:
            raise ConfigError(f"{path} is a symbolic link; the directory of a run must be none.")
        if path.exists() and not path.is_dir():
            raise ConfigError(f"{path} is a file; choose another run name")
        (path / "lock").exists()
    except OSError as error:
        raise StorageError(
            f"{error.filename}: {error.strerror}; choose a directory that this user may open."
        ) from error
    return path


class RunLock:
    """Lock of a run directory, which is created if it does not exist; a context manager.

    `check`, which raises `ConfigError` for a directory that cannot be taken, is called before
    anything is made there, and again under the lock: another process may have come between.
    The kernel releases the lock when the process ends, however it ends, so no lock is ever stale.
    Raises `ConfigError` naming the holder if another run has it. Raises `StorageError` if nothing
    can be locked there, or if there is not room for `room` bytes and a few more. With `wait` it
    waits for the holder.
    """

    def __init__(
        self,
        directory: Path,
        check: Callable[[], object] = lambda: None,
        room: int = 0,
        *,
        wait: bool = False,
    ) -> None:
        self._path, self._check, self._room = Path(directory) / "lock", check, room
        self._flags = fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB)
        self._descriptor = -1

    def __enter__(self) -> RunLock:
        self._check()
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self._path, flags, 0o644)
        except OSError as error:
            place = self._path if self._path.is_symlink() else error.filename
            raise StorageError(
                f"{self._path.parent} cannot hold a run: {place}: {error.strerror}; "
                "choose another directory."
            ) from error
        try:
            self._take(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        return self

    def _take(self, descriptor: int) -> None:
        try:
            # flock, not lockf: it also keeps out a second run in this very process.
            fcntl.flock(descriptor, self._flags)
        except BlockingIOError:
            raise ConfigError(
                f"{self._path.parent} is in use by {_holder(os.pread(descriptor, 1000, 0))}; "
                "wait for it to end, or choose another directory."
            ) from None
        except OSError as error:
            raise StorageError(
                f"{self._path.parent} cannot be locked ({error.strerror}): choose a directory on a "
                "file system that has locks."
            ) from error
        self._check()
        check_room(self._path.parent, self._room)
        record = {"pid": os.getpid(), "host": socket.gethostname()}
        with naming(self._path):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(record).encode(), 0)

    def __exit__(self, *_: object) -> None:
        # The file stays: removing it would let two runs lock two different files of one name.
        os.close(self._descriptor)


def check_room(directory: Path, size: int = 0) -> None:
    """Raise `StorageError` unless files can be made in a directory, with room for `size` bytes.

    The directory is made where there is none. A file is written, as nothing else tells of quotas
    and of file systems that cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory) as file:
            file.write(bytes(SPARE_BYTES))
            file.flush()
        free = shutil.disk_usage(directory).free
    except OSError as error:
        raise StorageError(
            f"no file can be made in {directory}: {error.strerror}; choose another directory."
        ) from error
    if free < size + SPARE_BYTES:
        needed = size + SPARE_BYTES
        raise StorageError(
            f"{directory} has {free / 2**20:,.1f} MiB free, and a checkpoint with its records "
            f"takes up to {needed / 2**20:,.1f} MiB: choose another directory, or make room."
        )


def _holder(record: bytes) -> str:
    try:
        fields = json.loads(record)
        return f"process {int(fields['pid'])} on {str(fields['host'])[:100]!r}"
    except (ValueError, KeyError, TypeError):
        return "another process"


def write_json(path: Path, obj: Any, *, mode: int | None = None) -> None:
    """Write `obj` as JSON atomically, for the eyes of the user alone if a secret is inside.

    A reader sees the old or the new file, even after a power cut. Raises `OSError`
    if the write fails; the old file then stays.
    """
    mode = mode_of(obj) if mode is None else mode
    write_bytes(path, (json.dumps(obj, indent=1) + "\n").encode(), mode=mode)


def write_bytes(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Write bytes atomically, as `write_json` does, into a file of this mode."""
    path = Path(path)
    _remove_drafts(path)
    # One name per thread: a watchdog may write crash.json while the main thread does.
    draft = path.with_name(f".{path.name}.{_HOST}.{os.getpid()}.{threading.get_ident()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(draft, flags, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        if isinstance(error, OSError):
            error.filename = str(path)  # not the draft
            del error.filename2
        raise
    fsync_directory(path.parent)


def _remove_drafts(path: Path) -> None:
    """Remove what processes of this host that were killed have left of a file beside it."""
    draft = re.compile(rf"\.{re.escape(f'{path.name}.{_HOST}')}\.([0-9]+)\.[0-9]+")
    with contextlib.suppress(OSError):
        for name in os.listdir(path.parent):
            if (match := draft.fullmatch(name)) and not _is_running(int(match[1])):
                path.with_name(name).unlink(missing_ok=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # another user's
        pass
    return True


def own_directory(path: Path) -> int:
    """Make a directory unless it is there, and return its inode; links are not followed.

    Raises `ConfigError` if it is a link or a file, `StorageError` if it cannot be made.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        status = os.lstat(path)
        if stat.S_ISDIR(status.st_mode):
            return status.st_ino
    except FileExistsError:
        pass
    except OSError as error:
        raise StorageError(f"{path} cannot be made: {error.strerror}.") from error
    raise ConfigError(f"{path} must be a directory of the run itself, not a link or a file.")


def unused(path: Path) -> Path:
    """Return a path if nothing is there, else the first with a number that is free."""
    paths = (path.with_name(f"{path.name}.{number}") for number in itertools.count(1))
    return next(p for p in itertools.chain([path], paths) if not os.path.lexists(p))


def fsync_directory(directory: Path) -> None:
    """Make the names in `directory` durable; syncing a file does not."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
