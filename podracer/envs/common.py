"""Helpers that the adapters of other packages share."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.errors import ConfigError, install_command
from podracer.names import nearest
from podracer.types import ArraySpec, PyTree


def check_known(name: str, names: Iterable[str], problem: str) -> None:
    """Raise `ConfigError` unless a name is known; `problem` is such as "brax has no backend"."""
    if name not in names:
        raise ConfigError(atari_remedy(name) or f"{problem} {name!r}: {nearest(name, names)}")


def strongly_typed(tree: PyTree) -> PyTree:
    """Return a tree whose leaves are arrays of their own dtype, none of them weakly typed."""
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), tree)


def array_specs(tree: PyTree) -> PyTree:
    """Return the shapes and dtypes of a tree of arrays as `ArraySpec`s."""
    return jax.tree.map(lambda x: ArraySpec(x.shape, x.dtype), tree)


def narrower(dtype: Any) -> np.dtype:
    """Return the dtype in which JAX has values of a dtype of NumPy: at most 32 bits."""
    dtype = np.dtype(dtype)
    return np.dtype(f"{dtype.kind}4") if dtype.kind in "fiu" and dtype.itemsize > 4 else dtype


def import_optional(module: str, name: str, extra: str) -> Any:
    """Import a module of an optional package, untyped.

    Raises `ConfigError` where it is not installed; the message names the environment `name` and the
    command that installs the package.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{name} needs the package {error.name}: {install_command(extra)}."
        ) from error


def atari_remedy(environment_id: str) -> str:
    """Return what to write for Gymnasium's id of an Atari game, such as ALE/Pong-v5, else ""."""
    if match := re.match(r"ALE/(\w+)|(\w+)(?:NoFrameskip|Deterministic)-v", environment_id):
        game = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", match[1] or match[2]).lower()
        return f"Atari games have other names: write atari:{game} instead of {environment_id}."
    return ""
