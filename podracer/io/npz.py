"""Arrays of an `.npz` archive, read without unpickling anything."""

from __future__ import annotations

import hashlib
import lzma
import math
import struct
import tokenize
import zipfile
import zlib

import numpy as np

from podracer.errors import ConfigError

DAMAGE = (
    OSError, EOFError, KeyError, TypeError, ValueError, RuntimeError, OverflowError, MemoryError,
    SyntaxError, tokenize.TokenError, struct.error, lzma.LZMAError, zipfile.BadZipFile,
    zipfile.LargeZipFile, zlib.error,
)  # fmt: skip
"""What reading a damaged archive may raise."""

_LIMIT = 64 * 2**20  # bytes of an array


def digest_of(content: bytes) -> str:
    """Return the SHA-256 of a file's content in hexadecimal."""
    return hashlib.sha256(content).hexdigest()


def check_digest(content: bytes, digest: str, name: str) -> None:
    """Raise `ConfigError` if a file called `name` has another digest; an empty one accepts any."""
    if digest not in ("", digest_of(content)):
        raise ConfigError(f"{name} is not the file that the run began with.")


def read_header(archive: zipfile.ZipFile, name: str) -> tuple[tuple[int, ...], np.dtype]:
    """Return an array's shape and dtype.

    Raises one of `DAMAGE`, also where the archive has not as many bytes as they need.
    """
    member = archive.getinfo(f"{name}.npy")
    with archive.open(member) as file:
        formats = np.lib.format
        is_long = formats.read_magic(file) == (2, 0)
        read = formats.read_array_header_2_0 if is_long else formats.read_array_header_1_0
        shape, _, dtype = read(file)
        size = math.prod(shape) * dtype.itemsize
        if not dtype.hasobject and file.tell() + size != member.file_size:  # objects are pickled
            raise ValueError(f"{name} is {dtype}{list(shape)}, but has another size")
    return shape, dtype


def unpack(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """Return an array whose header was checked. Raises one of `DAMAGE`."""
    with archive.open(f"{name}.npy") as file:
        return np.lib.format.read_array(file, allow_pickle=False)


def read_array(
    archive: zipfile.ZipFile, name: str, dtype: type, shape: tuple[int, ...] | None = None
) -> np.ndarray:
    """Return an array of a dtype and, if it is given, of a shape.

    Its header is checked before anything is unpacked. Raises one of `DAMAGE`.
    """
    stored_shape, stored_dtype = read_header(archive, name)
    is_too_large = math.prod(stored_shape) * stored_dtype.itemsize > _LIMIT
    wrong_shape = shape is not None and stored_shape != shape
    if stored_dtype != np.dtype(dtype) or is_too_large or wrong_shape:
        raise ValueError(f"{name} is {stored_dtype}{list(stored_shape)}")
    return unpack(archive, name)
