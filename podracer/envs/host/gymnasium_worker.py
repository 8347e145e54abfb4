"""The processes that step Gymnasium environments. Without JAX: it is slow to import, bad to fork.

One *nursery* process per batch imports the environment's code once and forks the workers, so a
worker that died is replaced in milliseconds. All data goes through shared memory (`attach`); on
sockets there is only a byte that says "step" and a byte that says "done".
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import pickle
import random
import runpy
import select
import signal
import socket
import struct
import sys
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from mmap import mmap
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from gymnasium import Env

_BAD_DATA = ("not_finite", "wrong_dtype", "wrong_shape", "out_of_space", "malformed")
KINDS = ("raised", "died", "hung", *_BAD_DATA)  # of faults
LIMIT = 3  # restarts in a row, without one good step, that a row may have
CLOSE_SECONDS = 1.0  # for the environments' own `close`; then they are killed
DONE, FAULTY = b".", b"!"  # a worker's answers
inside = False  # whether this process is a nursery or a worker
REPLY = struct.Struct("<ii")  # the nursery's: the new worker's pid, the former one's wait status
_TEXT = 4096  # bytes kept of a fault's description
_PR_SET_PDEATHSIG = 1


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of an observation, without a batch axis."""

    name: str  # such as "observation['position']": its key in `attach`
    shape: tuple[int, ...]
    dtype: np.dtype  # as delivered
    source: np.dtype  # as the space declares it
    low: np.ndarray | None = None  # bounds in `dtype`; None where they exclude nothing
    high: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class Setup:
    """All that the processes of one batch must know."""

    environment: bytes  # a pickled callable
    main: str | None  # the script, or the module after a colon, to import first
    observation: Any  # a tree of dicts, tuples and `Leaf`
    action_shape: tuple[int, ...]  # () or (n,)
    action: int | np.dtype  # the first action of a Discrete space, or the dtype of a Box
    rows: tuple[tuple[int, int], ...]  # of each worker, from and to
    step_seconds: float
    reset_seconds: float


class Fault(Exception):
    """An environment broke its contract; `kind` is one of `KINDS`."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def leaves(tree: Any) -> Iterator[Leaf]:
    """The leaves of a tree of observations."""
    if isinstance(tree, Leaf):
        yield tree
    else:
        for child in tree.values() if isinstance(tree, dict) else tree:
            yield from leaves(child)


def attach(memory: int, setup: Setup) -> types.SimpleNamespace:
    """The shared memory behind a file descriptor as arrays by name; at first all zero."""
    num_envs = setup.rows[-1][1]
    action_dtype = np.float32 if setup.action_shape else np.int32
    fields = {
        "reward": ((), np.float32),
        "discount": ((), np.float32),
        "first": ((), np.bool_),
        "last": ((), np.bool_),
        "action": (setup.action_shape, action_dtype),
        "index": ((), np.int64),  # the row's number among all of the run
        "incarnation": ((), np.int64),  # restarts since `reset`
        "streak": ((), np.int64),  # restarts since the last good step
        "faults": ((len(KINDS),), np.int64),  # how many of each kind
        "kind": ((), np.int64),  # the latest fault: its kind,
        "when": ((), np.float64),  # its time (monotonic, seconds),
        "text": ((_TEXT,), np.uint8),  # and its description, UTF-8 padded with zeros
    }
    fields |= {leaf.name: (leaf.shape, leaf.dtype) for leaf in leaves(setup.observation)}
    shapes = {
        name: ((num_envs, *shape), np.dtype(dtype)) for name, (shape, dtype) in fields.items()
    }
    shapes["seed"] = ((2,), np.dtype(np.uint64))  # the run's seed, and the steps it has done
    shapes["deadline"] = ((len(setup.rows),), np.dtype(np.float64))  # of each worker's answer
    offsets, size = {}, 0
    for name, (shape, dtype) in shapes.items():
        offsets[name] = size
        size += -(-int(np.prod(shape)) * dtype.itemsize // 64) * 64
    os.ftruncate(memory, size)
    buffer = mmap(memory, size)
    return types.SimpleNamespace(
        **{name: np.ndarray(*shapes[name], buffer, offsets[name]) for name in shapes}
    )


def describe(shared: types.SimpleNamespace, rows: slice, kind: str, text: str) -> None:
    """Note the latest fault of some rows, and that they restart because of it."""
    data = np.frombuffer(text.encode(errors="replace")[-_TEXT:], np.uint8)
    shared.kind[rows] = KINDS.index(kind)
    shared.when[rows] = time.monotonic()
    shared.text[rows] = 0
    shared.text[rows, : data.size] = data


def description(shared: types.SimpleNamespace, row: int) -> str:
    """The text of a row's latest fault."""
    return shared.text[row].tobytes().rstrip(b"\0").decode(errors="replace").strip()


# --- the worker ----------------------------------------------------------------------------------


class Worker:
    """The environments of rows `low` to `high`."""

    def __init__(
        self,
        number: int,
        setup: Setup,
        make: Callable[[], Env],
        shared: types.SimpleNamespace,
    ) -> None:
        self.number, self.setup, self.make, self.shared = number, setup, make, shared
        self.low, self.high = setup.rows[number]
        self.envs: dict[int, Env] = {}
        self.ended: dict[int, bool] = {}
        self.leaves = [(x, getattr(shared, x.name)) for x in leaves(setup.observation)]
        self.answer = DONE

    def serve(self, channel: socket.socket) -> None:
        """Begin all rows, then step them at every byte, until the parent is gone."""
        seed = self.seed(self.low)
        random.seed(seed)  # of no use to a good environment; the others at least differ
        np.random.seed(seed)  # noqa: NPY002
        for row in range(self.low, self.high):
            self.begin(row)
        with contextlib.suppress(OSError):  # the parent has closed, or died
            channel.send(self.answer)
            while channel.recv(1):
                self.answer = DONE
                self.step()
                channel.send(self.answer)
        for row in list(self.envs):
            self.discard(row)

    def step(self) -> None:
        """One step of every row: an action, or after an episode's end its restart."""
        for row, action in enumerate(self.actions(), self.low):
            try:
                if self.ended[row]:
                    self.allow(self.setup.reset_seconds)
                    self.open(row, self.envs[row].reset())
                else:
                    self.allow(self.setup.step_seconds)
                    self.advance(row, self.envs[row].step(action))
            except BaseException as error:
                self.note(row, error)
                self.begin(row)
        # One look at all rows, as each costs microseconds; at single ones only where it must be.
        if any(self.problems(self.low, self.high)):
            for row in range(self.low, self.high):
                if fault := next(self.problems(row, row + 1), None):
                    self.note(row, fault)
                    self.begin(row)
        rows = slice(self.low, self.high)
        self.shared.streak[rows] *= self.shared.first[rows]  # a restart alone is no good step

    def begin(self, row: int) -> None:
        """Make a row's environment anew and show its opening, or give up after `LIMIT` failures."""
        while self.shared.streak[row] < LIMIT:
            try:
                self.allow(self.setup.reset_seconds)
                self.discard(row)
                self.envs[row] = self.make()
                self.open(row, self.envs[row].reset(seed=self.seed(row)))
                for fault in self.problems(row, row + 1):
                    raise fault
                return
            except BaseException as error:
                self.note(row, error)

    def open(self, row: int, result: Any) -> None:
        """Show what `reset` returned. Raises `Fault`."""
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict)):
            raise Fault("malformed", "reset() did not return the pair (observation, info)")
        self.store(self.setup.observation, result[0], row)
        self.shared.reward[row] = 0
        self.shared.discount[row] = 1
        self.shared.first[row] = True
        self.shared.last[row] = self.ended[row] = False

    def advance(self, row: int, result: Any) -> None:
        """Show what `step` returned. Raises `Fault`."""
        if not (isinstance(result, tuple) and len(result) == 5):
            raise Fault("malformed", "step() did not return five values")
        observation, reward, terminated, truncated, _ = result
        terminal, timeout = _flag(terminated, "terminated"), _flag(truncated, "truncated")
        self.store(self.setup.observation, observation, row)
        if isinstance(reward, float):  # np.float64 is one too; a third of all our time otherwise
            self.shared.reward[row] = reward
        else:
            _put(self.shared.reward, row, _REWARD, reward)
        self.shared.discount[row] = not terminal
        self.shared.first[row] = False
        self.shared.last[row] = self.ended[row] = terminal or timeout

    def store(self, tree: Any, value: Any, row: int) -> None:
        """Write an observation into its arrays. Raises `Fault` where it does not fit the space."""
        if isinstance(tree, Leaf):
            _put(getattr(self.shared, tree.name), row, tree, value)
        elif isinstance(tree, dict):
            if not isinstance(value, Mapping) or value.keys() != tree.keys():
                raise Fault("malformed", f"observation must be a dict with the keys {list(tree)}")
            for key, child in tree.items():
                self.store(child, value[key], row)
        else:
            if not isinstance(value, tuple | list) or len(value) != len(tree):
                raise Fault("malformed", f"observation must be a tuple of {len(tree)}")
            for child, part in zip(tree, value, strict=True):
                self.store(child, part, row)

    def problems(self, low: int, high: int) -> Iterator[Fault]:
        """What is wrong with the numbers that rows `low` to `high` show."""
        if not np.isfinite(self.shared.reward[low:high]).all():
            yield Fault("not_finite", "reward is not finite")
        for leaf, array in self.leaves:
            block = array[low:high]
            if leaf.dtype.kind == "f" and not np.isfinite(block).all():
                yield Fault("not_finite", f"{leaf.name} is not finite")
            elif leaf.low is not None and not ((block >= leaf.low) & (block <= leaf.high)).all():
                yield Fault("out_of_space", f"{leaf.name} exceeds its space's bounds: {block}")

    def actions(self) -> list[Any]:
        """The rows' actions as their environments' own space has them; copies, they may be kept."""
        actions = self.shared.action[self.low : self.high]
        if isinstance(self.setup.action, int):
            return (actions + self.setup.action).tolist()
        return list(actions.astype(self.setup.action))

    def seed(self, row: int) -> int:
        """The row's seed, of 31 bits as some engines want it."""
        seed, start = self.shared.seed.tolist()
        words = [seed, int(self.shared.index[row]), start, int(self.shared.incarnation[row])]
        return int(np.random.SeedSequence(words).generate_state(1)[0] >> 1)

    def allow(self, seconds: float) -> None:
        """Tell the parent how long to wait for what comes next."""
        self.shared.deadline[self.number] = time.monotonic() + seconds

    def note(self, row: int, error: BaseException) -> None:
        """Count a fault and describe it to the parent: as text, no object crosses processes."""
        if isinstance(error, Fault):
            kind, text = error.kind, str(error)
        else:
            kind, text = "raised", "".join(traceback.format_exception(error))
        describe(self.shared, slice(row, row + 1), kind, text)
        self.shared.faults[row, KINDS.index(kind)] += 1
        self.shared.streak[row] += 1
        self.shared.incarnation[row] += 1
        self.answer = FAULTY

    def discard(self, row: int) -> None:
        """Close a row's environment, if it has one."""
        with contextlib.suppress(BaseException):
            if row in self.envs:
                self.envs.pop(row).close()


_REWARD = Leaf("reward", (), np.dtype(np.float32), np.dtype(np.float32))


def _put(array: np.ndarray, row: int, leaf: Leaf, value: Any) -> None:
    """Write one array into a row. Raises `Fault` where its dtype or shape is another."""
    if value is None:
        raise Fault("malformed", f"{leaf.name} is None")
    try:
        got = np.asarray(value)
    except ValueError as error:
        raise Fault("wrong_shape", f"{leaf.name} is no array: {error}") from error
    if got.dtype != leaf.dtype:
        if not np.can_cast(got.dtype, leaf.source, "same_kind"):
            raise Fault("wrong_dtype", f"{leaf.name} must be {leaf.source}, but it is {got.dtype}")
        if leaf.dtype.kind in "iu" and got.size:
            bounds = np.iinfo(leaf.dtype)
            if got.min() < bounds.min or got.max() > bounds.max:
                raise Fault("out_of_space", f"{leaf.name} does not fit {leaf.dtype}: {got}")
    if got.shape != leaf.shape:
        raise Fault("wrong_shape", f"{leaf.name} must have shape {leaf.shape}, but has {got.shape}")
    array[row] = got


def _flag(value: Any, name: str) -> bool:
    if isinstance(value, bool | np.bool_):
        return bool(value)
    array = np.asarray(value)
    if array.shape != () or array.dtype.kind not in "bui":
        raise Fault("malformed", f"{name} must be a bool, but it is {value!r}")
    return bool(array)


# --- the nursery ---------------------------------------------------------------------------------


def nursery(control: socket.socket, memory: int) -> None:
    """Fork a worker at each request, until the parent is gone; then see that all workers are.

    The `Setup` is read from stdin. A request is a worker's number, with the worker's end of its
    channel; a former worker of the number is ended first. The answer is a `REPLY`; a pid of -1
    says that the environment's code cannot be imported, and row 0 has the text.
    """
    global inside
    inside = True
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C and preemption are the parent's matter,
    signal.signal(signal.SIGTERM, lambda *_: None)  # but engines that we start may be terminated
    signal.siginterrupt(signal.SIGTERM, False)
    warnings.simplefilter("ignore")  # the parent has made one environment, and showed them
    setup: Setup = pickle.load(sys.stdin.buffer)
    with open(os.devnull) as null:
        os.dup2(null.fileno(), 0)
    shared = attach(memory, setup)
    os.close(memory)
    make, pids, nursery_pid = None, {}, os.getpid()
    try:
        make = _import(setup)
    except BaseException:
        describe(shared, slice(0, 1), "raised", traceback.format_exc())
    alive, alive_in_workers = os.pipe()
    while True:
        request, channels, _, _ = socket.recv_fds(control, 4, 1)
        if not request:
            break
        number = int.from_bytes(request, "little")
        status = _end(pids.pop(number)) if number in pids else 0
        pid = -1
        if make is not None:
            pid = os.fork()
            if pid == 0:
                control.close()
                os.close(alive)
                _live(Worker(number, setup, make, shared), channels[0], nursery_pid)
            pids[number] = pid
        os.close(channels[0])
        control.sendall(REPLY.pack(pid, status))
    os.close(alive_in_workers)  # readable at the end of the last worker
    select.select([alive], [], [], CLOSE_SECONDS)
    for pid in pids.values():
        _end(pid)


def _live(worker: Worker, channel: int, parent: int) -> None:
    """A forked process from its first to its last moment: never returns."""
    try:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the line above
            os._exit(1)
        os.set_inheritable(channel, False)
        worker.serve(socket.socket(fileno=channel))
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def _end(pid: int) -> int:
    """Kill a child and return its wait status, which tells of an earlier death if there was one."""
    os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def _import(setup: Setup) -> Callable[[], Env]:
    """What makes one environment, with all of its code imported, so that forks have it."""
    if setup.main is not None:
        path, _, module = setup.main.partition(":")
        run, what = (runpy.run_module, module) if module else (runpy.run_path, path)
        main = types.ModuleType("__mp_main__")
        main.__dict__.update(run(what, run_name="__mp_main__"))
        sys.modules["__main__"] = sys.modules["__mp_main__"] = main
    from gymnasium.envs.registration import EnvSpec, load_env_creator

    environment = pickle.loads(setup.environment)
    for argument in getattr(environment, "args", ()):
        if isinstance(argument, EnvSpec) and isinstance(argument.entry_point, str):
            load_env_creator(argument.entry_point)
    return environment
