"""Devices, partition specs, and means over shards: all collectives but those of the drivers.

Agents use `global_grad`, `global_grad_in_blocks`, `global_mean` and `num_shards`. Each takes the
name of a mesh axis; with `axis=None` there is one shard and nothing is reduced.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils  # no stable home yet
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Integer, Shaped

from podracer import cgroups
from podracer.means import Mean, divide
from podracer.types import ConfigError, LearnerState, PyTree

Axis = str | tuple[str, ...] | None  # of a mesh, one or several
Device = Any  # jax.Device, which type checkers take for a variable
DATA, POD, HOST = "data", "pod", "host"
REPLICATED = PartitionSpec()
SHARDED = PartitionSpec(DATA)
LEARNER_SPEC = LearnerState(REPLICATED, SHARDED)  # type: ignore[arg-type]
_TRACED_FOR: ContextVar[str] = ContextVar("traced_for", default="")


def schedulable_cores() -> int:
    """Return the number of processor cores on which this process may run."""
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def num_cores() -> int:
    """Return the number of cores for threads and devices: in a container no more than its share."""
    count = schedulable_cores()
    return min(count, cgroups.cores() or count)


@functools.cache
def check_machine(threads: int = 32) -> None:
    """Raise `ConfigError` on a machine where JAX would abort, or fail without saying why.

    It starts threads for each core and some more, here `threads`.
    """
    if sys.platform == "linux" and not Path("/proc/cpuinfo").exists():
        raise ConfigError("JAX on a CPU needs /proc/cpuinfo, which is not there: mount /proc.")
    release, started = threading.Event(), list[threading.Thread]()
    try:
        for _ in range(threads + 2 * (os.cpu_count() or 1)):
            started.append(threading.Thread(target=release.wait))
            started[-1].start()
    except RuntimeError:
        raise ConfigError(
            f"only {len(started) - 1} threads can be started, and a run needs more: raise the "
            "limit of this user (ulimit -u) or of the container."
        ) from None
    finally:
        release.set()
        for thread in started:
            if thread.ident is not None:
                thread.join()


def find_devices(count: int = 0) -> list[Device]:
    """Return `count` devices, equally many of each host; all devices if `count` is 0.

    Raises `ConfigError` where `check_machine` does, where there are too few, or where the hosts
    cannot have equal shares or have different numbers of devices.
    """
    check_machine()
    devices = jax.devices()
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
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )


def wait_for_all_processes(where: str) -> None:
    """Block until every process of the run has called this with the same name `where`."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(where)


def any_process(*flags: bool) -> tuple[bool, ...]:
    """Return for each flag whether it is true in any process; every process must call this."""
    if jax.process_count() == 1:
        return flags
    return tuple(multihost_utils.process_allgather(np.asarray(flags)).any(axis=0).tolist())


def gather_texts(text: str) -> list[str]:
    """Return the texts of all processes, in their order; every process must call this."""
    if jax.process_count() == 1:
        return [text]
    data = np.frombuffer(text.encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.asarray(data.size))
    padded = np.pad(data, (0, sizes.max() - data.size))
    rows = multihost_utils.process_allgather(padded)
    return [bytes(row[:size]).decode() for row, size in zip(rows, sizes, strict=True)]


def on_one_device(tree: PyTree) -> PyTree:
    """Return the copy of replicated arrays that the first local device holds."""
    return jax.tree.map(lambda x: x.addressable_shards[0].data, tree)


def from_first_process(tree: PyTree) -> PyTree:
    """Return the first process's values of a tree of arrays on every process."""
    return multihost_utils.broadcast_one_to_all(tree) if jax.process_count() > 1 else tree


def fetch(tree: PyTree) -> Any:
    """Copy arrays to the host as `jax.device_get` does, but wait so that Ctrl-C can end the wait.

    A wait of JAX runs no handler of a signal until it ends, but one for another thread does.
    """
    is_ready = threading.Event()

    def wait() -> None:
        with contextlib.suppress(Exception):  # which the copy below raises
            jax.block_until_ready(tree)
        is_ready.set()

    threading.Thread(target=wait, daemon=True).start()
    is_ready.wait()
    return jax.device_get(tree)


def free_bytes(mesh: Mesh) -> int | None:
    """Return the free memory of each device of a mesh in bytes, or None where it is unknown.

    The CPU devices of a host share its memory equally.
    """
    device = mesh.local_devices[0]
    if device.platform == "cpu":
        free = free_host_bytes()
        return None if free is None else free // len(mesh.local_devices)
    stats = device.memory_stats() or {}
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0) if "bytes_limit" in stats else None


def free_host_bytes() -> int | None:
    """Return the free memory of this host or container in bytes, or None where it is unknown."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = 1024 * next(int(x.split()[1]) for x in lines if x.startswith("MemAvailable"))
        of_container = cgroups.free_memory()
        return free if of_container is None else min(free, of_container)
    return None


@contextlib.contextmanager
def traced_for(platform: str) -> Iterator[None]:
    """Trace programs as they are for a platform: `cpu`, or any other for an accelerator.

    So a CPU can compile what an accelerator would get, to learn its memory.
    """
    token = _TRACED_FOR.set(platform)
    try:
        yield
    finally:
        _TRACED_FOR.reset(token)


def format_bytes(size: int) -> str:
    """Return a number of bytes as text with a unit, such as `7.1 GiB`."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size} B"


def check_program_memory(program: Any, mesh: Mesh) -> Any:
    """Return a compiled program if its temporary memory fits into the free memory of the mesh.

    Raises `ConfigError` with both sizes otherwise, before anything runs.
    """
    free = free_bytes(mesh)
    needed = getattr(program.memory_analysis(), "temp_size_in_bytes", 0)
    if free is not None and needed > free:
        raise ConfigError(
            f"the program needs {format_bytes(needed)} on each device beside its state, but "
            f"{format_bytes(free)} are free: take fewer environments, a shorter rollout or "
            "more devices."
        )
    return program


def check_divisible(what: str, count: int, num_parts: int, parts: str = "devices") -> None:
    """Raise `ConfigError` where `count` items cannot be split evenly over devices, or hosts."""
    if count < 1 or count % num_parts:
        down = count // num_parts * num_parts
        near = " or ".join(str(n) for n in (down, down + num_parts) if n > 0)
        raise ConfigError(
            f"{what} is {count}, which {num_parts} {parts} cannot share evenly: take {near}."
        )


def num_shards(axis: Axis) -> int:
    """Return the number of shards along axes of a mesh; 1 if `axis` is None."""
    return 1 if axis is None else jax.lax.axis_size(axis)


def num_hosts_apart() -> int:
    """Return the number of hosts of the traced program that learn apart, else 1."""
    return jax.sharding.get_abstract_mesh().shape.get(HOST, 1)


def global_max(x: Float[Array, "..."], axis: str | None) -> Float[Array, "..."]:
    """Return the elementwise maximum over all shards."""
    return x if axis is None else jax.lax.pmax(x, axis)


def global_mean(tree: PyTree, axis: str | None) -> PyTree:
    """Return the mean over all shards of a tree of float arrays, with one all-reduce."""
    if axis is None:
        return tree
    flat, unravel = ravel_pytree(tree)
    return unravel(jax.lax.pmean(flat, axis))


def global_grad(
    loss: Callable[..., tuple[Float[Array, ""] | Mean, Any]],
    params: PyTree,
    *args: Any,
    axis: str | None,
) -> tuple[PyTree, Any]:
    """Return the gradient of `loss(params, *args) -> (loss, aux)`, averaged over shards, and aux.

    The drivers run under `shard_map(check_vma=False)`, where differentiating a replicated input
    gives the gradient of one shard, and the mean over shards is taken here. (With `check_vma=True`
    JAX sums such gradients itself, and this mean would leave the sum unchanged.) Where each shard's
    loss is a mean over equally many items, or a `Mean`, the result is the gradient of the mean over
    all items.
    """
    grads, (share, aux) = _grad_of_total(loss, is_all=axis is None)(params, *args)
    grads, share = global_mean((grads, share), axis)
    return _divided(grads, share), aux


def _grad_of_total(
    loss: Callable[..., tuple[Any, Any]], *, is_all: bool
) -> Callable[..., tuple[PyTree, Any]]:
    """Return the gradient of a loss, or of a `Mean`'s total, with `(share or None, aux)`.

    Where `is_all`, and nothing more is averaged, it is that of a `Mean`, without a share.
    """

    def total(*args: Any) -> tuple[jax.Array, Any]:
        value, aux = loss(*args)
        if isinstance(value, Mean) and not is_all:
            return value.total, (value.share, aux)
        return value.value if isinstance(value, Mean) else value, (None, aux)

    return jax.grad(total, has_aux=True)


def global_grad_in_blocks(
    loss: Callable[[PyTree, Integer[Array, "m"]], tuple[Float[Array, ""] | Mean, Any]],
    params: PyTree,
    indices: Integer[Array, "n"],
    *,
    indices_in_cache: int,
    axis: str | None,
) -> tuple[PyTree, Any]:
    """Return the gradient of `loss(params, indices)` and aux, both averaged over shards.

    `loss(params, indices)` must be a mean over its items, or a `Mean`; it gathers the items by
    their `indices [n]` itself. A CPU takes equal blocks of at most `indices_in_cache` of them, so
    that what the backward pass keeps stays in the processor's cache; an accelerator takes all at
    once. `aux` is a tree of float arrays.
    """
    blocks = split_evenly(indices, indices_in_cache if _is_for_cpu() else indices.shape[0])
    count = blocks.shape[0]
    block_grad = partial(_grad_of_total(loss, is_all=axis is None and count == 1), params)
    if count == 1:
        grads, (share, aux) = global_mean(block_grad(blocks[0]), axis)
        return _divided(grads, share), aux

    def add(total: PyTree, block: jax.Array) -> tuple[PyTree, None]:
        return jax.tree.map(lambda t, x: t + x / count, total, block_grad(block)), None

    shapes = jax.eval_shape(block_grad, blocks[0])
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    grads, (share, aux) = global_mean(jax.lax.scan(add, zeros, blocks)[0], axis)
    return _divided(grads, share), aux


def _divided(grads: PyTree, share: jax.Array | None) -> PyTree:
    """Return the gradient of a `Mean` from that of its total."""
    return grads if share is None else jax.tree.map(lambda x: divide(x, share), grads)


def map_blocks(
    function: Callable[[PyTree], Float[Array, "N m"]], x: PyTree, *, rows_in_cache: int
) -> Float[Array, "N m"]:
    """Return `function(x)`, which maps each row of arrays `[N, ...]` alone.

    A CPU takes equal blocks of at most `rows_in_cache` rows, one after another, so that what is
    made of a block stays in the processor's cache; an accelerator takes all rows at once.
    """
    N = jax.tree.leaves(x)[0].shape[0]
    if not (_is_for_cpu() and isinstance(N, int)):  # exported programs have any number of rows
        return function(x)
    blocks = jax.tree.map(lambda x: split_evenly(x, rows_in_cache), x)
    if len(jax.tree.leaves(blocks)[0]) == 1:
        return function(x)
    y = jax.lax.map(function, blocks)
    return y.reshape(N, y.shape[-1])


def split_evenly(x: Shaped[Array, "n ..."], limit: int) -> Shaped[Array, "K m ..."]:
    """Return an array `[n, ...]` in order as equal blocks `[K, m, ...]`.

    A block has at most `limit` items and more than half as many, or all n where no divisor of n
    lies between.
    """
    n = x.shape[0]
    limit = max(1, limit)
    sizes = (size for size in range(min(limit, n), limit // 2, -1) if n % size == 0)
    return x.reshape(-1, next(sizes, n), *x.shape[1:])


def platform_of(mesh: Mesh) -> str:
    """Return the platform for which a program of a mesh is traced, see `traced_for`."""
    return _TRACED_FOR.get() or mesh.devices.flat[0].platform


def _is_for_cpu() -> bool:
    return (_TRACED_FOR.get() or jax.default_backend()) == "cpu"
