"""Schema of a state: path, shape, dtype and key implementation of every leaf."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.errors import CheckpointError
from podracer.types import PyTree, leaves_by_path

Schema = dict[str, list[Any]]  # path -> [shape, dtype, key implementation or None]


def schema(state: PyTree) -> Schema:
    """Return path -> [shape, dtype, key implementation or None]; typed keys as their data.

    The result is JSON-serializable. Leaves are arrays or `ShapeDtypeStruct`. Raises
    `CheckpointError` naming a leaf that is neither.
    """
    return {path: _describe(path, leaf) for path, leaf in leaves_by_path(state).items()}


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


def _describe(path: str, leaf: Any) -> list[Any]:
    if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
        raise CheckpointError(f"{path} is of type {type(leaf).__name__}, not an array")
    if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return [list(leaf.shape), np.dtype(leaf.dtype).name, None]
    key = jnp.empty((), leaf.dtype)  # a `ShapeDtypeStruct` does not tell its implementation
    words = jax.random.key_data(key)
    return [[*leaf.shape, *words.shape], words.dtype.name, str(jax.random.key_impl(key))]
