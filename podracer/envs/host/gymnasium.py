"""Any environment of Gymnasium (Towers 2024) on the host, each in one of a pool of processes.

A worker that dies or hangs is replaced, an environment that raises or returns bad data is made
anew; only the rows concerned lose their episode. `gymnasium_worker.py` is the other side.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import numpy as np

from podracer.envs.host import gymnasium_worker as gym_worker
from podracer.envs.host.gymnasium_worker import (
    CLOSE_SECONDS,
    DONE,
    KINDS,
    LIMIT,
    REPLY,
    Leaf,
    Setup,
)
from podracer.io.names import nearest
from podracer.types import (
    ArraySpec,
    ConfigError,
    Continuous,
    Discrete,
    EnvironmentFault,
    EnvironmentSpec,
    TimeStep,
)

if TYPE_CHECKING:
    from gymnasium import Env

_NURSERY = """
import json, socket, sys
sys.path[:] = json.loads(sys.argv[1])
from podracer.envs.host.gymnasium_worker import nursery
nursery(socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3]))
"""
_IMPORT_SECONDS = 120.0  # for the environment's code
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_NARROWER = {"float64": "float32", "float128": "float32", "int64": "int32", "uint64": "uint32"}


def gymnasium(name: str, **options: Any) -> Gymnasium:
    """The environment `name` of Gymnasium's registry; `options` are the fields of `Gymnasium`."""
    return Gymnasium(name, **options)


@dataclasses.dataclass(frozen=True)
class Gymnasium:
    """Environments of Gymnasium, as `HostEnvironments`.

    `environment` is a registered id such as `"CartPole-v1"` (or `"module:Name-v0"`, where the
    module registers it), or a class or function that makes one environment when called without
    arguments. It must be importable by name in another process, as must be the function of a
    `functools.partial`; in a script that needs `if __name__ == "__main__":` around the rest.

    Observations may be Box (64 bits arrive as 32), Discrete (int32), and Dict and Tuple of them;
    actions Discrete, or a Box of floats with one axis and finite bounds. Raises `ConfigError` for
    others, and where the environment cannot be made.
    """

    environment: str | Callable[[], Env]
    step_seconds: float = 10.0  # that one environment's `step` may take
    reset_seconds: float = 60.0  # that making and resetting one environment may take
    restarts: int = 100  # that a batch may need in all its life, of single rows or of workers

    def __post_init__(self) -> None:
        for field, least in (("step_seconds", 1e-3), ("reset_seconds", 1e-3), ("restarts", 0)):
            value = getattr(self, field)
            if not least <= value < float("inf"):
                raise ConfigError(f"{field} must be finite and {least} or more, not {value}.")
        _load(self.environment)

    @property
    def spec(self) -> EnvironmentSpec:
        return _load(self.environment)[0]

    def make(self, num_envs: int, num_threads: int) -> GymnasiumBatch:
        """`num_envs` environments in `num_threads` processes, no more than environments.

        Raises `ConfigError` for numbers below 1, and inside one of those processes.
        """
        if num_envs < 1 or num_threads < 1:
            raise ConfigError(
                f"num_envs and num_threads must be 1 or more, not {num_envs} and {num_threads}."
            )
        if gym_worker.inside:
            raise ConfigError(
                "A worker has imported the script that starts the training: put what is not a "
                'definition there under `if __name__ == "__main__":`.'
            )
        spec, setup = _load(self.environment)
        parts = np.array_split(np.arange(num_envs), min(num_threads, num_envs))
        setup = dataclasses.replace(
            setup,
            rows=tuple((int(part[0]), int(part[-1]) + 1) for part in parts),
            step_seconds=self.step_seconds,
            reset_seconds=self.reset_seconds,
        )
        return GymnasiumBatch(spec.name, setup, self.restarts)


class GymnasiumBatch:
    """A batch of environments in processes of their own, as a `HostEnvironment`.

    `faults` counts what went wrong, by kind; `pids` are the workers' process ids. After an
    `EnvironmentFault` everything is freed. Timesteps are views of memory that the next step
    overwrites, and `jax.device_put` on a CPU may share it: copy what must last (`jnp.array`).
    """

    def __init__(self, name: str, setup: Setup, restarts: int) -> None:
        self.name = name
        self.faults = dict.fromkeys(gym_worker.KINDS, 0)
        self.pids = [0] * len(setup.rows)
        self._setup, self._restarts = setup, restarts
        self._channels: list[socket.socket | None] = [None] * len(setup.rows)
        self._memory = _anonymous_file()
        self._shared = gym_worker.attach(self._memory, setup)
        self._timestep = TimeStep(
            observation=jax.tree.map(lambda x: getattr(self._shared, x.name), setup.observation),
            reward=self._shared.reward,
            discount=self._shared.discount,
            first=self._shared.first,
            last=self._shared.last,
        )
        self._closed = False
        self._start()

    def reset(self, seed: int, indices: np.ndarray, start: int) -> TimeStep:
        """Begin anew, in new processes. Raises `EnvironmentFault`, also after `close`."""
        self._check_open()
        self._shared.seed[:] = seed, start
        self._shared.index[:] = indices
        self._shared.incarnation[:] = 0
        self._shared.streak[:] = 0
        workers = range(len(self._channels))
        if any(self._channels):
            self._stop()
            self._start()
        for worker in workers:
            self._fork(worker)
        self._settle(workers)
        return self._timestep

    def step(self, action: np.ndarray) -> TimeStep:
        self._check_open()
        np.copyto(self._shared.action, action, casting="same_kind")
        self._shared.deadline[:] = time.monotonic() + self._setup.step_seconds
        for channel in self._channels:
            if channel is None:
                self._fail("`reset` must come before `step`.")
            with contextlib.suppress(OSError):  # a death is found where the answer is awaited
                channel.send(b"s")
        self._settle(range(len(self._channels)))
        return self._timestep

    def close(self) -> None:
        """End all processes, within seconds also where they hang, and free the memory."""
        if not self._closed:
            self._closed = True
            self._stop()
            for channel in filter(None, self._channels):
                channel.close()
            os.close(self._memory)
            del self._shared, self._timestep

    def _check_open(self) -> None:
        if self._closed:
            raise EnvironmentFault(f"{self.name}: the environments are closed.")

    def _fail(self, reason: str) -> NoReturn:
        self.close()
        raise EnvironmentFault(f"{self.name}: {reason}")

    # --- faults ---

    def _settle(self, waiting: Iterable[int]) -> None:
        """Wait for answers, and replace workers until each row has something to show."""
        while waiting:
            answers = {worker: self._answer(worker) for worker in waiting}
            lost = {worker: kind for worker, kind in answers.items() if kind in ("died", "hung")}
            for worker, kind in lost.items():
                self._replace(worker, kind)
            if any(answers.values()):
                self._judge()
            waiting = list(lost)

    def _answer(self, worker: int) -> str:
        """Wait for a worker: "" when all is well, "faulty", "died" or "hung"."""
        channel = self._channels[worker]
        assert channel is not None
        while True:
            left = self._shared.deadline[worker] - time.monotonic()
            channel.settimeout(max(left, 0.0))
            try:
                answer = channel.recv(1)
            except (TimeoutError, BlockingIOError):
                if self._shared.deadline[worker] < time.monotonic():  # it may have been moved
                    return "hung"
            except OSError:
                return "died"
            else:
                return ("" if answer == DONE else "faulty") if answer else "died"

    def _replace(self, worker: int, kind: str) -> None:
        """Have a new worker take the place of one that died or hung, and note why."""
        rows = slice(*self._setup.rows[worker])
        self._shared.streak[rows] += 1
        self._shared.incarnation[rows] += 1
        self._shared.faults[rows.start, KINDS.index(kind)] += 1
        code = os.waitstatus_to_exitcode(self._fork(worker))
        text = f"The process ended with {signal.Signals(-code).name if code < 0 else code}."
        if kind == "hung":
            text = "There was no answer in time."
        gym_worker.describe(self._shared, rows, kind, text)

    def _judge(self) -> None:
        """Count the faults. Raises `EnvironmentFault` where there are too many."""
        shared = self._shared
        self.faults = dict(zip(KINDS, shared.faults.sum(axis=0).tolist(), strict=True))
        row = int(shared.streak.argmax())
        if shared.streak[row] >= LIMIT:
            reason = f"restarted {LIMIT} times without one good step between, the last time"
        elif sum(self.faults.values()) > self._restarts:
            row = int(shared.when.argmax())
            reason = f"restarted beyond the {self._restarts} that all rows may need together,"
        else:
            return
        worker = next(w for w, (_, end) in enumerate(self._setup.rows) if row < end)
        self._fail(
            f"row {row} of worker {worker} (environment {shared.index[row]} of the run) was "
            f"{reason} because of the fault `{KINDS[shared.kind[row]]}`.\n"
            + gym_worker.description(shared, row)
        )

    # --- processes ---

    def _fork(self, worker: int) -> int:
        """Have a worker forked; returns the wait status of the one whose place it takes."""
        for _ in range(LIMIT):
            ours, theirs = socket.socketpair()
            former, self._channels[worker] = self._channels[worker], ours
            with theirs:
                if former is not None:
                    former.close()
                try:
                    number = worker.to_bytes(4, "little")
                    socket.send_fds(self._control, [number], [theirs.fileno()])
                    reply = self._control.recv(REPLY.size)
                except OSError:
                    reply = b""
            if reply:
                self._shared.deadline[worker] = time.monotonic() + self._setup.reset_seconds
                self.pids[worker], status = REPLY.unpack(reply)
                if self.pids[worker] < 0:
                    text = gym_worker.description(self._shared, 0)
                    self._fail(f"a worker cannot import the environment.\n{text}")
                return status
            self._stop()
            self._start()
        self._fail(f"the process that starts the workers died or hung {LIMIT} times.")

    def _start(self) -> None:
        """Start the nursery. All else waits for its first reply, so it imports meanwhile."""
        self._control, theirs = socket.socketpair()
        self._control.settimeout(_IMPORT_SECONDS)
        with theirs, tempfile.TemporaryFile() as setup:
            pickle.dump(self._setup, setup)
            setup.seek(0)
            numbers = (theirs.fileno(), self._memory)
            self._nursery = subprocess.Popen(
                [sys.executable, "-c", _NURSERY, json.dumps(sys.path), *map(str, numbers)],
                stdin=setup,
                pass_fds=numbers,
                env=dict.fromkeys(_THREADS, "1") | os.environ,
            )

    def _stop(self) -> None:
        """End the nursery, which ends the workers."""
        for channel in filter(None, self._channels):
            with contextlib.suppress(OSError):
                channel.shutdown(socket.SHUT_RDWR)
        with self._control, contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_WR)
            self._control.settimeout(2 * CLOSE_SECONDS)
            while self._control.recv(64):
                pass
        self._nursery.kill()  # it has closed its end, or hangs
        self._nursery.wait(CLOSE_SECONDS)


def _anonymous_file() -> int:
    """A file without a name, in memory where the system can: nothing is left of it at any death."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("podracer-gymnasium")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


# --- the specification ---------------------------------------------------------------------------


@functools.cache
def _load(environment: str | Callable[[], Env]) -> tuple[EnvironmentSpec, Setup]:
    """Make one environment, here, to know its spaces. Raises `ConfigError`."""
    name = _name(environment)
    try:
        import gymnasium as library
    except ModuleNotFoundError as error:
        raise ConfigError(f'{name} needs gymnasium: pip install "podracer[gymnasium]".') from error
    made = _registered(environment) if isinstance(environment, str) else environment
    if not callable(made):
        raise ConfigError(f"{name} is neither a registered id nor something to call.")
    pickled, main = _pickle(name, made)
    try:
        env = made()
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise ConfigError(f"{name} cannot be made: {type(error).__name__}: {reason}") from error
    if not isinstance(env, library.Env):
        raise ConfigError(f"{name} must make a gymnasium.Env, but it made {type(env).__name__}.")
    try:
        observation = _observation(name, env.observation_space, "observation")
        action, shape, detail = _action(name, env.action_space)
    finally:
        env.close()
    leaves = jax.tree.map(lambda leaf: ArraySpec(leaf.shape, leaf.dtype), observation)
    setup = Setup(pickled, main, observation, shape, detail, (), 0.0, 0.0)  # `make` has the rest
    return EnvironmentSpec(name, leaves, action), setup


def _name(environment: Any) -> str:
    if isinstance(environment, str):
        return f"gymnasium:{environment}"
    if isinstance(environment, functools.partial):
        named = [f"{key}={value!r}" for key, value in environment.keywords.items()]
        return f"{_name(environment.func)}({', '.join([*map(repr, environment.args), *named])})"
    return f"gymnasium:{getattr(environment, '__qualname__', type(environment).__qualname__)}"


def _registered(name: str) -> Callable[[], Env]:
    """A call with the registry's entry itself: workers then need no registration of their own."""
    import gymnasium as library

    module, _, rest = name.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        return functools.partial(library.make, library.spec(rest), disable_env_checker=True)
    except ImportError as error:
        raise ConfigError(f"gymnasium:{name} cannot be imported: {error}.") from error
    except library.error.Error as error:
        known = nearest(rest, sorted(library.registry))
        raise ConfigError(f"Gymnasium has no environment {name!r}: {known}") from error


def _pickle(name: str, environment: Any) -> tuple[bytes, str | None]:
    """A reference for other processes, and the main module where they must import it."""
    if gym_worker.inside:  # where `make` refuses, so that no one will ask
        return b"", None
    try:
        pickled = pickle.dumps(environment)
    except Exception as error:
        raise ConfigError(
            f"{name} cannot be found by name in another process: define it at the top of a module."
        ) from error
    if b"__main__" not in pickled:
        return pickled, None
    main = sys.modules["__main__"]
    if main.__spec__ is not None:
        return pickled, f":{main.__spec__.name}"
    if getattr(main, "__file__", None) is None:
        raise ConfigError(f"{name} is defined in an interactive session: put it into a file.")
    return pickled, os.path.abspath(str(main.__file__))


def _observation(name: str, space: Any, path: str) -> Any:
    """A tree of `Leaf`. Raises `ConfigError`."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict) and space.spaces:
        return {k: _observation(name, x, f"{path}[{k!r}]") for k, x in space.spaces.items()}
    if isinstance(space, spaces.Tuple) and space.spaces:
        return tuple(_observation(name, x, f"{path}[{i}]") for i, x in enumerate(space.spaces))
    if isinstance(space, spaces.Discrete):
        space = spaces.Box(space.start, space.start + space.n - 1, (), np.int64)
    if not isinstance(space, spaces.Box) or space.dtype.kind not in "fiub":
        raise ConfigError(
            f"{name}: the {path} space {space} cannot be used: it must be a Box of numbers or "
            "Discrete, or a Dict or Tuple of them that is not empty."
        )
    dtype = np.dtype(_NARROWER.get(space.dtype.name, space.dtype))
    low, high = space.low, space.high
    least, most = -np.inf, np.inf
    if dtype.kind in "iu":
        least, most = np.iinfo(dtype.name).min, np.iinfo(dtype.name).max
        low, high = np.maximum(low, least), np.minimum(high, most)
    if dtype.kind == "b" or not ((low > least) | (high < most)).any():
        return Leaf(path, space.shape, dtype, space.dtype)
    with np.errstate(over="ignore"):  # rounding keeps the order, so values stay within bounds
        return Leaf(path, space.shape, dtype, space.dtype, low.astype(dtype), high.astype(dtype))


def _action(name: str, space: Any) -> tuple[Discrete | Continuous, tuple[int, ...], int | np.dtype]:
    """The actions' specification, their shape, and `Setup.action`. Raises `ConfigError`."""
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return Discrete(int(space.n)), (), int(space.start)
    if isinstance(space, spaces.Box) and len(space.shape) == 1 and space.dtype.kind == "f":
        low = _inward(space.low, np.float32(np.inf), np.less)
        high = _inward(space.high, np.float32(-np.inf), np.greater)
        if low.size and np.isfinite([low, high]).all() and (low < high).all():
            return Continuous(tuple(low.tolist()), tuple(high.tolist())), space.shape, space.dtype
    raise ConfigError(
        f"{name}: the action space {space} cannot be used: it must be Discrete, or a Box of "
        "floats with one axis and finite bounds."
    )


def _inward(bounds: np.ndarray, target: np.float32, outside: Callable[..., Any]) -> np.ndarray:
    """Bounds in f32, none of them outside of the original ones."""
    with np.errstate(over="ignore"):
        rounded = bounds.astype(np.float32)
    return np.where(outside(rounded, bounds), np.nextafter(rounded, target), rounded)
