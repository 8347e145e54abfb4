"""Arrays of a checkpoint: their schema, what Orbax stores, and how it is read back unchanged."""

from __future__ import annotations

import functools
import logging
import math
import os
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.errors import CheckpointError, StorageError
from podracer.types import PyTree, leaves_by_path

MEMORY_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # bytes


Schema = dict[str, list[Any]]  # path -> [shape, dtype, key implementation or None]


def schema(state: PyTree) -> Schema:
    """Return path -> [shape, dtype, key implementation or None]; typed keys as their data.

    The result is JSON-serializable. Leaves are arrays or `ShapeDtypeStruct`. Raises
    `CheckpointError` naming a leaf that is neither.
    """
    entries: Schema = {}
    for path, leaf in leaves_by_path(state).items():
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise CheckpointError(f"{path} is of type {type(leaf).__name__}, not an array")
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            key = jnp.empty((), leaf.dtype)  # a `ShapeDtypeStruct` does not tell its implementation
            words, impl = jax.random.key_data(key), str(jax.random.key_impl(key))
            entries[path] = [[*leaf.shape, *words.shape], words.dtype.name, impl]
        else:
            entries[path] = [list(leaf.shape), np.dtype(leaf.dtype).name, None]
    return entries


def schema_difference(stored: Schema, expected: Schema) -> str:
    """Describe in one line how two schemas differ, up to ten leaves."""
    lines = [
        f"{path} is {_spell(stored.get(path))} in the checkpoint, "
        f"{_spell(expected.get(path))} expected"
        for path in sorted(stored.keys() | expected.keys())
        if stored.get(path) != expected.get(path)
    ]
    return "; ".join(lines[:10]) + (f"; and {len(lines) - 10} more" if len(lines) > 10 else "")


def _spell(entry: list[Any] | None) -> str:
    if entry is None:
        return "absent"
    shape, dtype, impl = entry
    return f"{dtype}{shape}" + (f" of {impl} keys" if impl else "")


def read_arrays(
    path: Path, entries: Schema, shardings: dict[str, jax.sharding.Sharding | None]
) -> dict[str, Any]:
    """Read the arrays of `shardings` by path: onto devices, or onto the host where it is None.

    `entries` is the schema of the whole checkpoint.
    """
    import orbax.checkpoint as ocp  # takes long, see `Checkpointer`

    stored = {name: entry[:2] for name, entry in entries.items() if 0 not in entry[0]}
    empty = {name: np.zeros(*entries[name][:2]) for name in shardings if name not in stored}
    host = ocp.RestoreArgs(restore_type=np.ndarray)
    targets = {
        name: ocp.ArrayRestoreArgs(sharding=sharding) if sharding else host
        for name, sharding in shardings.items()
        if name in stored
    }
    if not targets:
        return empty
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        try:
            stored_arrays = reader.metadata(path / "state").item_metadata.tree
            declared = {
                name: [list(a.shape), np.dtype(a.dtype).name] for name, a in stored_arrays.items()
            }
            if declared != stored:
                raise CheckpointError(f"{path}: the arrays do not match meta.json")
            size = sum(
                math.prod(stored_arrays[name].shape) * np.dtype(stored_arrays[name].dtype).itemsize
                for name in targets
            )
            if not any(shardings.values()) and size > MEMORY_BYTES:
                raise CheckpointError(f"{path} holds {size:,} bytes, more than this machine's RAM")
            item = ocp.args.PyTreeRestore(
                dict.fromkeys(targets, 0), restore_args=targets, partial_restore=True
            )
            return empty | reader.restore(path / "state", args=item)
        except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path}: Orbax cannot read the arrays: {error}") from error
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error}") from error


def stored_array(leaf: Any) -> Any:
    """Return the array that is stored for a leaf."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if isinstance(leaf, jax.Array) and leaf.is_fully_replicated and leaf.is_fully_addressable:
        # Orbax would have each device slice and send its part: a kernel per device and leaf.
        return leaf.addressable_data(0)
    return leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)


def sharding_of(leaf: Any) -> jax.sharding.Sharding | None:
    """Return the sharding of a leaf, None if it goes to the default device."""
    uncommitted = isinstance(leaf, jax.Array) and not leaf.committed
    return None if uncommitted else getattr(leaf, "sharding", None)


def place(leaf: Any, value: Any, impl: str | None) -> Any:
    """Return a stored array as a leaf like `leaf`; `impl` is the implementation of its keys."""
    if isinstance(leaf, np.ndarray | np.generic):
        return value
    if not isinstance(value, jax.Array):
        sharding = sharding_of(leaf)
        value = jnp.array(value) if sharding is None else jax.device_put(value, sharding)
    return jax.random.wrap_key_data(value, impl=impl) if impl else value


@functools.cache
def silence_orbax() -> None:
    """Keep hundreds of lines off the console that Orbax prints of a save that fails.

    It raises the error, too. Its threads log their stacks; their callbacks find a closed loop, some
    of them after the save and its checkpointer have ended: hence for the life of the process.
    """
    hook = sys.unraisablehook

    def is_of_others(record: logging.LogRecord) -> bool:
        return "orbax" not in record.pathname

    def hook_without_loops(failure: Any) -> None:
        if str(failure.exc_value) != "Event loop is closed":
            hook(failure)

    logging.getLogger("absl").addFilter(is_of_others)
    sys.unraisablehook = hook_without_loops
