"""Processes that end with the one that started them, however that ends. Imports no JAX.

What needs Linux does nothing elsewhere, where processes that leave their group may stay behind.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def request_signal_at_parent_death(number: int) -> None:
    """Have the kernel send this process a signal when its parent ends, however it ends; Linux only.

    With SIGCONT a process that is stopped wakes up, and can find that it is alone.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def stop_with_parent() -> None:
    """Send this process SIGTERM when its standard input ends, as a pipe does with the parent."""

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    request_signal_at_parent_death(signal.SIGCONT)  # or a stopped process could not end
    threading.Thread(target=watch, daemon=True).start()


def go_on_guarded() -> None:
    """Go on in a child of this process, which then only guards it; Linux only.

    The guard adopts what the child's descendants leave behind, be it in sessions of their own. It
    kills all of them when the child has ended, of itself or by a signal, see `end_guarded`. Call
    it before the first thread.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    guard, child = os.getpid(), os.fork()
    if child == 0:
        request_signal_at_parent_death(signal.SIGKILL)
        if os.getppid() != guard:  # it died before the line above
            os._exit(1)
        return
    signal.signal(signal.SIGUSR1, lambda *_: _send(child, signal.SIGKILL))
    signal.signal(signal.SIGCONT, lambda *_: _send(child, signal.SIGCONT))
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # whose other ends wait for the child
    pid = status = 0
    while pid != child:
        pid, status = os.wait()
    with contextlib.suppress(ChildProcessError):  # once none is left
        while True:
            for orphan in children():
                _send(orphan, signal.SIGKILL)
            if not os.waitpid(-1, os.WNOHANG)[0]:
                time.sleep(0.001)
    code = os.waitstatus_to_exitcode(status)
    os._exit(128 - code if code < 0 else code)


def end_guarded(guard: subprocess.Popen, seconds: float) -> None:
    """End a process that has gone on guarded, and all that it has started; wait for it."""
    for number in (signal.SIGUSR1, signal.SIGKILL):  # the latter where the guard itself is stopped
        guard.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):  # in a call of the kernel
            guard.wait(seconds)


def children() -> set[int]:
    """Return the ids of this thread's children; none where the system does not tell."""
    return _listed(Path(f"/proc/self/task/{threading.get_native_id()}/children"))


def kill_tree(pid: int) -> None:
    """Kill a process and its descendants, be they in sessions of their own; Linux only."""
    processes = [pid]
    for parent in processes:  # the list grows
        processes += (
            x for task in Path(f"/proc/{parent}/task").glob("*/children") for x in _listed(task)
        )
    for process in processes:
        _send(process, signal.SIGKILL)


def _listed(file: Path) -> set[int]:
    with contextlib.suppress(OSError):
        return set(map(int, file.read_text().split()))
    return set()


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
