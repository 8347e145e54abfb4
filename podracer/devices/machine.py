"""Processor cores and memory that this process may take of its machine.

Limits of a container or a service are Linux's control groups:
https://docs.kernel.org/admin-guide/cgroup-v2.html, and version 1 as it is still found.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path

_SYSTEM = Path("/")
_NO_LIMIT = 2**62  # bytes; version 1 writes 2^63 less a page where there is no limit


def schedulable_cores() -> int:
    """Return the number of processor cores on which this process may run."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def num_cores() -> int:
    """Return the number of cores for threads and devices: in a container no more than its share."""
    count = schedulable_cores()
    return min(count, cores() or count)


def free_memory(system: Path = _SYSTEM) -> int | None:
    """Return the bytes that the process may still take, None where there is no limit."""
    limits = [free for group in _groups("memory", system) for free in _free_of(group)]
    return min(limits, default=None)


def cores(system: Path = _SYSTEM) -> int | None:
    """Return the number of cores whose time the process may take, None where there is no limit."""
    quotas = [quota for group in _groups("cpu", system) for quota in _quota_of(group)]
    return max(1, math.ceil(min(quotas))) if quotas else None


def _groups(controller: str, system: Path) -> Iterator[Path]:
    """Yield the process's group and those around it; inside of a container some are not there."""
    mounts = system / "sys/fs/cgroup"
    with contextlib.suppress(OSError, ValueError):
        for line in (system / "proc/self/cgroup").read_text().splitlines():
            _, names, path = line.split(":", 2)
            if names and controller not in names.split(","):
                continue
            mount = mounts / controller if names else mounts
            group = mount / path.strip("/")
            yield from (g for g in (group, *group.parents) if g.is_relative_to(mount))


def _free_of(group: Path) -> Iterator[int]:
    """Yield the limit of a group less what it uses; files that it has read can be dropped."""
    for limit, usage, files in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        with contextlib.suppress(OSError, ValueError):  # "max" is no number
            max_bytes = int((group / limit).read_text())
            if max_bytes >= _NO_LIMIT:
                continue
            used = int((group / usage).read_text())
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            yield max(0, max_bytes - used + int(stat.get(files, 0)))


def _quota_of(group: Path) -> Iterator[float]:
    with contextlib.suppress(OSError, ValueError):
        time, period = map(int, (group / "cpu.max").read_text().split())
        yield time / period
    with contextlib.suppress(OSError, ValueError):
        time = int((group / "cpu.cfs_quota_us").read_text())
        if time > 0:  # -1 is no limit
            yield time / int((group / "cpu.cfs_period_us").read_text())
