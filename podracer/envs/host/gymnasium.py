"""Any environment of Gymnasium (Towers 2024) on the host, stepped by a pool of processes.

A worker that dies or hangs is replaced, an environment that raises or returns bad data is
made again; only the affected rows lose their episode. The workers run `gymnasium_worker.py`. A
`LocalBatch` has one `Worker` in this process, where other processes may not find the class.
"""

from __future__ import annotations

import abc
import ast
import contextlib
import dataclasses
import inspect
import itertools
import os
import pickle
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import numpy as np

from podracer.arguments import named
from podracer.envs.host import gymnasium_spec, gymnasium_worker
from podracer.envs.host.gymnasium_worker import FAULT_KINDS, Factory, SharedMemory, WorkerSetup
from podracer.errors import ConfigError, EnvironmentFault
from podracer.fields import bounded, check_ranges
from podracer.io.exits import how_killed
from podracer.io.processes import end_guarded
from podracer.types import EnvironmentSpec, TimeStep

if TYPE_CHECKING:
    from gymnasium import Env

# A worker steps one environment at a time: more threads would only compete with other workers.
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_IMPORT_SECONDS = 120.0  # for the environment's code
FORK_SECONDS = 10.0  # once it is imported
_OPTIONS = (
    "an option of a class goes into functools.partial(CLASS, NAME=VALUE), and of a registered id "
    "into options=((NAME, VALUE),)."
)
_GUARD = 'put what is not a definition there under `if __name__ == "__main__":`, or take workers=0.'


def gymnasium(name: str, **options: Any) -> Gymnasium:
    """Return the environment `name` of Gymnasium's registry.

    `options` are fields of `Gymnasium` and the environment's own; `observe` joins names by `+`.
    """
    fields = {field.name for field in dataclasses.fields(Gymnasium)} - {"environment", "options"}
    settings = {key: options.pop(key) for key in fields & options.keys()}
    if isinstance(observe := settings.get("observe"), str):
        settings["observe"] = tuple(observe.split("+"))
    return Gymnasium(name, tuple(sorted(options.items())), **settings)


@partial(named, advice=_OPTIONS)
@dataclasses.dataclass(frozen=True)
class Gymnasium:
    """Environments of Gymnasium, as `HostEnvironments`.

    Observations may be Box (64 bits arrive as 32), MultiBinary, Discrete and MultiDiscrete (as
    indices from 0, which a torso turns into one-hot vectors), and Dict and Tuple of them; actions
    Discrete, or with one axis MultiDiscrete, MultiBinary or a Box of floats with finite bounds.
    Raises `ConfigError` for others, and where the environment cannot be made.
    """

    environment: str | Callable[[], Env]
    """Registered id such as `"CartPole-v1"` (or `"module:Name-v0"`, where the module registers it),
    or a class or function that makes one environment when called without arguments. It must be
    importable by name in another process, as must be the function of a `functools.partial`; in a
    script that needs `if __name__ == "__main__":` around all code that is not a definition."""
    options: tuple[tuple[str, Any], ...] = ()
    """Pairs of the environment's own options and their values, for a registered id."""
    observe: tuple[str, ...] = ()
    """Entries of dictionaries of observations that agents see; empty for all of them."""
    pictures: bool = False
    """Whether observations are dictionaries of the `observation` and of a `picture`, uint8
    `[H, W, 3]`, that `render` draws."""
    step_seconds: float = bounded(10.0, low=1e-3)
    """Longest time that one environment's `step` may take, in seconds, before it is replaced; half
    of Sebulba's `env_timeout_seconds` if that is not longer."""
    reset_seconds: float = bounded(60.0, low=1e-3)
    """Longest time that making and resetting one environment may take, in seconds."""
    max_restarts: int = bounded(100)
    """Largest number of restarts of rows or workers after faults, over the life of a batch."""
    workers: int | None = None
    """0 steps the environments in this process, each batch in the thread that calls it: so may
    classes that are defined in a notebook, or in a script without that line. An environment that
    hangs or crashes then takes the run with it. One that draws from `random` or `np.random`, whose
    generators are this process's own, follows no seed. None starts the processes that `make` asks
    for."""

    def __post_init__(self) -> None:
        check_ranges(self, "")
        if not (isinstance(self.environment, str) or callable(self.environment)):
            raise ConfigError(
                f"{self.environment!r} is neither a registered id nor something to call, such as "
                "the class of an environment."
            )
        if self.workers not in (0, None):
            raise ConfigError(
                f"workers must be 0, for this process, or None, not {self.workers}: a driver says "
                "how many processes there are (`driver.threads_per_actor`)."
            )
        if isinstance(self.options, dict):
            pairs = tuple(self.options.items())
            raise ConfigError(f"Gymnasium.options are pairs: write {pairs}.")
        if not all(isinstance(x, tuple) and len(x) == 2 for x in self.options):
            raise ConfigError(f"Gymnasium.options are pairs: write {(self.options,)}.")
        try:
            hash(self.options)
        except TypeError:
            raise ConfigError(
                f"options of gymnasium:{self.environment} must be numbers and texts: for lists and "
                "dictionaries give functools.partial(gymnasium.make, ID, ...) as the environment."
            ) from None
        self.inspect()

    def inspect(self) -> tuple[EnvironmentSpec, WorkerSetup]:
        """Return what one environment declares, and what workers need to step such ones."""
        factory = Factory(self.environment, self.options, self.observe, self.pictures)
        return gymnasium_spec.inspect_environment(factory, in_process=self.workers == 0)

    @property
    def spec(self) -> EnvironmentSpec:
        return self.inspect()[0]

    def with_deadline(self, seconds: float) -> Gymnasium:
        """Return these environments with a `step_seconds` that ends before a driver's deadline."""
        if self.step_seconds < seconds:
            return self
        return dataclasses.replace(self, step_seconds=seconds / 2)

    def with_pictures(self) -> Gymnasium:
        """Return the same environments with what their `render` draws, see `Features`."""
        # pygame, which many draw with, needs no screen and no sound card, and greets no one.
        os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
        os.environ.setdefault("SDL_AUDIODRIVER", "dummy")
        os.environ.setdefault("SDL_VIDEODRIVER", "dummy")
        return dataclasses.replace(self, pictures=True)

    def make(self, num_envs: int, num_threads: int) -> GymnasiumBatch | LocalBatch:
        """Make `num_envs` environments in `num_threads` processes, no more than environments.

        Raises `ConfigError` for numbers below 1, and inside one of those processes.
        """
        if num_envs < 1 or num_threads < 1:
            raise ConfigError(
                f"num_envs and num_threads must be 1 or more, not {num_envs} and {num_threads}."
            )
        check_script(self)
        spec, setup = self.inspect()
        num_parts = 1 if self.workers == 0 else min(num_threads, num_envs)
        parts = np.array_split(np.arange(num_envs), num_parts)
        setup = dataclasses.replace(
            setup,
            row_ranges=tuple((int(part[0]), int(part[-1]) + 1) for part in parts),
            step_seconds=self.step_seconds,
            reset_seconds=self.reset_seconds,
            max_restarts=self.max_restarts,
        )
        return (LocalBatch if self.workers == 0 else GymnasiumBatch)(spec.name, setup)


def check_script(env: Any) -> None:
    """Raise `ConfigError` where workers start the training again, or would: they must not train.

    They import the script that defines their class, so the calling statement must be under an `if`.
    """
    if gymnasium_worker.inside_worker:
        raise ConfigError(f"A worker has imported the script that starts the training: {_GUARD}")
    if not isinstance(env, Gymnasium) or not env.inspect()[1].main:
        return
    frame = inspect.currentframe()
    while frame and (frame.f_code.co_name, frame.f_globals["__name__"]) != ("<module>", "__main__"):
        frame = frame.f_back
    if frame is None:
        return
    with contextlib.suppress(OSError, SyntaxError, ValueError):
        tree = ast.parse(Path(frame.f_code.co_filename).read_text(encoding="utf-8"))
        for statement in tree.body:
            is_here = statement.lineno <= frame.f_lineno <= (statement.end_lineno or 0)
            if is_here and not isinstance(statement, ast.If):
                raise ConfigError(
                    f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}, would start "
                    f"again in every worker that imports it: {_GUARD}"
                )


def timestep_of(setup: WorkerSetup, shared: SharedMemory) -> TimeStep:
    """Return the timestep of a batch, whose arrays are views of the memory."""
    observation = jax.tree.map(lambda leaf: shared.observation[leaf.name], setup.observation)
    fields = (shared.reward, shared.discount, shared.first, shared.last)
    return TimeStep(observation, *fields)  # type: ignore[arg-type]


class _Batch(abc.ABC):
    """A batch of environments, as a `HostEnvironment`; subclasses say where they are stepped.

    `faults` counts the faults by kind, `first_faults` has a line on the first of each kind. After
    an `EnvironmentFault` everything is freed. Timesteps are views of memory that the next step
    overwrites, and `jax.device_put` on a CPU may share it: copy arrays that are kept (`jnp.array`).
    """

    def __init__(self, name: str, setup: WorkerSetup, shared: SharedMemory) -> None:
        self.name, self._setup, self._shared = name, setup, shared
        self.faults: dict[str, int] = dict.fromkeys(FAULT_KINDS, 0)
        self.first_faults = dict[str, str]()
        self._timestep = timestep_of(setup, shared)
        self._is_reset = self._closed = False

    def reset(self, seed: int, indices: np.ndarray, start: int) -> TimeStep:
        """Start again, in new environments. Raises `EnvironmentFault`, also after `close`."""
        if self._closed:
            self._fail("the environments are closed.")
        self._shared.begin(seed, indices, start)
        self._begin()
        self._is_reset = True
        return self._timestep

    def step(self, action: np.ndarray) -> TimeStep:
        """Step every row. Raises `EnvironmentFault` where too many restarts were needed."""
        if self._closed:
            self._fail("the environments are closed.")
        if not self._is_reset:
            self._fail("`reset` must come before `step`.")
        np.copyto(self._shared.action, action, casting="same_kind")
        self._advance()
        return self._timestep

    def close(self) -> None:
        """End all environments, within seconds also processes that hang, and free the memory."""
        if not self._closed:
            self._closed = True
            self._end()
            del self._shared, self._timestep

    @abc.abstractmethod
    def _begin(self) -> None:
        """Make and reset every environment."""

    @abc.abstractmethod
    def _advance(self) -> None:
        """Step every environment by the actions in the memory."""

    @abc.abstractmethod
    def _end(self) -> None:
        """End every environment, and free what a subclass has."""

    def _fail(self, reason: str) -> NoReturn:
        self.close()
        raise EnvironmentFault(f"{self.name}: {reason}")

    def _note_faults(self, faults: Sequence[tuple[int, str, str]]) -> None:
        """Count faults, each a row, kind and text. Raises `EnvironmentFault` for too many."""
        shared, setup = self._shared, self._setup
        for row, kind, text in faults:
            self.faults[kind] += 1
            line = f"environment {shared.env_index[row]}: {gymnasium_worker.one_line(text)}"
            self.first_faults.setdefault(kind, line)
        limit = gymnasium_worker.MAX_CONSECUTIVE_FAILURES
        exhausted = [x for x in faults if shared.consecutive_failures[x[0]] >= limit]
        if exhausted:
            reason = f"restarted {limit} times without one good step between, the last time"
        elif sum(self.faults.values()) > setup.max_restarts:
            reason = (
                f"restarted beyond the {setup.max_restarts} that all rows may need together "
                "(`max_restarts`),"
            )
        else:
            return
        row, kind, text = (exhausted or faults)[-1]
        worker = next(number for number, (_, end) in enumerate(setup.row_ranges) if row < end)
        remedy = (
            "\nMore restarts or slower steps are allowed by options after the environment's name: "
            f",max_restarts={10 * setup.max_restarts + 10} or "
            f",step_seconds={6 * setup.step_seconds:g}"
        )
        self._fail(
            f"row {row} of worker {worker} (environment {shared.env_index[row]} of the run) was "
            f"{reason} because of the fault `{kind}`.\n{text}"
            f"{'' if kind in gymnasium_worker.BAD_DATA_FAULTS else remedy}"
        )


class GymnasiumBatch(_Batch):
    """A batch of environments in processes of their own; `pids` are the workers' process ids."""

    def __init__(self, name: str, setup: WorkerSetup) -> None:
        self.pids = [0] * len(setup.row_ranges)
        self._channels: dict[int, socket.socket] = {}  # to each worker
        self._memory = gymnasium_worker.anonymous_file()
        try:
            super().__init__(name, setup, gymnasium_worker.map_shared_memory(self._memory, setup))
            self._start_fork_server()
        except BaseException:
            os.close(self._memory)
            raise

    def _begin(self) -> None:
        if self._channels:
            self._stop_fork_server()
            self._start_fork_server()
        for worker in range(len(self.pids)):
            self._fork_worker(worker)
        self._await_workers()

    def _advance(self) -> None:
        self._shared.deadline[:] = time.monotonic() + self._setup.step_seconds
        for channel in self._channels.values():
            with contextlib.suppress(OSError):  # a death is detected when the reply is awaited
                channel.send(gymnasium_worker.STEP)
        self._await_workers()

    def _end(self) -> None:
        self._stop_fork_server()
        for channel in self._channels.values():
            channel.close()
        os.close(self._memory)

    def _await_workers(self) -> None:
        """Wait for replies, and replace workers until every row has a timestep."""
        workers: Iterable[int] = range(len(self.pids))
        while any((replies := {x: self._await_worker(x) for x in workers}).values()):
            workers = [worker for worker, reply in replies.items() if isinstance(reply, str)]
            for worker in workers:
                replies[worker] = [self._replace_worker(worker, replies[worker])]
            self._note_faults([*itertools.chain(*replies.values())])

    def _await_worker(self, worker: int) -> Any:
        """Wait for a worker; return the faults in its rows, or "died" or "hung"."""
        channel = self._channels[worker]
        while True:
            seconds_left = self._shared.deadline[worker] - time.monotonic()
            channel.settimeout(max(seconds_left, 0.0))
            try:
                return gymnasium_worker.receive(channel)
            except (TimeoutError, BlockingIOError):
                if self._shared.deadline[worker] < time.monotonic():  # it may have been extended
                    return "hung"
            except (OSError, ValueError):  # or half of a line
                return "died"

    def _replace_worker(self, worker: int, kind: str) -> tuple[int, str, str]:
        """Start another worker in place of one that died or hung; return the fault."""
        rows = slice(*self._setup.row_ranges[worker])
        self._shared.restart(rows)
        code = os.waitstatus_to_exitcode(self._fork_worker(worker))
        text = f"The process ended with {how_killed(-code) if code < 0 else code}."
        if kind == "hung":
            call = gymnasium_worker.CALLS[self._shared.call[worker]]
            seconds = getattr(self._setup, f"{call}_seconds")
            text = f"`{call}` had not returned after {seconds:g} s (`{call}_seconds`)."
        return rows.start, kind, text

    def _fork_worker(self, worker: int) -> int:
        """Start a worker; return the wait status of the one whose place it takes."""
        limit = gymnasium_worker.MAX_CONSECUTIVE_FAILURES
        for _ in range(limit):
            if worker in self._channels:
                self._channels[worker].close()
            self._channels[worker], worker_end = socket.socketpair()
            with worker_end, contextlib.suppress(OSError):
                number = worker.to_bytes(4, "little")
                socket.send_fds(self._control, [number], [worker_end.fileno()])
                self.pids[worker], status, problem = gymnasium_worker.receive(self._control)
                if problem:
                    self._fail(f"a worker cannot import the environment.\n{problem}")
                self._control.settimeout(FORK_SECONDS)
                self._shared.deadline[worker] = time.monotonic() + self._setup.reset_seconds
                return status
            self._stop_fork_server()
            self._start_fork_server()
        self._fail(f"the process that starts the workers died or hung {limit} times.")

    def _start_fork_server(self) -> None:
        """Start it without waiting; it imports until its first reply is awaited."""
        self._control, server_end = socket.socketpair()
        self._control.settimeout(_IMPORT_SECONDS)
        variables = dict.fromkeys(_ONE_THREAD, "1") | os.environ
        variables["JAX_PLATFORMS"] = "cpu"  # environments that use JAX leave the run its GPU
        with server_end, tempfile.TemporaryFile() as setup:
            pickle.dump(self._setup, setup)
            setup.seek(0)
            descriptors = (server_end.fileno(), self._memory)
            command = gymnasium_worker.command(f"run_fork_server{descriptors}")
            try:
                self._fork_server = subprocess.Popen(
                    command, stdin=setup, pass_fds=descriptors, env=variables
                )
            except BaseException:
                self._control.close()
                raise

    def _stop_fork_server(self) -> None:
        """End the fork server, which ends the workers."""
        for channel in self._channels.values():
            with contextlib.suppress(OSError):
                channel.shutdown(socket.SHUT_RDWR)
        with self._control, contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)
            self._control.settimeout(2 * gymnasium_worker.CLOSE_SECONDS)
            while self._control.recv(64):
                pass
        # It has closed its end, or hangs.
        end_guarded(self._fork_server, gymnasium_worker.CLOSE_SECONDS)


class LocalBatch(_Batch):
    """A batch of environments that the calling thread steps.

    An environment that raises or returns bad data loses its episode, as in a process of its own.
    One that hangs is only noticed by the driver, and one that crashes ends the process.
    """

    def __init__(self, name: str, setup: WorkerSetup) -> None:
        super().__init__(name, setup, gymnasium_worker.map_shared_memory(-1, setup))
        self._worker = gymnasium_worker.Worker(0, setup, setup.factory, self._shared)

    def _begin(self) -> None:
        self._call(self._worker.reset)

    def _advance(self) -> None:
        self._call(self._worker.step)

    def _call(self, function: Callable[[], None]) -> None:
        with np.errstate(over="ignore"):  # a fault, as infinity is, and no warning
            function()
        if self._worker.faults:
            self._note_faults(self._worker.faults)

    def _end(self) -> None:
        self._worker.close()
        del self._worker
