"""Devices, partition specs and gradients: the only file with a collective besides the drivers.

An agent meets the mesh in `global_grad`, or `global_grad_in_blocks`, and `global_mean`. They take
the name of the mesh axis and do nothing more than their local work when it is None.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils  # no stable home yet
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from podracer.types import ConfigError, LearnerState, PyTree

Device = Any  # jax.Device, which type checkers take for a variable
DATA, POD = "data", "pod"
REPLICATED = PartitionSpec()
SHARDED = PartitionSpec(DATA)
LEARNER_SPEC = LearnerState(REPLICATED, SHARDED)  # type: ignore[arg-type]


def find_devices(count: int = 0) -> list[Device]:
    """The first `count` devices of all hosts (0: every one), or `ConfigError`."""
    devices = jax.devices()
    if count < 0 or count > len(devices):
        raise ConfigError(
            f"--devices {count} was asked for, but this run sees {len(devices)} "
            f"{devices[0].platform} device(s)."
        )
    count = count or len(devices)
    if count % jax.process_count():
        raise ConfigError(
            f"--devices {count} cannot be split evenly over {jax.process_count()} processes."
        )
    # The same number from every host, so that each host has a share of the work.
    share = count // jax.process_count()
    by_host = [[d for d in devices if d.process_index == p] for p in range(jax.process_count())]
    return [device for host in by_host for device in host[:share]]


def make_mesh(devices: Sequence[Device] | None = None, axis: str = DATA) -> Mesh:
    """A mesh with the one axis over the given devices (all of them by default)."""
    devices = list(devices) if devices is not None else jax.devices()
    return Mesh(np.asarray(devices), (axis,), axis_types=(AxisType.Auto,))


def shardings(mesh: Mesh, specs: PyTree) -> PyTree:
    """Partition specs to shardings on this mesh."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )


def wait_for_all_processes(where: str) -> None:
    """Until every process of the run has come here; nothing to wait for in a run of one."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(where)


def on_one_device(tree: PyTree) -> PyTree:
    """Replicated arrays as they lie on the first of this host's devices that has them."""
    return jax.tree.map(lambda x: x.addressable_shards[0].data, tree)


def from_first_process(tree: PyTree) -> PyTree:
    """Arrays as the first process has them, so that all decide alike."""
    return multihost_utils.broadcast_one_to_all(tree) if jax.process_count() > 1 else tree


def free_bytes(mesh: Mesh) -> int | None:
    """Memory that each device of a mesh has left, None where it does not say. The CPU devices of a
    host share its memory."""
    device = mesh.local_devices[0]
    if device.platform == "cpu":
        with contextlib.suppress(OSError, StopIteration):
            lines = Path("/proc/meminfo").read_text().splitlines()
            kib = next(int(x.split()[1]) for x in lines if x.startswith("MemAvailable"))
            return kib * 1024 // len(mesh.local_devices)
        return None
    stats = device.memory_stats() or {}
    return stats["bytes_limit"] - stats.get("bytes_in_use", 0) if "bytes_limit" in stats else None


def format_bytes(size: int) -> str:
    """Bytes with a unit: `7.1 GiB`."""
    for unit, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= scale:
            return f"{size / scale:.3g} {unit}"
    return f"{size} B"


def fitting(program: Any, mesh: Mesh) -> Any:
    """A compiled program, if the memory that it needs besides its arguments is free; `ConfigError`
    with the sizes, before anything runs, where it is not."""
    free = free_bytes(mesh)
    needed = getattr(program.memory_analysis(), "temp_size_in_bytes", 0)
    if free is not None and needed > free:
        raise ConfigError(
            f"the program needs {format_bytes(needed)} on each device beside its state, but "
            f"{format_bytes(free)} are free: take fewer environments, a shorter rollout or "
            "more devices (LPG: more --lifetime-groups, or --recompute)."
        )
    return program


def check_divisible(what: str, count: int, num_devices: int) -> None:
    """`ConfigError` where a batch cannot be split evenly over the devices."""
    if count < 1 or count % num_devices:
        down = count // num_devices * num_devices
        near = " or ".join(str(n) for n in (down, down + num_devices) if n > 0)
        raise ConfigError(
            f"{what} is {count}, which {num_devices} devices cannot share evenly: take {near}."
        )


def global_mean(tree: PyTree, axis: str | None) -> PyTree:
    """Mean over all shards of a tree of float arrays, in one all-reduce.

    Two reductions of a program must depend on each other (decision 0012): give one call all that
    is known, or let the later one use the result of the earlier.
    """
    if axis is None:
        return tree
    flat, unravel = ravel_pytree(tree)
    return unravel(jax.lax.pmean(flat, axis))


def global_grad(
    loss: Callable[..., tuple[jax.Array, Any]], params: PyTree, *args: Any, axis: str | None
) -> tuple[PyTree, Any]:
    """Gradient of `loss(params, *args) -> (scalar, aux)`, averaged over all shards; and aux.

    The drivers run under `shard_map(check_vma=False)`, where differentiating a replicated input
    gives one shard's gradient and the mean is ours to take. (With `check_vma=True` JAX sums such
    gradients by itself and this mean would silently return the sum.) Where each shard's loss is a
    mean over equally many items, the result is the gradient of the mean over all items.
    """
    grads, aux = jax.grad(loss, has_aux=True)(params, *args)
    return global_mean(grads, axis), aux


def global_grad_in_blocks(
    loss: Callable[..., tuple[jax.Array, Any]], params: PyTree, blocks: PyTree, *, axis: str | None
) -> tuple[PyTree, Any]:
    """`global_grad` of a mean over equal blocks, the leading axis of `blocks`, one at a time.

    What a block's backward pass keeps then stays in a processor's cache. `aux` is averaged too.
    """
    count = jax.tree.leaves(blocks)[0].shape[0]
    one = partial(jax.grad(loss, has_aux=True), params)
    if count == 1:
        return global_grad(loss, params, jax.tree.map(lambda x: x[0], blocks), axis=axis)

    def add(total: PyTree, block: PyTree) -> tuple[PyTree, None]:
        return jax.tree.map(lambda t, x: t + x / count, total, one(block)), None

    shapes = jax.eval_shape(one, jax.tree.map(lambda x: x[0], blocks))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    grads, aux = jax.lax.scan(add, zeros, blocks)[0]
    return global_mean(grads, axis), aux
