"""Devices and their meshes, and what the processes of a run tell each other."""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils  # no stable home yet
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from podracer.devices.startup import check_machine
from podracer.errors import ConfigError
from podracer.io.code import digest_of_code
from podracer.io.differences import differences
from podracer.types import LearnerState, PyTree

Device = Any  # jax.Device, which type checkers take for a variable
DATA, POD = "data", "pod"
REPLICATED = PartitionSpec()
SHARDED = PartitionSpec(DATA)
LEARNER_SPEC = LearnerState(REPLICATED, SHARDED)  # type: ignore[arg-type]


def find_devices(count: int = 0) -> list[Device]:
    """Return `count` devices, equally many of each host; all devices if `count` is 0.

    Raises `ConfigError` where `check_machine` does, where there are too few, where the hosts cannot
    have equal shares or have different numbers of devices, or where they have not joined.
    """
    check_machine()
    devices = jax.devices()
    if jax.process_count() > 1 and not jax.distributed.is_initialized():  # hosts of one TPU
        raise ConfigError(
            f"the devices belong to {jax.process_count()} processes, which have not joined: give "
            "each `coordinator`, `num_processes` and `process_id`."
        )
    by_host = [[d for d in devices if d.process_index == p] for p in range(jax.process_count())]
    sizes = [len(host) for host in by_host]
    if len(set(sizes)) > 1:
        raise ConfigError(
            f"the processes have {', '.join(map(str, sizes))} devices: give each as many, and the "
            "same `devices`."
        )
    if count < 0 or count > len(devices):
        raise ConfigError(
            f"`devices={count}` was asked for, but this run sees {len(devices)} "
            f"{devices[0].platform} device(s)."
        )
    count = count or len(devices)
    if count % jax.process_count():
        raise ConfigError(
            f"`devices={count}` cannot be split evenly over {jax.process_count()} processes: "
            f"take a multiple of {jax.process_count()}."
        )
    share = count // jax.process_count()
    return [device for host in by_host for device in host[:share]]


def make_mesh(devices: Sequence[Device] | None = None, axis: str = DATA) -> Mesh:
    """Return a mesh with one axis over the given devices (all devices by default)."""
    devices = list(devices) if devices is not None else jax.devices()
    return Mesh(np.asarray(devices), (axis,), axis_types=(AxisType.Auto,))


def shardings(mesh: Mesh, specs: PyTree) -> PyTree:
    """Return a tree of shardings on a mesh for a tree of partition specs."""
    return jax.tree.map(partial(NamedSharding, mesh), specs)


def wait_for_all_processes(place: str) -> None:
    """Block until every process of the run has called this with the same name `place`."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(place)


def largest_of_processes(number: int) -> int:
    """Return the largest of all processes' numbers; every process must call this."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.process_allgather(np.asarray(number)).max())


def gather_texts(text: str) -> list[str]:
    """Return the texts of all processes, in their order; every process must call this."""
    if jax.process_count() == 1:
        return [text]
    data = np.frombuffer(text.encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.asarray(data.size))
    padded = np.pad(data, (0, sizes.max() - data.size))
    rows = multihost_utils.process_allgather(padded)
    return [bytes(row[:size]).decode() for row, size in zip(rows, sizes, strict=True)]


def check_same_configuration(configuration: Mapping[str, Any]) -> None:
    """Raise `ConfigError`, in every process, if two have different configurations or code."""
    text = json.dumps({**configuration, "started": None, "code": digest_of_code()}, default=str)
    first, *later = map(json.loads, gather_texts(text))
    for number, later_configuration in enumerate(later, 1):
        if changed := differences(first, later_configuration):
            name, (expected, actual) = next(iter(changed.items()))
            raise ConfigError(
                f"{name} is {expected} in process 0 and {actual} in process {number}: start all "
                "processes of a run with the same command and the same versions."
            )


def on_one_device(tree: PyTree) -> PyTree:
    """Return the copy of replicated arrays that the first local device holds."""
    return jax.tree.map(lambda x: x.addressable_shards[0].data, tree)


def from_first_process(tree: PyTree) -> PyTree:
    """Return the first process's values of a tree of arrays on every process."""
    return multihost_utils.broadcast_one_to_all(tree) if jax.process_count() > 1 else tree


NEWEST: dict[Device, Any] = {}
"""An array of the newest program that was noted for each device."""


def note_program(output: jax.Array) -> None:
    """Note that devices got the program of an array, which no other program may consume."""
    NEWEST.update((shard.device, shard.data) for shard in output.addressable_shards)


def noted_program(device: Device) -> jax.Array | None:
    """Return an output of the newest program that was noted for a device, None if it has ended.

    None on a CPU, too, which runs the programs of several threads side by side.
    """
    output = NEWEST.get(device) if in_turn(device) else None
    return None if output is None or output.is_ready() else output


def in_turn(device: Device) -> bool:
    """Return whether a device runs programs in the order in which it gets them."""
    return device.platform != "cpu"


class Arrival:
    """Arrays that a program still computes, and the time at which they are there.

    A wait of JAX runs no handler of a signal until it ends, but one for another thread does.
    """

    def __init__(self, tree: PyTree) -> None:
        self._tree, self._is_ready = tree, threading.Event()
        self.time = math.nan  # in `time.perf_counter`, once the values are there
        threading.Thread(target=self._wait, daemon=True).start()

    def _wait(self) -> None:
        with contextlib.suppress(Exception):  # the copy raises it
            jax.block_until_ready(self._tree)
        self.time = time.perf_counter()
        self._is_ready.set()

    def values(self) -> Any:
        """Wait for the arrays and return copies on the host, as `jax.device_get` does."""
        self._is_ready.wait()
        return jax.device_get(self._tree)


def fetch(tree: PyTree) -> Any:
    """Copy arrays to the host as `jax.device_get` does, in a wait that Ctrl-C can end."""
    return Arrival(tree).values()


def check_divisible(name: str, count: int, num_parts: int, parts: str = "devices") -> None:
    """Raise `ConfigError` where `count` items cannot be split evenly over devices, or hosts.

    A resumed run keeps its counts, so the sentence names the nearest numbers of parts, too.
    """
    if count >= 1 and count % num_parts == 0:
        return
    processes, remedies = jax.process_count(), [nearest_multiples(count, num_parts)]
    shown = f"{num_parts} {parts}"
    if fitting := _nearest_divisors(count, num_parts, processes if parts == "devices" else 1):
        remedies = [f"{fitting} {parts}", *remedies]
    elif fitting := _nearest_divisors(count, processes):
        shown, remedies = f"{shown} of {processes} processes", [f"{fitting} processes", *remedies]
    raise ConfigError(
        f"{name} is {count}, which {shown} cannot share evenly: take "
        f"{', or in a new run '.join(remedies)}."
    )


def _nearest_divisors(number: int, parts: int, factor: int = 1) -> str:
    """Return the divisors of a number that are multiples of a factor, below and above `parts`."""
    divisors = [n for n in range(factor, number + 1, factor) if number % n == 0]
    lower, upper = [n for n in divisors if n < parts], [n for n in divisors if n > parts]
    return " or ".join(str(n) for n in (*lower[-1:], *upper[:1]))


def nearest_multiples(number: int, factor: int) -> str:
    """Return the positive multiples of a factor around a number, `8 or 16`, for a message."""
    lower = number // factor * factor
    return " or ".join(str(n) for n in (lower, lower + factor) if n > 0)
