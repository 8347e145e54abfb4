"""Owner of every thread: the first fault stops them all and is raised, slow actors are named."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any

import jax

from podracer.drivers.sebulba.queue import ClosableQueue, Closed
from podracer.errors import EnvironmentFault
from podracer.io.text import print_stderr

GRACE_SECONDS = 5.0  # at most, for an environment that seems to hang
JOIN_SECONDS = 5.0  # a thread that takes longer to end is left behind, and named
_COMPARED = 5  # rollouts of an actor, whose median time is compared
_SLOW = 5.0  # times slower than the median of the other actors
_LASTING = 30.0  # seconds of rollouts, each as slow: longer than other work keeps a core busy
_LOG = logging.getLogger("podracer")


class StageTimer:
    """Stage that a thread is in, since when, and the seconds spent in each stage.

    A profile of the process shows the stages on the thread's line.
    """

    def __init__(self, *stages: str) -> None:
        self._stages = stages
        self._seconds = dict.fromkeys(stages, 0.0)
        self.current = (stages[0], time.perf_counter())  # one value, as other threads read it
        self._annotation = jax.profiler.TraceAnnotation(stages[0])
        self._annotation.__enter__()

    def start(self, stage: str) -> None:
        """End the current stage and start another."""
        time_now = time.perf_counter()
        previous, since = self.current
        self._seconds[previous] += time_now - since
        self.current = (stage, time_now)
        self._annotation.__exit__(None, None, None)
        self._annotation = jax.profiler.TraceAnnotation(stage)
        self._annotation.__enter__()

    def restart(self) -> None:
        """Start the current stage again, without counting the time that it took so far."""
        self.current = (self.current[0], time.perf_counter())

    def collect(self) -> dict[str, float]:
        """Return the seconds of each stage since the last call."""
        self.start(self.current[0])
        seconds, self._seconds = self._seconds, dict.fromkeys(self._stages, 0.0)
        return seconds


class Stragglers:
    """Actors whose environments are much slower than the others', by their newest rollouts."""

    def __init__(self) -> None:
        self._seconds: dict[str, deque[float]] = {}
        self._slow_seconds: dict[str, float] = {}
        self._named = set[str]()  # in the log

    def record(self, actor: str, seconds: float) -> None:
        """Add the time of a rollout; log an actor that stays slow, once."""
        times = self._seconds.setdefault(actor, deque(maxlen=_COMPARED))
        times.append(seconds)
        if len(times) < _COMPARED or actor in self._named:
            return
        median = statistics.median(times)
        medians = [statistics.median(x) for name, x in self._seconds.items() if name != actor]
        usual = statistics.median(medians) if medians else median
        is_slow = median > _SLOW * usual
        self._slow_seconds[actor] = is_slow * (self._slow_seconds.get(actor, 0.0) + seconds)
        if self._slow_seconds[actor] > _LASTING:
            self._named.add(actor)
            _LOG.warning(
                "the environments of %s are %.0f times slower than other actors', %.3g s for a "
                "rollout: with `driver.policy_lag=None` the others do not wait for them.",
                actor,
                median / usual,
                median,
            )


class Supervisor:
    """Context that starts threads, records their faults, and stops them; no thread outlives it.

    The context raises the first fault of all, the caller's own included. Later faults, or faults
    while the threads are stopping, are only printed. `env_timeout_seconds` bounds the stage
    "environment".
    """

    def __init__(self, env_timeout_seconds: float) -> None:
        self._env_timeout_seconds = env_timeout_seconds
        self._threads: dict[str, tuple[threading.Thread, StageTimer]] = {}
        self._queues: list[ClosableQueue[Any]] = []
        self._hanging_since: dict[str, float] = {}
        self._lock = threading.Lock()
        self._fault: BaseException | None = None
        self._stopping = False

    def register(self, queue: ClosableQueue[Any]) -> None:
        """Have a queue closed when the threads are to stop."""
        self._queues.append(queue)

    def start(
        self, name: str, timer: StageTimer, run: Callable[[], None], close: Callable[[], None]
    ) -> None:
        """Run a component in a thread and then close it. `Closed` from `run` is not a fault."""

        def body() -> None:
            for function in (run, close):  # a fault is recorded before the closing, which may hang
                try:
                    function()
                except BaseException as error:
                    self.fail(name, error)

        timer.restart()
        thread = threading.Thread(target=body, name=f"podracer-{name}", daemon=True)
        thread.start()
        self._threads[name] = (thread, timer)

    def fail(self, component: str, error: BaseException) -> None:
        """Record the error, if it is the first, and close all queues, which stops the threads."""
        with self._lock:
            is_first = not self._stopping and self._fault is None
            if is_first:
                error.component = component  # type: ignore[attr-defined]
                self._fault = error
        self._close_queues()
        if not is_first and not isinstance(error, Closed):
            print_stderr(f"{component}, while stopping: {type(error).__name__}: {error}")

    def check(self) -> None:
        """Raise the first fault, or `EnvironmentFault` if an environment does not answer.

        One that seems to hang gets some seconds more: perhaps the process was suspended.
        """
        time_now = time.perf_counter()
        hanging = [name for name, (_, timer) in self._threads.items() if self._hangs(timer)]
        self._hanging_since = {name: self._hanging_since.get(name, time_now) for name in hanging}
        grace_seconds = min(GRACE_SECONDS, self._env_timeout_seconds)
        for name, since in self._hanging_since.items():
            if time_now - since >= grace_seconds:
                self._report_hang(name)
        if self._fault is not None:
            raise self._fault

    def _report_hang(self, name: str) -> None:
        seconds = time.perf_counter() - self._threads[name][1].current[1]
        print_stderr(f"{name} hangs; all stacks follow.")
        with contextlib.suppress(Exception):  # a notebook's stderr is not a file
            faulthandler.dump_traceback(all_threads=True)
        message = (
            f"{name}: the environment did not answer for {seconds:.0f} s; if it may take as long, "
            "take a longer `driver.env_timeout_seconds`."
        )
        self.fail(name, EnvironmentFault(message))

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
        self._close_queues()
        deadline = time.monotonic() + JOIN_SECONDS
        for name, (thread, timer) in self._threads.items():
            remaining = max(0.0, deadline - time.monotonic())
            thread.join(0.1 if self._hangs(timer) else remaining)
            if thread.is_alive():
                print_stderr(f"left {name} behind in stage {timer.current[0]}.")
        if self._fault is not None and self._fault is not error:
            if isinstance(error, GeneratorExit):  # the consumer has left, for whatever reason
                component, kind = self._fault.component, type(self._fault).__name__  # type: ignore
                print_stderr(f"{component}, after the consumer left: {kind}: {self._fault}")
            else:
                raise self._fault

    def _hangs(self, timer: StageTimer) -> bool:
        stage, since = timer.current
        seconds = time.perf_counter() - since
        return stage == "environment" and seconds > self._env_timeout_seconds

    def _close_queues(self) -> None:
        for queue in self._queues:
            queue.close()
