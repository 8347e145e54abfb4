"""What adapters of other packages share: their trees as ours."""

from __future__ import annotations

import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.types import ArraySpec, ConfigError, Continuous, PyTree


def strong(tree: PyTree) -> PyTree:
    """Python numbers as arrays of their own dtype, not weakly typed."""
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), tree)


def cast(tree: PyTree, like: PyTree) -> PyTree:
    """A tree with the dtypes of another of the same structure."""
    return jax.tree.map(lambda x, y: jnp.asarray(x, y.dtype), tree, like)


def described(observation: PyTree) -> PyTree:
    """Shapes and dtypes of observations as `ArraySpec`s."""
    return jax.tree.map(lambda x: ArraySpec(x.shape, x.dtype), observation)


def as_dictionary(value: Any) -> PyTree:
    """Named tuples and their like, which some packages observe, as dictionaries."""
    if hasattr(value, "_asdict"):
        return {name: as_dictionary(x) for name, x in value._asdict().items()}
    if isinstance(value, dict):
        return {name: as_dictionary(x) for name, x in value.items()}
    return value


def box(name: str, low: Any, high: Any, shape: tuple[int, ...]) -> Continuous:
    """Bounded actions as a vector. Raises `ConfigError` where a bound is missing."""
    low, high = (np.broadcast_to(np.asarray(x), shape).ravel() for x in (low, high))
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise ConfigError(f"{name} has actions without bounds.")
    return Continuous(tuple(map(float, low)), tuple(map(float, high)))


def load(module: str, name: str, extra: str) -> Any:
    """A module of an optional package, of which a type checker need not know. Raises `ConfigError`
    with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f'{name} needs the package {error.name}: pip install "podracer[{extra}]".'
        ) from error
