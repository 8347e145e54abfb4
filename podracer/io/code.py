"""Digests of the code and the versions that this process runs, to compare two machines."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import platform
from collections.abc import Sequence
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


def code_and_versions(recipes: Sequence[str] = ()) -> dict[str, str]:
    """Return by name what two machines must have in common to train the same.

    `recipes` are named `MODULE:FUNCTION`; the file of each module counts, which is not imported.
    """
    values = {"code of podracer": digest_of_code()[:16], **dict.fromkeys(PACKAGES, "missing")}
    values |= installed_versions()
    for name in sorted({recipe.partition(":")[0] for recipe in recipes}):
        spec = importlib.util.find_spec(name)
        path = Path(spec.origin) if spec and spec.origin else None
        content = path.read_bytes() if path and path.is_file() else b""
        values[f"code of {name}"] = hashlib.sha256(content).hexdigest()[:16]
    return values
