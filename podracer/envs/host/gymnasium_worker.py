"""Processes that step Gymnasium environments, without JAX: slow to import and unsafe to fork.

One *fork server* process per batch imports the environment's code once and forks the workers, so a
worker that died is replaced in milliseconds. Workers unpickle a callable that makes one
environment. All numbers go through one block of shared memory (`SharedMemory`); sockets carry a
one-byte request for a step and, as a line of JSON, the faults in it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import json
import multiprocessing.spawn
import os
import pickle
import random
import select
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from mmap import mmap
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import numpy as np

from podracer.errors import WEIGHTED_SUM, PodracerError
from podracer.io.processes import go_on_guarded, kill_tree, request_signal_at_parent_death

if TYPE_CHECKING:
    from gymnasium import Env

inside_worker = False  # whether this process is a fork server or a worker
BAD_DATA_FAULTS = ("not_finite", "wrong_dtype", "wrong_shape", "out_of_space", "malformed")
FAULT_KINDS = ("raised", "died", "hung", *BAD_DATA_FAULTS)
CALLS = ("reset", "step")  # methods of an environment that have a time limit
MAX_CONSECUTIVE_FAILURES = 3  # restarts of a row without one good step between
CLOSE_SECONDS = 1.0  # for the environments' own `close`; then their processes are killed
STEP = b"s"  # the request for a step
_TEXT_LENGTH = 4096  # characters kept of a fault's description
_LINE_LENGTH = 300  # characters of a description in one line
_ALIGNMENT = 64  # bytes: a cache line


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of an observation, or an action, without a batch axis."""

    name: str  # its path in the observation, such as "observation['position']"
    shape: tuple[int, ...]
    dtype: np.dtype  # the one that agents have
    source: np.dtype  # the one that the space declares
    low: np.ndarray | None = None  # bounds in `dtype`; None where they exclude nothing
    high: np.ndarray | None = None
    num_values: int | None = None  # in Discrete spaces, whose values agents have from 0 on
    first_value: Any = 0  # in Discrete spaces; in a MultiDiscrete one of actions a list


@dataclasses.dataclass(frozen=True)
class WorkerSetup:
    """Settings of one batch."""

    factory: Any  # a `Factory`, for other processes pickled
    main: dict[str, Any]  # the script to import first, as `multiprocessing.spawn.prepare` takes it
    observation: Any = ()  # a tree of dicts, tuples and `Leaf`
    action: Any = None  # a `Leaf`, of the shape () or (n,)
    row_ranges: tuple[tuple[int, int], ...] = ()  # first row and end for each worker
    step_seconds: float = 0.0
    reset_seconds: float = 0.0
    max_restarts: int = 0


class Fault(Exception):
    """A broken contract of an environment; `kind` is one of `FAULT_KINDS`."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclasses.dataclass(frozen=True)
class SharedMemory:
    """Arrays that all processes of a batch read and write, for B rows and W workers.

    An annotation has the dtype and the shape, but of two arrays that the environment decides on.
    """

    observation: dict[str, np.ndarray]  # [B, ...] by the name of its `Leaf`
    action: np.ndarray  # i32 [B] or [B, n], or f32 [B, n]
    reward: Annotated[np.ndarray, np.float32, "B"]
    discount: Annotated[np.ndarray, np.float32, "B"]
    first: Annotated[np.ndarray, np.bool_, "B"]
    last: Annotated[np.ndarray, np.bool_, "B"]
    seed: Annotated[np.ndarray, np.uint64, 2]  # the run's seed, and the steps that the run has done
    env_index: Annotated[np.ndarray, np.int64, "B"]  # number among the run's environments
    generation: Annotated[np.ndarray, np.int64, "B"]  # restarts since `reset`
    consecutive_failures: Annotated[np.ndarray, np.int64, "B"]  # restarts since the last good step
    deadline: Annotated[np.ndarray, np.float64, "W"]  # to answer, in monotonic seconds
    call: Annotated[np.ndarray, np.int64, "W"]  # index in `CALLS` of what each worker does

    def begin(self, seed: int, indices: np.ndarray, start: int) -> None:
        """Set what a reset of all rows begins with, see `HostEnvironment.reset`."""
        self.seed[:] = seed, start
        self.env_index[:] = indices
        self.generation[:] = 0
        self.consecutive_failures[:] = 0

    def restart(self, rows: slice) -> None:
        """Have some rows begin anew after a fault, with other seeds."""
        self.consecutive_failures[rows] += 1
        self.generation[rows] += 1


def send(channel: socket.socket, message: list) -> None:
    """Send a list of numbers, texts and lists, as a line; an empty one costs least."""
    channel.sendall(json.dumps(message).encode() + b"\n" if message else b"\n")


def receive(channel: socket.socket) -> list:
    """Return the next list. Raises `OSError` where the other process has ended."""
    line = channel.recv(4096)
    while not line.endswith(b"\n"):
        if not (part := channel.recv(4096)):
            raise ConnectionError("the other process has ended")
        line += part
    return [] if line == b"\n" else json.loads(line)


def one_line(text: str) -> str:
    """Return a fault's description in one line: of a traceback only the exception itself."""
    lines = text.splitlines()
    if "Traceback (most recent call last):" in lines or text.startswith(" "):  # may be cut in front
        ends = [number for number, line in enumerate(lines, 1) if line.startswith("  ")]
        lines = lines[max(ends, default=0) :] or lines[-1:]
    line = " ".join(" ".join(lines).split())
    return line if len(line) <= _LINE_LENGTH else f"{line[:_LINE_LENGTH]} ..."


def anonymous_file() -> int:
    """Open a file without a name, in memory if possible: it never outlives its processes."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("podracer-gymnasium")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def map_shared_memory(descriptor: int, setup: WorkerSetup) -> SharedMemory:
    """Map the file behind a descriptor, sized first, or for -1 memory of this process; all zero."""
    sizes: dict[int | str, int] = {"B": setup.row_ranges[-1][1], "W": len(setup.row_ranges)}
    layout = {}
    for name, hint in get_type_hints(SharedMemory, include_extras=True).items():
        if get_origin(hint) is Annotated:
            _, dtype, *shape = get_args(hint)
            layout[name] = tuple(sizes.get(n, n) for n in shape), np.dtype(dtype)
    leaves = (setup.action, *parts_by_leaf(setup.observation, setup.observation))
    layout |= {leaf.name: ((sizes["B"], *leaf.shape), leaf.dtype) for leaf in leaves}
    offsets, size = {}, 0
    for name, (shape, dtype) in layout.items():
        offsets[name] = size
        size += -(-int(np.prod(shape)) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    if descriptor >= 0:
        os.ftruncate(descriptor, size)
    buffer = mmap(descriptor, size)
    arrays = {
        name: np.ndarray(shape, dtype, buffer, offsets[name])
        for name, (shape, dtype) in layout.items()
    }
    return SharedMemory({leaf.name: arrays.pop(leaf.name) for leaf in leaves[1:]}, **arrays)


def parts_by_leaf(tree: Any, value: Any) -> Iterator[Any]:
    """Iterate over the part of a value, such as an observation, at each `Leaf` of the tree."""
    if isinstance(tree, Leaf):
        yield value
    else:
        for key in tree if isinstance(tree, dict) else range(len(tree)):
            yield from parts_by_leaf(tree[key], value[key])


# --- a worker ------------------------------------------------------------------------------------

_REWARD = Leaf("reward", (), np.dtype(np.float32), np.dtype(np.float32))


class Worker:
    """The environments of one worker's rows, `start` to `end`."""

    def __init__(
        self, number: int, setup: WorkerSetup, make: Callable[[], Env], shared: SharedMemory
    ) -> None:
        self.number, self.setup, self.make, self.shared = number, setup, make, shared
        self.start, self.end = setup.row_ranges[number]
        self.envs: dict[int, Env] = {}
        self.episode_ended: dict[int, bool] = {}
        self.leaves = list(parts_by_leaf(setup.observation, setup.observation))
        self.faults: list[tuple[int, str, str]] = []  # row, kind and description, in this step

    def serve(self, channel: socket.socket) -> None:
        """Reset all rows, then step them at every request, until the parent is gone."""
        seed = self.row_seed(self.start)
        random.seed(seed)  # environments with global generators differ between workers
        np.random.seed(seed)  # noqa: NPY002
        self.reset()
        with contextlib.suppress(OSError):  # the parent has closed, or died
            send(channel, self.faults)
            while channel.recv(1):
                self.step()
                send(channel, self.faults)
        self.close()

    def reset(self) -> None:
        self.faults = []
        for row in range(self.start, self.end):
            self.remake(row)

    def step(self) -> None:
        """Step every row: with its action, or after an episode's end by a reset."""
        self.faults = []
        for row, action in enumerate(self.read_actions(), self.start):
            try:
                if self.episode_ended[row]:
                    self.extend_deadline("reset")
                    self.write_reset(row, self.envs[row].reset())
                else:
                    self.extend_deadline("step")
                    self.write_step(row, self.envs[row].step(action))
            except BaseException as error:
                self.record_fault(row, error)
                self.remake(row)
        # All rows are checked together, as each check costs microseconds; single rows only where
        # something is wrong.
        if any(self.find_faults(self.start, self.end)):
            for row in range(self.start, self.end):
                if fault := next(self.find_faults(row, row + 1), None):
                    self.record_fault(row, fault)
                    self.remake(row)
        rows = slice(self.start, self.end)
        # A step that only begins an episode does not count as a good one, nor one without any.
        failures = self.shared.consecutive_failures[rows]
        failures *= self.shared.first[rows] | (failures >= MAX_CONSECUTIVE_FAILURES)

    def remake(self, row: int) -> None:
        """Make and reset a row's environment; give up after too many failures in a row."""
        while self.shared.consecutive_failures[row] < MAX_CONSECUTIVE_FAILURES:
            try:
                self.extend_deadline("reset")
                self.close_env(row)
                self.envs[row] = self.make()
                self.write_reset(row, self.envs[row].reset(seed=self.row_seed(row)))
                for fault in self.find_faults(row, row + 1):
                    raise fault
                return
            except BaseException as error:
                self.record_fault(row, error)

    def write_reset(self, row: int, result: Any) -> None:
        """Write what `reset` returned to the shared memory. Raises `Fault`."""
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
            raise Fault("malformed", "reset() did not return the pair (observation, info)")
        self.write_observation(self.setup.observation, result[0], row)
        self.shared.reward[row] = 0
        self.shared.discount[row] = 1
        self.shared.first[row] = True
        self.shared.last[row] = self.episode_ended[row] = False

    def write_step(self, row: int, result: Any) -> None:
        """Write what `step` returned to the shared memory. Raises `Fault`."""
        if not (isinstance(result, tuple) and len(result) == 5):
            raise Fault("malformed", "step() did not return five values")
        observation, reward, terminated, truncated, _ = result
        terminal, timeout = _as_bool(terminated, "terminated"), _as_bool(truncated, "truncated")
        self.write_observation(self.setup.observation, observation, row)
        if isinstance(reward, float):  # also np.float64; other checks cost a third of the time
            self.shared.reward[row] = reward
        else:
            _write(self.shared.reward, row, _REWARD, reward)
        self.shared.discount[row] = not terminal
        self.shared.first[row] = False
        self.shared.last[row] = self.episode_ended[row] = terminal or timeout

    def write_observation(self, tree: Any, value: Any, row: int) -> None:
        """Write an observation to the shared memory. Raises `Fault` where the space differs."""
        if isinstance(tree, Leaf):
            _write(self.shared.observation[tree.name], row, tree, value)
        elif isinstance(tree, dict):
            if not isinstance(value, Mapping) or value.keys() != tree.keys():
                raise Fault("malformed", f"observation must be a dict with the keys {list(tree)}")
            for key, child in tree.items():
                self.write_observation(child, value[key], row)
        else:
            if not isinstance(value, tuple | list) or len(value) != len(tree):
                raise Fault("malformed", f"observation must be a tuple of {len(tree)}")
            for child, part in zip(tree, value, strict=True):
                self.write_observation(child, part, row)

    def find_faults(self, start: int, end: int) -> Iterator[Fault]:
        """Iterate over the faults in the numbers of rows `start` to `end`."""
        if not np.isfinite(self.shared.reward[start:end]).all():
            yield Fault("not_finite", "reward is not finite")
        for leaf in self.leaves:
            block = self.shared.observation[leaf.name][start:end]
            if leaf.dtype.kind == "f" and not np.isfinite(block).all():
                yield Fault("not_finite", f"{leaf.name} is not finite")
            elif leaf.low is not None and not ((block >= leaf.low) & (block <= leaf.high)).all():
                yield Fault("out_of_space", f"{leaf.name} exceeds its space's bounds: {block}")

    def read_actions(self) -> list[Any]:
        """Return copies of the rows' actions, as the environments' own space declares them."""
        space, actions = self.setup.action, self.shared.action[self.start : self.end]
        if space.dtype.kind != "f":
            actions = actions + np.asarray(space.first_value)
        return list(actions.astype(space.source)) if space.shape else actions.tolist()

    def row_seed(self, row: int) -> int:
        """Return the row's seed, of 31 bits as some engines want it."""
        seed, start = self.shared.seed.tolist()
        words = [seed, int(self.shared.env_index[row]), start, int(self.shared.generation[row])]
        return int(np.random.SeedSequence(words).generate_state(1)[0] >> 1)

    def extend_deadline(self, call: str) -> None:
        """Tell the parent what is called next, and so how long it waits."""
        seconds = self.setup.step_seconds if call == "step" else self.setup.reset_seconds
        self.shared.call[self.number] = CALLS.index(call)
        self.shared.deadline[self.number] = time.monotonic() + seconds

    def record_fault(self, row: int, error: BaseException) -> None:
        """Note a fault for the parent: as text, no object crosses processes."""
        if isinstance(error, KeyboardInterrupt) and not inside_worker:
            raise error  # the user interrupts
        if isinstance(error, Fault):
            kind, text = error.kind, str(error)
        else:
            kind, text = "raised", "".join(traceback.format_exception(error))
        self.shared.restart(slice(row, row + 1))
        self.faults.append((row, kind, text.strip()[-_TEXT_LENGTH:]))

    def close_env(self, row: int) -> None:
        """Close a row's environment, if it has one."""
        with contextlib.suppress(BaseException):
            if row in self.envs:
                self.envs.pop(row).close()

    def close(self) -> None:
        for row in list(self.envs):
            self.close_env(row)


def _write(array: np.ndarray, row: int, leaf: Leaf, value: Any) -> None:
    """Write one array into a row. Raises `Fault` where its dtype or shape is another."""
    if value is None:
        raise Fault("malformed", f"{leaf.name} is None")
    try:
        source = np.asarray(value)
    except ValueError as error:
        raise Fault("wrong_shape", f"{leaf.name} is not an array: {error}") from error
    if leaf.first_value and source.dtype.kind in "iu":
        source = source.astype(np.int64) - leaf.first_value
    if source.dtype != leaf.dtype:
        if not np.can_cast(source.dtype, leaf.source, "same_kind"):
            text = f"{leaf.name} must be {leaf.source}, but it is {source.dtype}"
            raise Fault("wrong_dtype", text)
        if leaf.dtype.kind in "iu" and source.size:
            bounds = np.iinfo(leaf.dtype)
            if source.min() < bounds.min or source.max() > bounds.max:
                raise Fault("out_of_space", f"{leaf.name} does not fit {leaf.dtype}: {source}")
    if source.shape != leaf.shape:
        text = f"{leaf.name} must have shape {leaf.shape}, but has {source.shape}"
        text += f": {WEIGHTED_SUM}" if leaf is _REWARD else ""
        raise Fault("wrong_shape", text)
    array[row] = source


def _as_bool(value: Any, name: str) -> bool:
    if isinstance(value, bool | np.bool_):
        return bool(value)
    array = np.asarray(value)
    if array.shape != () or array.dtype.kind not in "bui":
        raise Fault("malformed", f"{name} must be a bool, but it is {value!r}")
    return bool(array)


# --- the fork server -----------------------------------------------------------------------------


def command(call: str) -> list[str]:
    """Return the command of a process that has this one's path and does a `call` of this module."""
    code = (
        f"import json, sys; sys.path[:] = json.loads(sys.argv[1]); from {__name__} import *; {call}"
    )
    return [sys.executable, "-c", code, json.dumps(sys.path)]


def run_fork_server(control_descriptor: int, memory: int) -> None:
    """Fork a worker at each request, until the parent is gone; then wait until all workers are.

    The `WorkerSetup` is read from stdin. A request is a worker's number, with the worker's end of
    its channel; a former worker of that number is ended first. The answer is the new worker's pid,
    the former worker's wait status, and where the environment's code cannot be imported, why.
    """
    _enter_fork_server()
    control = socket.socket(fileno=control_descriptor)
    setup: WorkerSetup = pickle.load(sys.stdin.buffer)
    with open(os.devnull) as null:
        os.dup2(null.fileno(), 0)
    os.dup2(2, 1)  # stdout is the command's own
    shared = map_shared_memory(memory, setup)
    os.close(memory)
    make, problem, pids, server_pid = None, "", {}, os.getpid()
    try:
        make = _import_environment(setup)
    except BaseException as error:
        problem = str(error) if isinstance(error, PodracerError) else traceback.format_exc()
    alive, alive_in_workers = os.pipe()
    while True:
        request, channels, _, _ = socket.recv_fds(control, 4, 1)
        if not request:
            break
        number = int.from_bytes(request, "little")
        status = _end_child(pids.pop(number)) if number in pids else 0
        pid = 0
        if make is not None:
            pid = os.fork()
            if pid == 0:
                os.setpgid(0, 0)  # with all processes that its environments start
                control.close()
                os.close(alive)
                _worker_main(Worker(number, setup, make, shared), channels[0], server_pid)
            with contextlib.suppress(OSError):  # it may be faster, or gone
                os.setpgid(pid, pid)
            pids[number] = pid
        os.close(channels[0])
        send(control, [pid, status, problem])
    os.close(alive_in_workers)  # readable at the end of the last worker
    select.select([alive], [], [], CLOSE_SECONDS)
    for pid in pids.values():
        _end_child(pid)


def try_environment() -> None:
    """Make one environment, as the `WorkerSetup` on stdin says, in a process that may crash."""
    _enter_fork_server()
    try:
        _import_environment(pickle.load(sys.stdin.buffer))().close()
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {error}")


def _enter_fork_server() -> None:
    """Mark this process, leave signals and warnings to the parent, and go on under a guard."""
    global inside_worker
    inside_worker = True
    request_signal_at_parent_death(signal.SIGCONT)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C and preemption are the parent's matter,
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)  # but engines that we start may be ended so
        signal.siginterrupt(number, False)
    warnings.simplefilter("ignore")  # the parent has made one environment and shown them
    go_on_guarded()


def _worker_main(worker: Worker, channel: int, parent: int) -> None:
    """Run a forked process to its end; never returns."""
    try:
        request_signal_at_parent_death(signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)
        os.set_inheritable(channel, False)
        worker.serve(socket.socket(fileno=channel))
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _end_child(pid: int) -> int:
    """Kill a worker and what it started; return its wait status, maybe of an earlier death.

    Of a worker that died before, what has left its group is the guard's.
    """
    kill_tree(pid)
    os.killpg(pid, signal.SIGKILL)  # the group exists at least until the worker is waited for
    return os.waitpid(pid, 0)[1]


def _import_environment(setup: WorkerSetup) -> Factory:
    """Return the environment's factory, with all its code imported before the forks."""
    multiprocessing.spawn.prepare(setup.main)
    factory: Factory = pickle.loads(setup.factory)
    factory.load()
    return factory


@dataclasses.dataclass(frozen=True)
class Factory:
    """What makes one environment when it is called; fields as in `Gymnasium`."""

    environment: Any
    """Id with the module that registers it, an entry of the registry, or a callable."""
    options: tuple[tuple[str, Any], ...] = ()
    observe: tuple[str, ...] = ()
    pictures: bool = False

    def load(self) -> Any:
        """Import all code of the environment; return its entry in the registry or its callable."""
        if callable(self.environment):
            return self.environment
        from gymnasium.envs import registration

        entry = self.environment
        if isinstance(entry, str):
            module, _, environment_id = entry.rpartition(":")
            importlib.import_module(module)
            entry = registration.spec(environment_id)
        if isinstance(entry.entry_point, str):
            registration.load_env_creator(entry.entry_point)
        return entry

    def __call__(self) -> Env:
        if not self.pictures:
            return self._make()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about modes that it does not have
            return _with_pictures(self._make())

    def _make(self) -> Env:
        import gymnasium

        entry, options = self.load(), dict[str, Any](self.options)
        is_own = callable(entry)
        if self.pictures and (not is_own or "render_mode" in inspect.signature(entry).parameters):
            options["render_mode"] = "rgb_array"
        make: Any = entry if is_own else partial(gymnasium.make, entry, disable_env_checker=True)
        env = make(**options)
        return gymnasium.wrappers.FilterObservation(env, self.observe) if self.observe else env


def _with_pictures(env: Env) -> Env:
    """Return an environment whose observations are an `observation` and a `picture`.

    Raises `ValueError` where `render` draws none, uint8 `[H, W, 3]`.
    """
    from gymnasium import spaces, wrappers

    env.reset()
    picture = np.asarray(env.render())
    if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[-1] != 3:
        raise ValueError("`render` does not return an array uint8 [H, W, 3]")
    space = spaces.Box(0, 255, picture.shape, np.uint8)
    return wrappers.TransformObservation(
        env,
        lambda observation: {"observation": observation, "picture": env.render()},
        spaces.Dict({"observation": env.observation_space, "picture": space}),
    )
