"""Seals: files and directories that are read exactly as they were written, or refused.

A sealed file is JSON that holds its own SHA-256. A sealed directory has such a file, the manifest,
with size and SHA-256 of every other file; it is written last.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import os
import stat
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from podracer.errors import CheckpointError, ConfigError, StorageError
from podracer.io.reading import MALFORMED, naming, open_regular, read_limited
from podracer.io.run_directory import fsync_directory, write_bytes
from podracer.io.text import mode_of

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

CONFIG, MANIFEST, CHECKPOINTS = "config.json", "manifest.json", "checkpoints"
RETRY_SECONDS = (0.1, 0.4, 1.5)  # before the second, third and last attempt to read
# Errors that tell what is there. Any other is an error of reading, which tells nothing.
_IS_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP}


def retry_reading(read: Callable[[], T]) -> T:
    """Return `read()`, repeated while it fails for a reason that may pass.

    That a name is missing, or is not what it should be, is raised at once. Raises `StorageError`
    with the name of the file if it still cannot be read after two seconds.
    """
    for seconds in (*RETRY_SECONDS, None):
        try:
            return read()
        except OSError as error:
            if error.errno in _IS_ABSENT or isinstance(error, StorageError):
                raise
            if seconds is None:
                raise StorageError(
                    f"{error.filename} cannot be read ({error.strerror}), and nothing was "
                    "changed: make it readable and try again."
                ) from error
            time.sleep(seconds)
    raise AssertionError


def _verifying(read: F) -> F:
    """Repeat a function of a path as `retry_reading` does; make other errors `CheckpointError`."""

    @functools.wraps(read)
    def verified(path: Path, *args: Any) -> Any:
        def attempt() -> Any:
            try:
                return read(path, *args)
            except (OSError, *MALFORMED) as error:
                if isinstance(error, OSError) and error.errno not in _IS_ABSENT:
                    raise
                raise CheckpointError(f"{path} cannot be verified: {error}") from error

        return retry_reading(attempt)

    return cast(F, verified)


def check_is_run(directory: Path) -> None:
    """Raise `ConfigError` if `directory` holds no run."""
    if not (directory / CONFIG).is_file():
        runs = sorted(path.parent for path in directory.glob(f"*/{CONFIG}"))
        reason = "it is a file" if directory.is_file() else "there is no such directory"
        reason = f"there is no {CONFIG} in it" if directory.is_dir() else reason
        advice = f" itself, but others: name one, such as {runs[-1]}" if runs else ""
        raise ConfigError(f"{directory} holds no run{advice or f': {reason}'}.")


def encode_json(obj: Any) -> bytes:
    """Encode `obj` canonically, so that equal content means equal bytes."""
    return json.dumps(obj, sort_keys=True, indent=1).encode()


def encode_sealed(body: dict[str, Any]) -> bytes:
    """Encode `body` as the content of a sealed file, which holds its own SHA-256."""
    return encode_json({**body, "sha256": hashlib.sha256(encode_json(body)).hexdigest()})


def seal_json(path: Path, body: dict[str, Any]) -> None:
    """Write `body` as a sealed file, atomically, as `write_json` does."""
    write_bytes(path, encode_sealed(body), mode=mode_of(body))


@_verifying
def read_sealed_json(path: Path) -> dict[str, Any]:
    """Return the content of a sealed file.

    Raises `CheckpointError` if it is missing or has changed, `StorageError` if it cannot be read.
    """
    raw = read_limited(path)
    body = json.loads(raw)
    del body["sha256"]
    if encode_sealed(body) != raw:
        raise CheckpointError(f"{path} has changed since it was sealed")
    return body


def seal(
    directory: Path, name: str | None = None, digests: Mapping[str, Any] | None = None
) -> None:
    """Make `directory` durable, then valid by writing the manifest with all SHA-256 last.

    It is sealed under `name`, by default its own, and valid under that name only. Files of
    `digests`, entries of `digest_files` in this or in another process, are not read again.
    """
    files, sizes = dict(digests or {}), _files(directory)
    if any(sizes.get(path) != entry["size"] for path, entry in files.items()):
        raise OSError(errno.ESTALE, "another process wrote other files than are here")
    files |= digest_files(directory, lambda path: path not in files)
    for folder, _, _ in os.walk(directory):
        fsync_directory(Path(folder))
    body = {"name": name or directory.name, "files": files}
    write_bytes(directory / MANIFEST, encode_sealed(body))
    fsync_directory(directory.parent)


def digest_files(
    directory: Path, is_own: Callable[[str], bool] = lambda path: True
) -> dict[str, Any]:
    """Make own files in `directory` durable; return size and SHA-256 by relative path."""
    return {
        path: {"size": size, "sha256": file_digest(directory / path, sync=True)}
        for path, size in _files(directory).items()
        if is_own(path)
    }


@_verifying
def verify_seal(directory: Path) -> None:
    """Check that the files in `directory` are exactly those that were sealed under this name.

    Opens only what lies in the directory itself, never what a link or the manifest points to.
    Raises `CheckpointError` naming the first file that differs, `StorageError` if one cannot be
    read: that is no damage.
    """
    files, manifest = _files(directory), read_sealed_json(directory / MANIFEST)
    if manifest["name"] != directory.name:
        raise CheckpointError(
            f"{directory} was sealed as {str(manifest['name'])[:80]!r}: it is a copy of that"
        )
    listed = manifest["files"]
    for name in sorted(files.keys() | listed.keys()):
        if name not in files:
            raise CheckpointError(f"{directory}: {name!r} is missing")
        if name not in listed:
            raise CheckpointError(f"{directory}: {name!r} was not there when it was sealed")
        if listed[name]["size"] != files[name]:
            raise CheckpointError(f"{directory}: {name!r} has changed since it was sealed")
    for name in sorted(listed):
        if listed[name]["sha256"] != file_digest(directory / name):
            raise CheckpointError(f"{directory}: {name!r} has changed since it was sealed")


def is_there(path: Path) -> bool:
    """Return whether a name exists, be it a broken link. Raises `StorageError` if unknown."""
    try:
        retry_reading(partial(os.lstat, path))
    except StorageError:
        raise
    except OSError:
        return False
    return True


def _files(directory: Path) -> dict[str, int]:
    """Return the size of each file in `directory` except the manifest, by relative path."""

    def fail(error: OSError) -> None:
        raise error

    if directory.is_symlink():
        raise CheckpointError(f"{directory} is a symbolic link")
    sizes = {}
    for folder, folders, names in os.walk(directory, onerror=fail):
        for entry in (Path(folder, name) for name in folders + names):
            status = entry.lstat()
            if stat.S_ISREG(status.st_mode):
                sizes[entry.relative_to(directory).as_posix()] = status.st_size
            elif not stat.S_ISDIR(status.st_mode):
                raise CheckpointError(f"{entry} is neither a file nor a directory")
    sizes.pop(MANIFEST, None)
    return sizes


def file_digest(path: Path, *, sync: bool = False) -> str:
    """Return the SHA-256 of a file in hex; with `sync` the file is durable then."""
    with naming(path), open_regular(path) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if sync:
            os.fsync(file.fileno())
    return digest
