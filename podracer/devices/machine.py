"""Processor cores of this machine, and whether JAX can run on it."""

from __future__ import annotations

import functools
import os
import resource
import sys
import threading
from pathlib import Path

from podracer.devices import cgroups
from podracer.errors import ConfigError


def schedulable_cores() -> int:
    """Return the number of processor cores on which this process may run."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def num_cores() -> int:
    """Return the number of cores for threads and devices: in a container no more than its share."""
    count = schedulable_cores()
    return min(count, cgroups.cores() or count)


@functools.cache
def check_machine() -> None:
    """Raise `ConfigError` on a machine where JAX would abort, or fail without saying why.

    It starts threads for each core and some more.
    """
    if sys.platform == "linux" and not Path("/proc/cpuinfo").exists():
        raise ConfigError("JAX on a CPU needs /proc/cpuinfo, which is not there: mount /proc.")
    release, started = threading.Event(), list[threading.Thread]()
    try:
        for _ in range(32 + 2 * (os.cpu_count() or 1)):
            started.append(threading.Thread(target=release.wait))
            started[-1].start()
    except RuntimeError:
        is_memory = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
        limit = "memory (ulimit -v)" if is_memory else "processes of this user (ulimit -u)"
        raise ConfigError(
            f"only {len(started) - 1} threads can be started, and a run needs more: raise the "
            f"limit of {limit} or of the container."
        ) from None
    finally:
        release.set()
        for thread in started:
            if thread.ident is not None:
                thread.join()
