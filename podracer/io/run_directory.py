"""Run directories: names, locks, atomic files and sealed directories."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import socket
import stat
import threading
from pathlib import Path
from typing import Any

from podracer.types import CheckpointError, ConfigError

_NAME = re.compile(r"[A-Za-z0-9._-]{1,80}")
_DEVICE = re.compile(r"(CON|PRN|AUX|NUL|COM[0-9]|LPT[0-9])(\..*)?", re.IGNORECASE)

MANIFEST = "manifest.json"
_JSON_LIMIT = 64 * 2**20  # bytes; a schema of 10,000 leaves takes about 1 MiB


def run_directory(root: Path, name: str) -> Path:
    """Return the path of the run `name` directly under `root`; create nothing.

    Raises `ConfigError` for a name that is not 1 to 80 of `A-Z a-z 0-9 . _ -`, that starts with
    a dot or names a device on some system, and for a path that is a symbolic link or a file.
    """
    if not _NAME.fullmatch(name) or name.startswith("."):
        raise ConfigError(
            f"run name {name[:80]!r} is not usable: take 1 to 80 letters, digits, '.', '_' or '-', "
            "not starting with '.'"
        )
    if _DEVICE.fullmatch(name):
        raise ConfigError(f"run name {name!r} is reserved by some systems; choose another")
    root = Path(root).resolve()
    path = root / name
    if path.is_symlink() or path.resolve().parent != root:
        raise ConfigError(f"{path} is a symbolic link; a run directory must be a real directory")
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{path} is a file; choose another run name")
    return path


class RunLock:
    """Lock of a run directory, which is created if it does not exist; a context manager.

    The kernel releases the lock when the process ends, however it ends, so no lock is ever stale.
    Raises `ConfigError` naming the holder if another run has it.
    """

    def __init__(self, directory: Path) -> None:
        self._path = Path(directory) / "lock"
        self._descriptor = -1

    def __enter__(self) -> RunLock:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(self._path, flags, 0o644)
        try:
            # flock, not lockf: it also keeps out a second run in this very process.
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 1000, 0)
            os.close(descriptor)
            raise ConfigError(
                f"{self._path.parent} is in use by {_holder(holder)}; "
                "wait for it to end or choose another run name"
            ) from None
        os.ftruncate(descriptor, 0)
        record = {"pid": os.getpid(), "host": socket.gethostname()}
        os.pwrite(descriptor, json.dumps(record).encode(), 0)
        self._descriptor = descriptor
        return self

    def __exit__(self, *_: object) -> None:
        # The file stays: removing it would let two runs lock two different files of one name.
        os.close(self._descriptor)


def _holder(record: bytes) -> str:
    try:
        fields = json.loads(record)
        return f"process {int(fields['pid'])} on {str(fields['host'])[:100]!r}"
    except (ValueError, KeyError, TypeError):
        return "another process"


def write_json(path: Path, obj: Any) -> None:
    """Write `obj` as JSON atomically, for the eyes of the user alone.

    A reader sees the old or the new file, even after a power cut. Raises `OSError`
    if the write fails; the old file then stays.
    """
    write_bytes(path, (json.dumps(obj, indent=1) + "\n").encode(), mode=0o600)


def encode_json(obj: Any) -> bytes:
    """Encode `obj` canonically, so that equal content means equal bytes."""
    return json.dumps(obj, sort_keys=True, indent=1).encode()


def write_bytes(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Write bytes atomically, as `write_json` does; `mode` is that of the file."""
    path = Path(path)
    # One name per thread: a watchdog may write crash.json while the main thread does.
    draft = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with open(os.open(draft, flags, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
    fsync_directory(path.parent)


def fsync_directory(directory: Path) -> None:
    """Make the names in `directory` durable; syncing a file does not."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# --- sealed directories ---------------------------------------------------------------------------


def seal(directory: Path) -> None:
    """Make `directory` durable, then valid by writing the manifest with all SHA-256 last."""
    files = {
        name: {"size": size, "sha256": _sha256(directory / name, sync=True)}
        for name, size in _files(directory).items()
    }
    for folder, _, _ in os.walk(directory):
        fsync_directory(Path(folder))
    write_bytes(directory / MANIFEST, _manifest({"name": directory.name, "files": files}))
    fsync_directory(directory.parent)


def verify_seal(directory: Path) -> None:
    """Check that the files in `directory` are exactly those that were sealed under this name.

    Raises `CheckpointError` naming the first file that differs. Opens only what lies in the
    directory itself, never what a link or the manifest points to.
    """
    try:
        files = _files(directory)
        raw = read_limited(directory / MANIFEST)
        manifest = json.loads(raw)
        del manifest["sha256"]
        if _manifest(manifest) != raw or manifest["name"] != directory.name:
            raise CheckpointError(f"{directory}: {MANIFEST} has changed since it was sealed")
        listed = manifest["files"]
        for name in sorted(files.keys() | listed.keys()):
            if name not in files:
                raise CheckpointError(f"{directory}: {name!r} is missing")
            if name not in listed:
                raise CheckpointError(f"{directory}: {name!r} was not there when it was sealed")
            same_size = listed[name]["size"] == files[name]
            if not same_size or listed[name]["sha256"] != _sha256(directory / name):
                raise CheckpointError(f"{directory}: {name!r} has changed since it was sealed")
    except (OSError, AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{directory} cannot be verified: {error}") from error


def read_limited(path: Path) -> bytes:
    """Return the bytes of a JSON file. Raises `CheckpointError` above 64 MiB."""
    if path.stat().st_size > _JSON_LIMIT:
        raise CheckpointError(f"{path} is larger than {_JSON_LIMIT:,} bytes")
    return path.read_bytes()


def _manifest(body: dict[str, Any]) -> bytes:
    return encode_json({**body, "sha256": hashlib.sha256(encode_json(body)).hexdigest()})


def _files(directory: Path) -> dict[str, int]:
    """Return the size of each file in `directory` except the manifest, by relative path."""
    if directory.is_symlink():
        raise CheckpointError(f"{directory} is a symbolic link")
    sizes = {}
    for folder, folders, names in os.walk(directory):
        for entry in (Path(folder, name) for name in folders + names):
            status = entry.lstat()
            if stat.S_ISREG(status.st_mode):
                sizes[entry.relative_to(directory).as_posix()] = status.st_size
            elif not stat.S_ISDIR(status.st_mode):
                raise CheckpointError(f"{entry} is neither a file nor a directory")
    sizes.pop(MANIFEST, None)
    return sizes


def _sha256(path: Path, *, sync: bool = False) -> str:
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if sync:
            os.fsync(file.fileno())
    return digest
