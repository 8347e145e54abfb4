"""Stop signals, and a watchdog against hangs."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator

from podracer.io.exits import PREEMPTED, STALLED, STOPPED, handled, preemptions, process
from podracer.io.text import print_stderr


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
            with handled([*preemptions(), signal.SIGINT], self._handle):
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
        if self.exit_code == STOPPED and not process.is_own:
            raise KeyboardInterrupt(self._stopped)
        if self.exit_code and not process.is_own:
            print_stderr(self._stopped)
            raise SystemExit(self.exit_code)

    def abort(self, error: Exception) -> None:
        """Raise an error in the main thread as soon as that can be interrupted.

        Nothing is raised where the signals are not handled, and in a process of our own.
        """
        if self._is_installed and not process.is_own:
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
        elif process.is_own:
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
                if process.is_own:
                    os._exit(STALLED)
                return
