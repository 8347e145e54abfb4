"""Stop signals, a watchdog against hangs, and a stopwatch."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from podracer.io.text import print_stderr

PREEMPTED = 75
STOPPED = 130
_THREAD_SECONDS = 5.0  # for threads that go on after the main thread


def exit_despite_threads(code: int) -> NoReturn:
    """End the process soon, after what `atexit` has, even if threads go on.

    Python waits without a limit for threads that are no daemons, such as an environment's. Daemons
    that return from C++ while Python is finalized abort the process, so Python is not finalized.
    """
    threads_ended = threading.Event()

    def exit_late() -> None:
        if not threads_ended.wait(_THREAD_SECONDS):
            threads = set(threading.enumerate()) - {threading.main_thread()}
            names = ", ".join(thread.name for thread in threads if not thread.daemon)
            print_stderr(f"left behind by force: {names}.")
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
            sys.stdout.flush()  # which may be what the signal interrupted
        with contextlib.suppress(OSError):
            os.write(2, text.encode())
        os._exit(PREEMPTED)

    with _handled(_preemptions(), leave):
        yield


@contextlib.contextmanager
def child_process(arguments: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Run `podracer` within the context, its output a pipe; at the end ask it to stop, and wait.

    So does SIGTERM or SIGHUP, on the main thread, which exits with 75 once the command has saved
    and ended. The handler raises nothing, so that none comes between a process and its record. The
    command also saves and ends where this process is killed.
    """
    processes, numbers = list[subprocess.Popen[str]](), list[int]()

    def stop(*signals: Any) -> None:
        numbers.extend(signals[:1])
        for process in processes:
            process.terminate()

    command = [sys.executable, "-m", "podracer.cli.child", *arguments]
    reader, writer = os.pipe()  # whose end, with this process, stops the command
    with (
        _handled(_preemptions(), stop),
        open(reader) as stdin,
        open(writer, "w"),
        subprocess.Popen(
            command, stdin=stdin, stdout=subprocess.PIPE, text=True, **options
        ) as process,
    ):
        processes.append(process)
        try:
            if numbers:
                stop()
            yield process
        finally:
            stop()
    if numbers:
        print_stderr(f"ended by {signal.Signals(numbers[0]).name}, after the command that it ran.")
        raise SystemExit(PREEMPTED)


@contextlib.contextmanager
def _handled(numbers: Sequence[int], handler: Callable[[int, Any], None]) -> Iterator[None]:
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


def _preemptions() -> list[int]:
    """Return the signals of a preemption: SIGTERM, and SIGHUP of a terminal that is closed.

    What is started by `nohup` ignores SIGHUP.
    """
    is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [signal.SIGTERM] if is_ignored else [signal.SIGTERM, signal.SIGHUP]


class StopSignals:
    """Record of preemptions (SIGTERM, SIGHUP) and Ctrl-C; a second Ctrl-C ends the process at once.

    Signals are read from a wakeup socket by a thread, so they count even while the main thread
    is inside a compiled program and could not run a Python handler.
    """

    def __init__(self) -> None:
        self.exit_code: int | None = None

    @contextlib.contextmanager
    def installed(self) -> Iterator[StopSignals]:
        """Handle the signals within the context. Off the main thread this does nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield self
            return
        receiver, sender = socket.socketpair()
        sender.setblocking(False)
        watcher = threading.Thread(
            target=self._watch, args=(receiver,), name="podracer-signals", daemon=True
        )
        watcher.start()
        old_fd = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        try:  # the socket before the handlers, or a signal between them would be lost
            with _handled([*_preemptions(), signal.SIGINT], lambda *_: None):
                yield self
        finally:
            signal.set_wakeup_fd(old_fd)
            sender.close()  # ends the watcher
            watcher.join(timeout=5)
            receiver.close()

    def _watch(self, receiver: socket.socket) -> None:
        while numbers := receiver.recv(64):
            for number in numbers:
                if number == signal.SIGINT and self.exit_code == STOPPED:
                    print_stderr("exits at once, without saving.")
                    os._exit(STOPPED)
                if number in (signal.SIGTERM, signal.SIGHUP):
                    self.exit_code = self.exit_code or PREEMPTED
                elif number == signal.SIGINT:
                    self.exit_code = STOPPED


class Watchdog:
    """Guard that ends the process with exit code 76 if `alive` is not called in time.

    The stacks of all threads are printed. Time in which the process is suspended does not count.
    """

    def __init__(self, seconds: float, on_expiry: Callable[[str], None]) -> None:
        self._seconds, self._on_expiry = seconds, on_expiry
        self._latest = time.monotonic()
        self._done = threading.Event()

    def alive(self) -> None:
        self._latest = time.monotonic()

    def __enter__(self) -> Watchdog:
        self.alive()
        threading.Thread(target=self._watch, name="podracer-watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()

    def _watch(self) -> None:
        interval = min(1.0, self._seconds / 4)
        latest, silent = self._latest, 0.0
        while not self._done.wait(interval):
            # Intervals, not a clock, which goes on while the process is suspended, as by Ctrl-Z.
            silent = silent + interval if self._latest == latest else 0.0
            latest = self._latest
            if silent > self._seconds:
                message = f"no progress for {silent:.0f} s"
                print_stderr(f"{message}; all stacks follow.")
                with contextlib.suppress(Exception):  # a notebook's stderr is not a file
                    faulthandler.dump_traceback(all_threads=True)
                with contextlib.suppress(Exception):
                    self._on_expiry(message)
                os._exit(76)


class Stopwatch:
    """Wall-clock seconds by stage; the remaining time is `time_step`, spent in the driver."""

    def __init__(self) -> None:
        self._mark = time.perf_counter()
        self._stages = {"time_evaluate": 0.0, "time_save": 0.0}
        self._ended = dict.fromkeys(self._stages, self._mark)

    def add(self, stage: str) -> None:
        """Add the time since the last lap or stage to `stage`."""
        time_now = time.perf_counter()
        self._stages[stage] += time_now - self._mark
        self._mark = self._ended[stage] = time_now

    def since(self, stage: str) -> float:
        """Return the seconds since `stage` last ended, or since the start."""
        return time.perf_counter() - self._ended[stage]

    def since_lap(self) -> float:
        """Return the seconds since the last lap, or since the start."""
        return time.perf_counter() - self._mark + sum(self._stages.values())

    def lap(self) -> dict[str, float]:
        """Return the seconds of each stage since the last lap, and start a new lap."""
        time_now = time.perf_counter()
        seconds = {"time_step": time_now - self._mark, **self._stages}
        self._mark = time_now
        self._stages = dict.fromkeys(self._stages, 0.0)
        return seconds
