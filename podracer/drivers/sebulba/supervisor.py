"""Owns every thread: the first fault stops them all and is the one that the run ends with."""

from __future__ import annotations

import contextlib
import faulthandler
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from podracer.drivers.sebulba.queue import Closed
from podracer.types import EnvironmentFault

JOIN_SECONDS = 5.0  # a thread that takes longer to end is left behind, and named


class Closable(Protocol):
    """A queue."""

    def close(self) -> None: ...


class Stages:
    """What a thread is doing and since when, and how its time was spent."""

    def __init__(self, *names: str) -> None:
        self.stage = names[0]
        self.since = time.perf_counter()
        self._names = names
        self._seconds = dict.fromkeys(names, 0.0)

    def enter(self, stage: str) -> None:
        """The stage before ends now."""
        now = time.perf_counter()
        self._seconds[self.stage] += now - self.since
        self.stage, self.since = stage, now

    def take(self) -> dict[str, float]:
        """Seconds of each stage that has ended since the last time."""
        self.enter(self.stage)
        seconds, self._seconds = self._seconds, dict.fromkeys(self._names, 0.0)
        return seconds


class Supervisor:
    """Starts threads, hears of their faults, and stops them. A context: nothing outlives it.

    The first fault of all, the caller's own included, is the one that comes out of the context.
    What components meet after that, or after the order to stop, is only printed.
    """

    def __init__(self, step_seconds: float) -> None:
        self._step_seconds = step_seconds
        self._threads: dict[str, tuple[threading.Thread, Stages]] = {}
        self._closables: list[Closable] = []
        self._lock = threading.Lock()
        self._fault: BaseException | None = None
        self._stopping = False

    def owns(self, closable: Closable) -> None:
        """Close this when the threads are to stop."""
        self._closables.append(closable)

    def start(
        self, name: str, stages: Stages, run: Callable[[], None], close: Callable[[], None]
    ) -> None:
        """Run a component, and then close it, in a thread. `Closed` is its order to end."""

        def body() -> None:
            for part in (run, close):  # a fault is known before the closing, which may hang
                try:
                    part()
                except BaseException as error:
                    self.fail(name, error)

        stages.since = time.perf_counter()
        thread = threading.Thread(target=body, name=f"podracer-{name}", daemon=True)
        self._threads[name] = (thread, stages)
        thread.start()

    def fail(self, component: str, error: BaseException) -> None:
        """Note a fault, if it is the first, and have everything stop. `Closed` never is."""
        with self._lock:
            late = self._stopping or self._fault is not None
            if not late:
                error.component = component  # type: ignore[attr-defined]
                self._fault = error
        self._close()
        if late and not isinstance(error, Closed):
            print(
                f"podracer: {component}, while all stopped: {type(error).__name__}: {error}",
                file=sys.stderr,
            )

    def check(self) -> None:
        """Raise the first fault, or one for an environment that does not answer."""
        now = time.perf_counter()
        for name, (_, stages) in self._threads.items():
            silent = now - stages.since
            if stages.stage == "environment" and silent > self._step_seconds:
                print(f"podracer: {name} hangs; all stacks follow.", file=sys.stderr, flush=True)
                with contextlib.suppress(Exception):  # a notebook's stderr is no file
                    faulthandler.dump_traceback(all_threads=True)
                self.fail(
                    name,
                    EnvironmentFault(f"{name}: the environment did not answer for {silent:.0f} s."),
                )
        if self._fault is not None:
            raise self._fault

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, Exception) and error is not self._fault:
            self.fail("learner", error)
        with self._lock:
            self._stopping = True
        self._close()
        deadline = time.monotonic() + JOIN_SECONDS
        for name, (thread, stages) in self._threads.items():
            patience = 0.1 if stages.stage == "environment" and self._hangs(stages) else None
            thread.join(max(0.0, deadline - time.monotonic()) if patience is None else patience)
            if thread.is_alive():
                print(f"podracer: left {name} behind in stage {stages.stage}.", file=sys.stderr)
        if self._fault is not None and self._fault is not error:
            raise self._fault

    def _hangs(self, stages: Stages) -> bool:
        return time.perf_counter() - stages.since > self._step_seconds

    def _close(self) -> None:
        for closable in self._closables:
            closable.close()
