"""Stop signals, a watchdog against hangs, and a stopwatch."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from podracer.io.text import print_stderr

PREEMPTED = 75
STOPPED = 130
_PR_SET_PDEATHSIG = 1
_THREAD_SECONDS = 5.0  # for threads that go on after the main thread
_RESEND_SECONDS = 0.5  # between a signal whose exit may have been dropped and the same again


def request_signal_at_parent_death(number: int) -> None:
    """Have the kernel send this process a signal when its parent ends, however it ends; Linux only.

    With SIGCONT a process that is stopped wakes up, and can find that it is alone.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)


def exit_despite_threads(code: int) -> None:
    """End the process soon, even if a thread that is no daemon, such as an environment's, goes on.

    Call it last. Python waits for such threads without a limit, before it calls what `atexit` has.
    """
    threads_ended = threading.Event()
    atexit.register(threads_ended.set)

    def exit_late() -> None:
        if not threads_ended.wait(_THREAD_SECONDS):
            threads = set(threading.enumerate()) - {threading.main_thread()}
            names = ", ".join(thread.name for thread in threads if not thread.daemon)
            print_stderr(f"left behind by force: {names}.")
            atexit._run_exitfuncs()
            os._exit(code)

    threading.Thread(target=exit_late, daemon=True).start()


@contextlib.contextmanager
def exit_on_stop() -> Iterator[None]:
    """Exit with 75 on SIGTERM and SIGHUP within the context, wherever the main thread is.

    For what has nothing to save, such as the imports of a run that has not begun. An exit is lost
    in code that drops all exceptions, as `__del__`, callbacks of the garbage collector and some
    imports do. So the signal is sent again until the context ends, to whoever handles it by then.
    """

    class Exit(SystemExit):
        signal: int

    ended = threading.Event()
    senders: list[threading.Thread] = []

    def leave(number: int, _: object) -> None:
        if _is_handled(Exit):
            return
        if not senders:
            senders.append(threading.Thread(target=send_again, args=(number,), daemon=True))
            senders[0].start()
        error = Exit(PREEMPTED)
        error.signal = number
        raise error

    def send_again(number: int) -> None:
        while not ended.wait(_RESEND_SECONDS):
            os.kill(os.getpid(), number)

    def print_dropped(dropped: Any) -> None:
        if not isinstance(dropped.exc_value, Exit):
            previous_hook(dropped)

    previous_hook = sys.unraisablehook
    with _handled(_preemptions(), leave) as is_main_thread:
        if not is_main_thread:
            yield
            return
        sys.unraisablehook = print_dropped
        try:
            yield
        except Exit as error:
            name = signal.Signals(error.signal).name
            print_stderr(f"ended by {name}; there was nothing to save.")
            raise
        finally:
            sys.unraisablehook = previous_hook
            ended.set()
            for thread in senders:  # or a signal could come when it is no longer handled
                thread.join()


def _is_handled(kind: type[BaseException]) -> bool:
    """Return whether an exception of this kind is on its way through `finally` or `except`."""
    error = sys.exc_info()[1]
    while error is not None and not isinstance(error, kind):
        error = error.__context__
    return error is not None


@contextlib.contextmanager
def _handled(numbers: Sequence[int], handler: Callable[[int, Any], None]) -> Iterator[bool]:
    """Handle signals within the context; off the main thread, where yields False, do nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield False
        return
    previous = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield True
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
        looked = time.monotonic()
        while not self._done.wait(interval):
            previous, looked = looked, time.monotonic()
            late = looked - previous - interval  # long if the process was suspended, as by Ctrl-Z
            self._latest = min(looked, self._latest + max(0.0, late))
            silent = looked - self._latest
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
