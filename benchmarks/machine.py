"""The machine of a measurement: processor, devices, versions and commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import jax

import podracer

_SETTINGS = ("XLA_FLAGS", "JAX_DEFAULT_MATMUL_PRECISION")


def machine() -> dict[str, Any]:
    """Return the context of a measurement: the host, its devices, and what changes its programs."""
    device = jax.devices()[0]
    return {
        **host(),
        "device": f"{jax.device_count()} x {device.device_kind}",
        "platform": device.platform,
        "settings": {name: os.environ[name] for name in _SETTINGS if os.environ.get(name)},
    }


def host() -> dict[str, Any]:
    """Return processor, versions and commit; no device is touched."""
    return {
        "machine": f"{os.cpu_count()} x {processor()}",
        "python": platform.python_version(),
        "jax": importlib.metadata.version("jax"),
        "podracer": podracer.__version__,
        "commit": commit(),
    }


def processor() -> str:
    """Return the name of the processor."""
    try:
        with open("/proc/cpuinfo") as file:
            return next(x.split(":")[1].strip() for x in file if x.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def commit() -> str | None:
    """Return the commit of the checkout that has this file, `-dirty` if it was changed, else None.

    A copy may lie in the folder of another project, which git would describe.
    """
    file = Path(__file__)
    find = ["ls-files", "--error-unmatch", file.name]
    describe = ["describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        for arguments in (find, describe):
            completed = subprocess.run(
                ["git", *arguments], cwd=file.parent, capture_output=True, text=True, check=True
            )
    except (OSError, subprocess.CalledProcessError):
        return None
    return completed.stdout.strip()
