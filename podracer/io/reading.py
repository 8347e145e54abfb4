"""Reading of files that anybody may have put there: regular ones alone, never more than their size.

A link to a file of /proc, which has no size and no end, is read as empty.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

from podracer.errors import CheckpointError

_JSON_LIMIT = 64 * 2**20  # bytes; a schema of 10,000 leaves takes about 1 MiB
LINE_LIMIT = 64 * 2**20  # bytes; 50 metrics of 65,536 pods
LARGE_FILE = 2**32
"""Limit in bytes of files of records, and of others that are read as a whole."""
MALFORMED = (AttributeError, KeyError, TypeError, ValueError, RecursionError)
"""What reading JSON raises that is none, or is not what it should be."""


def open_regular(path: Path) -> BufferedReader:
    """Open a file to read, without waiting. Raises `CheckpointError` for a pipe or a device."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path} is not a file")
    return os.fdopen(descriptor, "rb")


def read_limited(path: Path, limit: int = _JSON_LIMIT, *, cut: bool = False) -> bytes:
    """Return the content of a file, by default one of JSON; with `cut` its first `limit` bytes.

    Raises `CheckpointError` for what is no regular file, and for a file of more than `limit` bytes.
    """
    with naming(path), open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit and not cut:
            raise CheckpointError(f"{path} is larger than {limit:,} bytes")
        return file.read(min(size, limit))


def parse_object(text: bytes | str | None) -> dict[str, Any]:
    """Return the object in a text of JSON, an empty one if it is anything else."""
    try:
        content = json.loads(text or b"")
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, an empty one if there is none; a link is not followed."""
    with contextlib.suppress(OSError, CheckpointError):
        return {} if path.is_symlink() else parse_object(read_limited(path))
    return {}


def read_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file that may be growing, the last one maybe torn.

    Raises `CheckpointError` for what is no regular file, and at a line of more than 64 MiB.
    """
    with naming(path), open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        while line := file.readline(min(size, LINE_LIMIT + 1)):
            if len(line) > LINE_LIMIT:
                raise CheckpointError(f"{path} has a line of more than {LINE_LIMIT:,} bytes")
            size -= len(line)
            yield line


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Name the file in an error of an open one, which does not know it."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
