"""Helpers that the adapters of other packages share."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.errors import ConfigError, install_command
from podracer.names import nearest
from podracer.types import ArraySpec, Continuous, EnvironmentSpec, EnvState, PyTree, TimeStep


@dataclasses.dataclass(frozen=True)
class Adapted:
    """One environment of another package, without restarts, as an adapter's functions.

    Adapters cache it, so that equal names and options give the same object and one program.
    """

    spec: EnvironmentSpec
    reset: Callable[[jax.Array], tuple[EnvState, TimeStep]]
    step: Callable[[jax.Array, EnvState, jax.Array], tuple[EnvState, TimeStep]]
    render: Callable[[EnvState], np.ndarray] | None = None
    """Function that draws a state, uint8 `[H, W, 3]`, see `Features.render`."""


def check_known(name: str, names: Iterable[str], problem: str) -> None:
    """Raise `ConfigError` unless a name is known; `problem` is such as "brax has no backend"."""
    if name not in names:
        raise ConfigError(f"{problem} {name!r}: {nearest(name, names)}")


@contextlib.contextmanager
def refusing(problem: str, *errors: type[Exception]) -> Iterator[None]:
    """Make a `ConfigError` of errors in the context, such as "gymnax cannot make 'Pong': ..."."""
    try:
        yield
    except errors as error:
        reason = str(error).partition("\n")[0].rstrip(".:")
        raise ConfigError(f"{problem}: {reason}.") from error


def strongly_typed(tree: PyTree) -> PyTree:
    """Return a tree whose leaves are arrays of their own dtype, none of them weakly typed."""
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.result_type(x)), tree)


def cast_like(tree: PyTree, target: PyTree) -> PyTree:
    """Return a tree with the dtypes of another one of the same structure."""
    return jax.tree.map(lambda x, y: jnp.asarray(x, y.dtype), tree, target)


def array_specs(tree: PyTree) -> PyTree:
    """Return the shapes and dtypes of a tree of arrays as `ArraySpec`s."""
    return jax.tree.map(lambda x: ArraySpec(x.shape, x.dtype), tree)


def narrower(dtype: Any) -> np.dtype:
    """Return the dtype in which JAX has values of a dtype of NumPy: at most 32 bits."""
    dtype = np.dtype(dtype)
    return np.dtype(f"{dtype.kind}4") if dtype.kind in "fiu" and dtype.itemsize > 4 else dtype


def continuous_actions(name: str, low: Any, high: Any, shape: tuple[int, ...]) -> Continuous:
    """Return bounded actions as a flat vector. Raises `ConfigError` where a bound is missing."""
    low, high = (np.broadcast_to(np.asarray(x), shape).ravel() for x in (low, high))
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise ConfigError(f"{name} has actions without bounds.")
    return Continuous(tuple(map(float, low)), tuple(map(float, high)))


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
    """Return what to write for Gymnasium's id of an Atari game, such as ALE/SpaceInvaders-v5."""
    game = environment_id.removeprefix("ALE/").partition("-")[0]
    name = "atari:" + re.sub(r"(?<=[a-z])(?=[A-Z])", "_", game).lower()
    return f"Atari games have an adapter of their own: write {name} instead of {environment_id}."
