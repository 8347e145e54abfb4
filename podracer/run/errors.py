"""Errors of a run: which component failed, and with which exit code the process ends."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import traceback
from collections.abc import Iterator
from typing import Any

import jax

from podracer.devices.peers import LOST, PeerLostError
from podracer.errors import ConfigError, PodracerError, StorageError
from podracer.io.exits import STALLED


class DeviceError(PodracerError):
    """The accelerator failed, does not start, or ran out of memory."""

    exit_code = 71


class StallError(PodracerError):
    """A chunk, an evaluation or a save has not ended in time."""

    exit_code = STALLED
    component = "watchdog"


_NO_PLATFORM = re.compile("Unable to initialize backend '([^']*)': (.*)")
_PEERS = re.compile("Gloo|[Cc]oordination|[Bb]arrier")
_DISK = (
    errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ESTALE,
)  # fmt: skip


@contextlib.contextmanager
def tag_component(name: str) -> Iterator[None]:
    """Tag errors raised within the context with a component's name, unless they have one."""
    try:
        yield
    except Exception as error:
        if not hasattr(error, "component"):
            error.component = name  # type: ignore[attr-defined]
        raise


def classify_error(error: Exception) -> Exception:
    """Return the error of the right exit code for a device, memory or a file; others unchanged."""
    if isinstance(error, PodracerError):
        return error
    text = str(error).strip() or type(error).__name__
    first_line = text.splitlines()[0][:300]
    is_of_jax = isinstance(error, jax.errors.JaxRuntimeError)
    # An array that is read raises it as a ValueError.
    is_of_peer = isinstance(error, jax.errors.JaxRuntimeError | ValueError) and _PEERS.search(text)
    if isinstance(error, MemoryError):
        failure = DeviceError(f"out of memory: take fewer environments. ({first_line})")
    elif isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        failure = ConfigError(f"a name is too long for a file: {_name(error)[:60]}...")
    elif isinstance(error, OSError) and (error.filename or error.errno in _DISK):
        failure = StorageError(": ".join(filter(None, [_name(error), f"{error.strerror}."])))
    elif is_of_jax and "RESOURCE_EXHAUSTED" in text:
        advice = "take fewer environments, a shorter rollout or more devices."
        failure = DeviceError(f"out of device memory: {advice} ({first_line})")
    elif is_of_peer and jax.process_count() > 1:
        failure = PeerLostError(f"{LOST} ({first_line})")
    elif (start := _NO_PLATFORM.match(first_line)) and isinstance(error, RuntimeError):
        detail = start[2]
        if "gloo" in detail:  # it connects the processes of a run
            detail = "this machine has no address for its own name, see /etc/hosts."
        failure = DeviceError(f"JAX cannot start the platform {start[1]}: {detail}")
    elif isinstance(error, AssertionError) and _is_raised_in(error, "jax._src.xla_bridge"):
        platforms = os.environ.get("JAX_PLATFORMS", "")
        failure = DeviceError(f"this machine has no device of JAX_PLATFORMS={platforms}.")
    elif is_of_jax and ("DATA_LOSS" in text or "INTERNAL" in text):
        failure = DeviceError(f"the device failed: resume on a healthy one. ({first_line})")
    else:
        return error
    failure.__cause__ = error
    return failure


def _is_raised_in(error: Exception, module: str) -> bool:
    """Return whether a module raised an error: for those that say nothing of themselves."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_globals.get("__name__") == module


def _name(error: OSError) -> str:
    path: Any = "" if error.filename is None else error.filename
    return os.fsdecode(path) if isinstance(path, str | bytes | os.PathLike) else str(path)
