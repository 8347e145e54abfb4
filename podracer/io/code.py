"""Digests of the code and the versions that this process runs, to compare two machines."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import platform
from pathlib import Path

import podracer

# Packages that decide the numbers of a run.
PACKAGES = ("jax", "jaxlib", "numpy", "equinox", "optax", "orbax-checkpoint", "ml_dtypes")


def digest_of_code() -> str:
    """Return the SHA-256 of all Python files of the package, in hex."""
    root = Path(podracer.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


@functools.cache
def installed_versions() -> dict[str, str]:
    """Return the versions of Python, podracer and `PACKAGES` by name; a missing one has none."""
    versions = {"python": platform.python_version(), "podracer": podracer.__version__}
    for package in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions
