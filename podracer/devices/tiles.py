"""Rings in the memory of the host, which a program on a device reads and writes in slices.

On an accelerator the memory is pinned. Programs only slice such an array, from host memory to the
device, and update slices of it in place: XLA copies nothing else. A gather would be computed on
the host instead (decision 0055).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Int, Int32, Shaped

from podracer.devices.kernels import scan
from podracer.devices.reductions import is_for_gpu, is_for_tpu
from podracer.fields import struct, unchecked
from podracer.types import PyTree

PINNED = "pinned_host"  # JAX's name of the memory
_TILE = (8, 128)  # words of 32 bits that a TPU keeps together


@unchecked
@struct
class HostMemory:
    """Arrays in host memory: a part of a state that starts as zeros, or a data set.

    Drivers place them there, and pass a state's from update to update without a copy.
    """

    arrays: PyTree  # [B, C, ...]


def is_host_memory(node: Any) -> bool:
    """Return whether this node of a tree is in host memory."""
    return isinstance(node, HostMemory)


def map_host_memory(function: Callable[..., Any], tree: PyTree, *trees: PyTree) -> PyTree:
    """Map a function over the `HostMemory` nodes of a tree; keep its other leaves."""

    def apply(node: Any, *nodes: Any) -> Any:
        return function(node, *nodes) if is_host_memory(node) else node

    return jax.tree.map(apply, tree, *trees, is_leaf=is_host_memory)


def host_leaves(tree: PyTree) -> list[Any]:
    """Return the arrays of a tree that are in host memory."""
    nodes = jax.tree.leaves(tree, is_leaf=is_host_memory)
    return jax.tree.leaves([node for node in nodes if is_host_memory(node)])


def without_host_memory(tree: PyTree) -> PyTree:
    """Return a tree with nothing in its `HostMemory` nodes."""
    return map_host_memory(lambda _: HostMemory(()), tree)


def zeros_in_host_memory(tree: PyTree, shapes: PyTree) -> PyTree:
    """Return a tree with zeros in its `HostMemory` nodes, of these shapes and shardings.

    They never are on a device.
    """

    def zeros(x: jax.ShapeDtypeStruct) -> jax.Array:
        assert x.sharding is not None
        shard = x.sharding.shard_shape(x.shape)
        return jax.make_array_from_callback(x.shape, x.sharding, lambda _: np.zeros(shard, x.dtype))

    return map_host_memory(lambda _, node: jax.tree.map(zeros, node), tree, shapes)


def pin(shardings: PyTree) -> PyTree:
    """Return shardings of a state, in `HostMemory` nodes with the memory of the host."""
    return map_host_memory(lambda node: jax.tree.map(_pinned, node), shardings)


def _pinned(sharding: NamedSharding) -> NamedSharding:
    pinned = sharding.with_memory_kind(PINNED)
    if pinned.memory_kind == PINNED:
        return pinned
    # A GPU's compiler describes devices without their memories, so JAX drops the memory's kind.
    return NamedSharding(sharding.mesh.abstract_mesh, sharding.spec, memory_kind=PINNED)


def keep_on_host(tree: PyTree) -> PyTree:
    """Return a traced tree whose `HostMemory` nodes have the type of arrays in host memory."""
    return map_host_memory(lambda node: jax.tree.map(_to_host, node), tree)


def _to_host(x: jax.Array) -> jax.Array:
    return jax.device_put(x, jax.memory.Space.Host)


def _to_device(x: jax.Array) -> jax.Array:
    return jax.device_put(x, jax.memory.Space.Device)


def in_host_memory(tree: PyTree) -> HostMemory:
    """Return NumPy's arrays `[C, ...]` as a ring `[1, C, ...]`, for a program's arguments."""
    return HostMemory(jax.tree.map(lambda x: to_stored(x[None]), tree))


def to_stored(x: Any, *, on_host: bool = True) -> Any:
    """Return an array `[X, Y, ...]` in the form of a ring: on a TPU as whole tiles of words.

    A TPU copies between both memories only what lies there in one piece, so a ring of another form
    would go through the device as a whole. A ring on the device would be copied to a form with
    padded frames before samples are read, so there large observations have this form, too.
    """
    parts, lead = 4 // x.dtype.itemsize, x.shape[:2]
    tile = parts * math.prod(_TILE)
    if not is_for_tpu() or (not on_host and 4 * math.prod(x.shape[2:]) < 3 * tile):
        return x
    x = x.astype(jnp.uint8) if x.dtype == bool else x
    flat, is_numpy = x.reshape(*lead, -1), isinstance(x, np.ndarray)
    pad = np.pad if is_numpy else jnp.pad
    flat = pad(flat, ((0, 0), (0, 0), (0, -flat.shape[-1] % tile)))
    if is_numpy:
        return flat.view(np.uint32).reshape(*lead, -1, _TILE[1])
    flat = flat.reshape(*lead, -1, parts) if parts > 1 else flat
    return jax.lax.bitcast_convert_type(flat, jnp.uint32).reshape(*lead, -1, _TILE[1])


def from_stored(stored: Shaped[Array, "X Y ..."], spec: Any) -> Shaped[Array, "X Y ..."]:
    """Return what `to_stored` was given; `spec` has shape and dtype of one timestep."""
    if (stored.shape[2:], stored.dtype) == (tuple(spec.shape), spec.dtype):
        return stored
    dtype, lead = jnp.dtype(jnp.uint8 if spec.dtype == bool else spec.dtype), stored.shape[:2]
    flat = jax.lax.bitcast_convert_type(stored, dtype).reshape(*lead, -1)
    return flat[..., : math.prod(spec.shape)].reshape(*lead, *spec.shape).astype(spec.dtype)


def write_slices(
    ring: Shaped[Array, "B C ..."], new: Shaped[Array, "T B ..."], position: Int32[Array, ""]
) -> Shaped[Array, "B C ..."]:
    """Return a ring in host memory with timesteps `new`, on the device, from a position on."""
    new = to_stored(new)
    ring, size, length = _to_host(ring), ring.shape[1], new.shape[0]

    def write(ring: jax.Array, new: jax.Array, position: jax.Array) -> jax.Array:
        if not is_for_tpu():
            return jax.lax.dynamic_update_slice_in_dim(ring, _to_host(new), position, 1)
        rows = jnp.arange(ring.shape[0])
        return jax.lax.scan(partial(write_row, position=position), ring, (new, rows))[0]

    def write_row(ring: jax.Array, item: Any, position: jax.Array) -> tuple[jax.Array, None]:
        new, row = item
        start = (row, position, *[0] * (ring.ndim - 2))
        return jax.lax.dynamic_update_slice(ring, _to_host(new[None]), start), None

    if size % length == 0:  # never crosses the end
        return write(ring, jnp.moveaxis(new, 0, 1), position)

    def step(ring: jax.Array, item: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        timestep, offset = item
        return write(ring, timestep[:, None], (position + offset) % size), None

    return jax.lax.scan(step, ring, (new, jnp.arange(length)))[0]


def read_windows(
    ring: Shaped[Array, "B C ..."], rows: Int[Array, "N"], starts: Int[Array, "N"], length: int
) -> Shaped[Array, "W N ..."]:
    """Return `length` W consecutive timesteps of a ring in host memory, from each start.

    They are on the device. Each window takes two slices: one up to the end of the ring, one from
    its beginning.
    """
    ring, size = _to_host(ring), ring.shape[1]
    sizes = (1, length, *ring.shape[2:])

    def read(_: None, item: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        row, start = item
        first = jnp.minimum(start, size - length)
        end, beginning = (
            _to_device(jax.lax.dynamic_slice(ring, (row, time, *[0] * (ring.ndim - 2)), sizes))
            for time in (first, jnp.zeros_like(first))
        )
        times = start + jnp.arange(length)
        indices = jnp.where(times < size, times - first, times - size + length)
        return None, jnp.concatenate([end, beginning], 1)[0, indices]

    loop = scan if is_for_gpu() else jax.lax.scan  # several reads take a TPU long to compile
    return jnp.moveaxis(loop(read, None, (rows, starts % size))[1], 1, 0)
