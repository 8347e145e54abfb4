"""Free memory of devices and hosts, and whether a program fits."""

from __future__ import annotations

import contextlib
import resource
import sys
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from podracer.devices.machine import free_memory
from podracer.errors import ConfigError


def free_bytes(mesh: Mesh) -> int | None:
    """Return the free memory of each device of a mesh in bytes, or None where it is unknown.

    The CPU devices of a host share its memory equally.
    """
    device = mesh.local_devices[0]
    if device.platform == "cpu":
        free = free_host_bytes()
        return None if free is None else free // len(mesh.local_devices)
    try:
        stats = device.memory_stats() or {}
    except jax.errors.JaxRuntimeError:  # a device to compile for, which is not here
        return None
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0) if "bytes_limit" in stats else None


def free_host_bytes() -> int | None:
    """Return the free memory of this host or container in bytes, or None where it is unknown."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = 1024 * next(int(x.split()[1]) for x in lines if x.startswith("MemAvailable"))
        of_container = free_memory()
        return free if of_container is None else min(free, of_container)
    return None


def used_bytes() -> int:
    """Return the resident memory of this process in bytes; its maximum where no more is known."""
    with contextlib.suppress(OSError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def used_device_bytes() -> int | None:
    """Return the memory in use on the fullest device of this process, or None on a CPU."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    return max((x["bytes_in_use"] for x in stats if "bytes_in_use" in x), default=None)


def format_bytes(size: int) -> str:
    """Return a number of bytes as text with a unit, such as `7.1 GiB`."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size} B"


def check_program_memory(program: Any, mesh: Mesh) -> Any:
    """Return a compiled program if its temporary memory fits into the free memory of the mesh.

    Raises `ConfigError` with both sizes otherwise, before anything runs.
    """
    free = free_bytes(mesh)
    needed = getattr(program.memory_analysis(), "temp_size_in_bytes", 0)
    if free is not None and needed > free:
        raise ConfigError(
            f"the program needs {format_bytes(needed)} on each device beside its state, but "
            f"{format_bytes(free)} are free: take fewer environments, a shorter rollout or "
            "more devices."
        )
    return program
