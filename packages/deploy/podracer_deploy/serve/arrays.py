"""Observations as JSON has them, as arrays of a specification."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.types import ArraySpec, PyTree


class RequestError(Exception):
    """A request that cannot be answered, with the status of HTTP that says so."""

    def __init__(self, message: str, status: int = 400) -> None:
        """Make an error with a sentence for the client."""
        super().__init__(message)
        self.status = status


def arrays_of(specs: PyTree, value: Any, name: str = "observation") -> PyTree:
    """Return the arrays of a value as JSON has it.

    Raises `RequestError` for what does not fit the specification; only real numbers are rounded.
    """
    if isinstance(specs, ArraySpec):
        return _array(specs, value, name)
    if isinstance(specs, dict):
        if not isinstance(value, dict) or value.keys() != specs.keys():
            raise RequestError(f"{name} must be an object with {', '.join(map(str, specs))}.")
        return {key: arrays_of(spec, value[key], f"{name}.{key}") for key, spec in specs.items()}
    if isinstance(specs, tuple | list):
        if not isinstance(value, list) or len(value) != len(specs):
            raise RequestError(f"{name} must be a list of {len(specs)} parts.")
        parts = [
            arrays_of(spec, part, f"{name}[{i}]")
            for i, (spec, part) in enumerate(zip(specs, value, strict=True))
        ]
        return type(specs)(parts)
    raise RequestError(f"{name} is a {type(specs).__name__}, which JSON cannot hold.", status=501)


def text_size(specs: PyTree) -> int:
    """Return a number of characters in which JSON can hold an observation, with room to spare."""
    leaves = jax.tree_util.tree_flatten_with_path(specs)[0]
    return sum(
        32 * (1 + math.prod(spec.shape)) + len(jax.tree_util.keystr(path)) for path, spec in leaves
    )


def least_values(specs: PyTree) -> PyTree:
    """Return one observation of the smallest indices, and of zeros."""
    return jax.tree.map(lambda spec: np.full(spec.shape, spec.start, spec.dtype), specs)


def _array(spec: ArraySpec, value: Any, name: str) -> np.ndarray:
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise RequestError(f"{name} is no array: its rows differ in length.") from error
    if array.dtype.kind not in "biuf":
        raise RequestError(f"{name} must hold numbers.")
    with np.errstate(all="ignore"):
        converted = array.astype(spec.dtype)
    if jnp.issubdtype(spec.dtype, jnp.floating):  # bfloat16, too
        if not np.isfinite(converted).all():
            raise RequestError(f"{name} has numbers that are not finite as {spec.dtype}.")
    elif not np.array_equal(converted, array):
        raise RequestError(f"{name} has numbers that are no {spec.dtype}.")
    if spec.num_values is not None:
        end = spec.start + spec.num_values
        if not ((converted >= spec.start) & (converted < end)).all():
            raise RequestError(f"{name} must lie in {spec.start} to {end - 1}.")
    return converted


def pad(batch: PyTree, size: int) -> PyTree:
    """Return a batch `[size, ...]`, of which the last row repeats that of `batch`."""

    def repeat_last(x: np.ndarray) -> np.ndarray:
        return np.concatenate([x, np.repeat(x[-1:], size - len(x), axis=0)])

    return jax.tree.map(repeat_last, batch)
