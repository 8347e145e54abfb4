"""Arrays of an `.npz` archive, read without unpickling anything."""

from __future__ import annotations

import hashlib
import math
import zipfile
import zlib

import numpy as np

from podracer.errors import ConfigError

DAMAGE = (
    OSError, EOFError, KeyError, TypeError, ValueError, RuntimeError,
    zipfile.BadZipFile, zlib.error,
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


def read_array(
    archive: zipfile.ZipFile, name: str, dtype: type, shape: tuple[int, ...] | None = None
) -> np.ndarray:
    """Return an array of a dtype and, if it is given, of a shape.

    Its header is checked before anything is unpacked. Raises one of `DAMAGE`.
    """
    with archive.open(f"{name}.npy") as file:
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError(f"{name} is not an array")
        stored_shape, fortran, stored_dtype = np.lib.format.read_array_header_1_0(file)
        expected_dtype = np.dtype(dtype)
        size = math.prod(stored_shape) * expected_dtype.itemsize
        wrong_shape = shape is not None and stored_shape != shape
        if stored_dtype != expected_dtype or size > _LIMIT or wrong_shape:
            raise ValueError(f"{name} is {stored_dtype}{list(stored_shape)}")
        values = np.frombuffer(file.read(size), expected_dtype)
        return values.reshape(stored_shape, order="F" if fortran else "C")
