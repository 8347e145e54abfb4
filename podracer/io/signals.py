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
STALLED = 76
STOPPED = 130
THREAD_SECONDS = 5.0  # for threads that go on after the main thread
PODRACER = ("-m", "podracer.cli.child")
COMPILER = "podracer-compile"  # a thread of this name ends with its program, which nobody awaits


class _Process:
    """Whether this process is the library's own, to end at any moment: see `own_process`."""

    is_own = False


_process = _Process()


@contextlib.contextmanager
def own_process() -> Iterator[None]:
    """Let a second Ctrl-C and a stall end the process at once within the context.

    It is for the command line and for the process of a pod. Elsewhere, as in a notebook, the
    process has variables of the user: there both raise in the main thread.
    """
    previous, _process.is_own = _process.is_own, True
    try:
        yield
    finally:
        _process.is_own = previous


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

    with _handled(_preemptions(), leave):
        yield


@contextlib.contextmanager
def child_process(
    arguments: Sequence[str], program: Sequence[str] = PODRACER, **options: Any
) -> Iterator[subprocess.Popen[str]]:
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

    command = [sys.executable, *program, *arguments]
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
    """Record of preemptions (SIGTERM, SIGHUP) and of Ctrl-C.

    The first Ctrl-C prints what it does, `stopping`. A second one raises `KeyboardInterrupt` in the
    main thread; in a process of our own it ends the process at once. Signals are read from a wakeup
    socket by a thread, so they count even while the main thread is inside a compiled program and
    could not run a Python handler.
    """

    def __init__(
        self,
        stopping: str = "Stopping at the end of this chunk and saving",
        stopped: str = "Stopped and saved.",
    ) -> None:
        self.exit_code: int | None = None
        self._stopping, self._stopped = stopping, stopped
        self._errors: list[BaseException] = []  # to raise in the main thread
        self._raised: BaseException | None = None
        self._own_interrupts = 0  # those that are to make it do so
        self._is_installed = False

    @contextlib.contextmanager
    def installed(self) -> Iterator[StopSignals]:
        """Handle the signals within the context. Off the main thread this does nothing.

        After a signal it ends with `KeyboardInterrupt(stopped)` or, for a preemption, `SystemExit`
        of code 75; in a process of our own it just ends.
        """
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
            with _handled([*_preemptions(), signal.SIGINT], self._handle):
                self._is_installed = True
                yield self
        except Exception as error:
            if self._raised is None or error is self._raised:
                raise
            raise self._raised from error  # callbacks of JAX make other errors of it
        finally:
            self._is_installed = False
            signal.set_wakeup_fd(old_fd)
            sender.close()  # ends the watcher
            watcher.join(timeout=5)
            receiver.close()
        if self.exit_code == STOPPED and not _process.is_own:
            raise KeyboardInterrupt(self._stopped)
        if self.exit_code and not _process.is_own:
            print_stderr(self._stopped)
            raise SystemExit(self.exit_code)

    def abort(self, error: Exception) -> None:
        """Raise an error in the main thread as soon as that can be interrupted.

        Nothing is raised where the signals are not handled, and in a process of our own.
        """
        if self._is_installed and not _process.is_own:
            self.exit_code = STOPPED  # the next Ctrl-C is a second one
            self._raise_in_main_thread(error)

    def _raise_in_main_thread(self, error: BaseException) -> None:
        self._errors.append(error)
        self._own_interrupts += 1
        main_thread = threading.main_thread().ident
        assert main_thread is not None
        signal.pthread_kill(main_thread, signal.SIGINT)  # also ends a system call

    def _handle(self, *_: object) -> None:
        if self._errors:
            self._raised = self._errors.pop()
            raise self._raised

    def _watch(self, receiver: socket.socket) -> None:
        while numbers := receiver.recv(64):
            for number in numbers:
                if number in (signal.SIGTERM, signal.SIGHUP):
                    self.exit_code = self.exit_code or PREEMPTED
                elif number == signal.SIGINT and self._own_interrupts:
                    self._own_interrupts -= 1
                elif number == signal.SIGINT:
                    self._interrupt()

    def _interrupt(self) -> None:
        if self.exit_code != STOPPED:
            self.exit_code = STOPPED
            print_stderr(f"{self._stopping}; interrupt again to stop at once.")
        elif _process.is_own:
            print_stderr("exits at once, without saving.")
            os._exit(STOPPED)
        else:
            self._raise_in_main_thread(KeyboardInterrupt("Stopped at once, without saving."))


class Watchdog:
    """Guard that prints all stacks and calls `on_expiry` if `alive` is not called in time.

    A process of our own then ends with exit code 76. Time in which the process is suspended does
    not count.
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
                if _process.is_own:
                    os._exit(STALLED)
                return


class Stopwatch:
    """Wall-clock seconds by stage; the remaining time is `time_step`, spent in the driver."""

    def __init__(self) -> None:
        self._mark = time.perf_counter()
        self._stages = {"time_compile": 0.0, "time_evaluate": 0.0, "time_save": 0.0}
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

    def lap(self, compile_seconds: float = 0.0, end: float | None = None) -> dict[str, float]:
        """Return the seconds of each stage since the last lap, and start a new lap.

        The driver's time ends at `end`, by default now, and leaves out the seconds for which it
        waited for its program.
        """
        # What another thread saw end may have ended, as it was told, before the last lap did.
        end = max(time.perf_counter() if end is None else end, self._mark)
        seconds = {"time_step": end - self._mark - compile_seconds, **self._stages}
        self._mark = end
        self._stages = dict.fromkeys(self._stages, 0.0)
        return seconds
