"""What a batch of Gymnasium environments and its worker processes share. Imports no JAX.

Workers unpickle a callable that makes one environment. All data goes through one block of shared
memory (`SharedMemory`); sockets carry only a one-byte request for a step and a one-byte reply.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import struct
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from mmap import mmap
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from gymnasium import Env
    from gymnasium.envs.registration import EnvSpec

BAD_DATA_FAULTS = ("not_finite", "wrong_dtype", "wrong_shape", "out_of_space", "malformed")
FAULT_KINDS = ("raised", "died", "hung", *BAD_DATA_FAULTS)
CALLS = ("reset", "step")  # methods of an environment that have a time limit
MAX_CONSECUTIVE_FAILURES = 3  # restarts of a row without one good step between
CLOSE_SECONDS = 1.0  # for the environments' own `close`; then their processes are killed
STEP = b"s"  # the request for a step
OK, FAULTY = b".", b"!"  # a worker's replies to it
FORK_REPLY = struct.Struct("<ii")  # the new worker's pid, the former worker's wait status
_TEXT_BYTES = 4096  # kept of a fault's description
_LINE_LENGTH = 300  # characters of a description in one line
_ALIGNMENT = 64  # bytes: a cache line


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One array of an observation, without a batch axis."""

    name: str  # its path in the observation, such as "observation['position']"
    shape: tuple[int, ...]
    dtype: np.dtype  # the one that agents get
    source: np.dtype  # the one that the space declares
    low: np.ndarray | None = None  # bounds in `dtype`; None where they exclude nothing
    high: np.ndarray | None = None
    num_values: int | None = None  # in Discrete spaces, whose values arrive as 0 .. num_values - 1
    first_value: int = 0  # in Discrete spaces


@dataclasses.dataclass(frozen=True)
class WorkerSetup:
    """Settings of the processes of one batch."""

    environment: bytes  # a pickled callable that makes one environment
    main: str | None  # the script, or the module after a colon, to import first
    observation: Any  # a tree of dicts, tuples and `Leaf`
    action_shape: tuple[int, ...]  # () for Discrete, (n,) for others
    first_action: int | tuple[int, ...]  # smallest values in a Discrete or MultiDiscrete space
    action_dtype: np.dtype  # the one that the environment's own space declares
    row_ranges: tuple[tuple[int, int], ...] = ()  # first row and end for each worker
    step_seconds: float = 0.0
    reset_seconds: float = 0.0


class Fault(Exception):
    """A broken contract of an environment; `kind` is one of `FAULT_KINDS`."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclasses.dataclass(frozen=True)
class SharedMemory:
    """Arrays that all processes of a batch read and write, for B rows and W workers."""

    reward: np.ndarray  # f32 [B]
    discount: np.ndarray  # f32 [B]
    first: np.ndarray  # bool [B]
    last: np.ndarray  # bool [B]
    action: np.ndarray  # i32 [B] or [B, n], or f32 [B, n]
    observation: dict[str, np.ndarray]  # [B, ...] by the name of its `Leaf`
    seed: np.ndarray  # u64 [2]: the run's seed, and the steps that the run has done
    env_index: np.ndarray  # i64 [B]: the row's number among all environments of the run
    generation: np.ndarray  # i64 [B]: restarts since `reset`
    consecutive_failures: np.ndarray  # i64 [B]: restarts since the last good step
    step_seconds: np.ndarray  # f64 [B]: spent in `step` since the batch last compared the rows
    fault_counts: np.ndarray  # i64 [B, kinds]
    fault_kind: np.ndarray  # i64 [B]: index in `FAULT_KINDS` of the latest fault
    fault_time: np.ndarray  # f64 [B]: when it happened, in monotonic seconds
    fault_text: np.ndarray  # u8 [B, bytes]: its description, UTF-8 padded with zeros
    deadline: np.ndarray  # f64 [W]: until when each worker must answer, in monotonic seconds
    call: np.ndarray  # i64 [W]: index in `CALLS` of what each worker does

    def begin(self, seed: int, indices: np.ndarray, start: int) -> None:
        """Set what a reset of all rows begins with, see `HostEnvironment.reset`."""
        self.seed[:] = seed, start
        self.env_index[:] = indices
        self.generation[:] = 0
        self.consecutive_failures[:] = 0

    def record_fault(self, rows: slice, kind: str, text: str) -> None:
        """Store the latest fault of some rows."""
        data = np.frombuffer(text.encode(errors="replace")[-_TEXT_BYTES:], np.uint8)
        self.fault_kind[rows] = FAULT_KINDS.index(kind)
        self.fault_time[rows] = time.monotonic()
        self.fault_text[rows] = 0
        self.fault_text[rows, : data.size] = data

    def describe_fault(self, row: int) -> str:
        """Return the description of a row's latest fault."""
        return self.fault_text[row].tobytes().rstrip(b"\0").decode(errors="replace").strip()

    def describe_first_faults(self, descriptions: dict[str, str]) -> None:
        """Add a line on the earliest known fault of each kind that has none; rows keep one each."""
        for row in np.argsort(self.fault_time):
            kind = FAULT_KINDS[self.fault_kind[row]]
            if self.fault_time[row] and kind not in descriptions:
                line = one_line(self.describe_fault(row))
                descriptions[kind] = f"environment {self.env_index[row]}: {line}"


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
    """Map the file behind a descriptor; a new file is sized first, and all zero."""
    num_envs, num_workers = setup.row_ranges[-1][1], len(setup.row_ranges)
    action_dtype = np.float32 if setup.action_dtype.kind == "f" else np.int32
    rows = {
        "reward": ((), np.float32),
        "discount": ((), np.float32),
        "first": ((), np.bool_),
        "last": ((), np.bool_),
        "action": (setup.action_shape, action_dtype),
        "env_index": ((), np.int64),
        "generation": ((), np.int64),
        "consecutive_failures": ((), np.int64),
        "step_seconds": ((), np.float64),
        "fault_counts": ((len(FAULT_KINDS),), np.int64),
        "fault_kind": ((), np.int64),
        "fault_time": ((), np.float64),
        "fault_text": ((_TEXT_BYTES,), np.uint8),
    }
    observation = {leaf.name: (leaf.shape, leaf.dtype) for leaf in observation_leaves(setup)}
    layout = {
        name: ((num_envs, *shape), np.dtype(dtype))
        for name, (shape, dtype) in {**rows, **observation}.items()
    }
    layout["seed"] = ((2,), np.dtype(np.uint64))
    layout["deadline"] = ((num_workers,), np.dtype(np.float64))
    layout["call"] = ((num_workers,), np.dtype(np.int64))
    offsets, size = {}, 0
    for name, (shape, dtype) in layout.items():
        offsets[name] = size
        size += -(-int(np.prod(shape)) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT
    os.ftruncate(descriptor, size)
    buffer = mmap(descriptor, size)
    arrays = {name: np.ndarray(*layout[name], buffer, offsets[name]) for name in layout}
    return SharedMemory(
        observation={name: arrays.pop(name) for name in observation},
        **arrays,  # pyright: ignore[reportArgumentType]
    )


def observation_leaves(setup: WorkerSetup) -> Iterator[Leaf]:
    """Iterate over the arrays of an observation, in the order of its space."""

    def walk(tree: Any) -> Iterator[Leaf]:
        if isinstance(tree, Leaf):
            yield tree
        else:
            for child in tree.values() if isinstance(tree, dict) else tree:
                yield from walk(child)

    return walk(setup.observation)


# --- callables that make one environment ---------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Registered:
    """Environment of Gymnasium's registry."""

    entry: str | EnvSpec
    """Id, or where no module registers it in every process, the registry's entry itself."""
    module: str = ""
    """Module to import first, which registers the id."""
    options: tuple[tuple[str, Any], ...] = ()

    def load(self) -> EnvSpec:
        """Import all code and return the registry's entry."""
        from gymnasium.envs import registration

        if self.module:
            importlib.import_module(self.module)
        entry = registration.spec(self.entry) if isinstance(self.entry, str) else self.entry
        if isinstance(entry.entry_point, str):
            registration.load_env_creator(entry.entry_point)
        return entry

    def __call__(self) -> Env:
        import gymnasium

        return gymnasium.make(self.load(), disable_env_checker=True, **dict(self.options))


@dataclasses.dataclass(frozen=True, eq=False)
class Filtered:
    """Environment that shows some entries of its dictionaries of observations."""

    make: Callable[[], Env]
    entries: tuple[str, ...]

    def __call__(self) -> Env:
        from gymnasium.wrappers import FilterObservation

        return FilterObservation(self.make(), self.entries)


@dataclasses.dataclass(frozen=True, eq=False)
class Pictured:
    """Environment whose observations are dictionaries of the `observation` and a `picture`."""

    make: Callable[[], Env]
    """Factory of environments whose `render` returns uint8 `[H, W, 3]`."""
    name: str
    """Name of the environment, for messages."""

    def __call__(self) -> Env:
        from gymnasium import spaces
        from gymnasium.wrappers import TransformObservation

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about modes that it does not have
            env = self.make()
            env.reset()
            picture = np.asarray(env.render())
        if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[-1] != 3:
            raise ValueError("`render` does not return an array uint8 [H, W, 3]")
        space = spaces.Box(0, 255, picture.shape, np.uint8)
        return TransformObservation(
            env,
            lambda observation: {"observation": observation, "picture": env.render()},
            spaces.Dict({"observation": env.observation_space, "picture": space}),
        )
