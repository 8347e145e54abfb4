"""Exit of a process: its codes, on a signal that finds nothing to save, and despite threads."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from podracer.io.text import print_stderr

PREEMPTED = 75
STALLED = 76
STOPPED = 130
THREAD_SECONDS = 5.0  # for threads that go on after the main thread
COMPILER = "podracer-compile"  # a thread of this name ends with its program, which nobody awaits


# Whether this process is the library's own, to end at any moment: see `own_process`.
process = types.SimpleNamespace(is_own=False)


@contextlib.contextmanager
def own_process() -> Iterator[None]:
    """Let a second Ctrl-C and a stall end the process at once within the context.

    It is for the command line and for the process of a pod. Elsewhere, as in a notebook, the
    process has variables of the user: there both raise in the main thread.
    """
    previous, process.is_own = process.is_own, True
    try:
        yield
    finally:
        process.is_own = previous


def how_killed(number: int) -> str:
    """Return the name of the signal that ended a process, and who may have sent it."""
    name = {item.value: item.name for item in signal.Signals}.get(number, f"signal {number}")
    return f"{name}, as where memory has run out" if number == signal.SIGKILL else name


def exit_despite_threads(code: int) -> NoReturn:
    """End the process soon, after what `atexit` has, even if threads go on.

    Python waits without a limit for threads that are no daemons, such as an environment's. Daemons
    that return from C++ while Python is finalized abort the process, so Python is not finalized.
    """
    threads_ended = threading.Event()

    def exit_late() -> None:
        if not threads_ended.wait(THREAD_SECONDS):
            threads = set(threading.enumerate()) - {threading.main_thread()}
            names = [thread.name for thread in threads if not thread.daemon]
            if names := [name for name in names if not name.startswith(COMPILER)]:
                print_stderr(f"left behind by force: {', '.join(names)}.")
            atexit._run_exitfuncs()
            exit_at_once(code)

    threading.Thread(target=exit_late, daemon=True).start()
    threading._shutdown()  # type: ignore[attr-defined]  # waits, as Python does
    threads_ended.set()
    atexit._run_exitfuncs()
    exit_at_once(code)


def exit_at_once(code: int) -> NoReturn:
    """End the process with its output written; threads and what `atexit` has are left out."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


@contextlib.contextmanager
def exit_on_stop() -> Iterator[None]:
    """Exit with 75 on SIGTERM and SIGHUP within the context, as soon as Python runs a handler.

    For what has nothing to save, such as the imports of a run that has not begun. The handler
    raises nothing: imports and callbacks drop exceptions, or make other errors of them, and C++
    aborts.
    """

    def leave(number: int, _: object) -> None:
        text = f"podracer: ended by {signal.Signals(number).name}; there was nothing to save.\n"
        with contextlib.suppress(Exception):
            sys.stdout.flush()  # the signal may have interrupted it
        with contextlib.suppress(OSError):
            os.write(2, text.encode())
        os._exit(PREEMPTED)

    with handled(preemptions(), leave):
        yield


@contextlib.contextmanager
def handled(numbers: Sequence[int], handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Handle signals within the context; off the main thread, do nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, old in previous.items():
            signal.signal(number, old)


def preemptions() -> list[int]:
    """Return the signals of a preemption: SIGTERM, and SIGHUP of a terminal that is closed.

    What is started by `nohup` ignores SIGHUP.
    """
    is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGTERM] if is_ignored else [signal.SIGTERM, signal.SIGHUP]
