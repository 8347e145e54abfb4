"""Helpers that the adapters share."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.errors import ConfigError
from podracer.types import Continuous, EnvironmentSpec, EnvState, PyTree, TimeStep


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


def import_suite(module: str, name: str) -> Any:
    """Import a module of a suite, untyped, for an environment `name` such as `brax:ant`.

    Raises `ConfigError` with the command that installs the suite, where it is not installed. The
    extra has the name of the prefix.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{name} needs the package {error.name}: "
            f'pip install -e "packages/environments[{name.partition(":")[0]}]" in the clone of '
            "podracer."
        ) from error


def without_key(state: Any, field: str = "key") -> Any:
    """Return a state without the key in a field, if it has one, as each step gets a new one."""
    return dataclasses.replace(state, **{field: ()}) if hasattr(state, field) else state


def as_dict(value: Any) -> PyTree:
    """Return a tree whose named tuples (observations of some packages) are dictionaries."""
    if hasattr(value, "_asdict"):
        return {name: as_dict(x) for name, x in value._asdict().items()}
    if isinstance(value, dict):
        return {name: as_dict(x) for name, x in value.items()}
    return value


@contextlib.contextmanager
def refusing(problem: str, *errors: type[Exception]) -> Iterator[None]:
    """Make a `ConfigError` of errors in the context, such as "gymnax cannot make 'Pong': ..."."""
    try:
        yield
    except errors as error:
        reason = str(error).partition("\n")[0].rstrip(".:")
        raise ConfigError(f"{problem}: {reason}.") from error


def check_time_limit(name: str, option: str, limit: Any) -> None:
    """Raise `ConfigError` for a time limit that would leave episodes without a step."""
    if type(limit) is not int or limit < 1:
        raise ConfigError(f"{name}: {option} must be 1, 2, 3 and so on, not {limit!r}.")


def cast_like(tree: PyTree, target: PyTree) -> PyTree:
    """Return a tree with the dtypes of another one of the same structure."""
    return jax.tree.map(lambda x, y: jnp.asarray(x, y.dtype), tree, target)


def continuous_actions(name: str, low: Any, high: Any, shape: tuple[int, ...]) -> Continuous:
    """Return bounded actions as a flat vector. Raises `ConfigError` where a bound is missing."""
    low, high = (np.broadcast_to(np.asarray(x), shape).ravel() for x in (low, high))
    if not (np.isfinite(low).all() and np.isfinite(high).all()):
        raise ConfigError(f"{name} has actions without bounds.")
    return Continuous(tuple(map(float, low)), tuple(map(float, high)))
