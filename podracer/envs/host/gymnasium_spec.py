"""Specification of a Gymnasium environment, and the setup of its workers."""

from __future__ import annotations

import functools
import importlib
import os
import pickle
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from podracer.envs.host import gymnasium_worker
from podracer.envs.host.gymnasium_protocol import Leaf, WorkerSetup
from podracer.io.names import nearest
from podracer.types import ArraySpec, ConfigError, Continuous, Discrete, EnvironmentSpec

if TYPE_CHECKING:
    from gymnasium import Env

_NARROWER = {"float64": "float32", "float128": "float32", "int64": "int32", "uint64": "uint32"}


@functools.cache
def inspect_environment(
    environment: str | Callable[[], Env],
) -> tuple[EnvironmentSpec, WorkerSetup]:
    """Make one environment in this process and return its specification and its workers' setup.

    The setup still lacks rows and deadlines. Raises `ConfigError` for what cannot be
    imported, made or used.
    """
    name = _display_name(environment)
    try:
        import gymnasium as library
    except ModuleNotFoundError as error:
        raise ConfigError(f'{name} needs gymnasium: pip install "podracer[gymnasium]".') from error
    make = _registered(environment) if isinstance(environment, str) else environment
    if not callable(make):
        raise ConfigError(f"{name} is neither a registered id nor something to call.")
    pickled, main = _pickle(name, make)
    try:
        env = make()
    except Exception as error:
        reason = str(error).strip().split("\n")[0]
        raise ConfigError(f"{name} cannot be made: {type(error).__name__}: {reason}") from error
    if not isinstance(env, library.Env):
        raise ConfigError(f"{name} must make a gymnasium.Env, but it made {type(env).__name__}.")
    try:
        observation = _observation(name, env.observation_space, "observation")
        action = _action(name, env.action_space)
        setup = WorkerSetup(
            pickled,
            main,
            observation,
            action_shape=tuple(env.action_space.shape or ()),
            first_action=int(getattr(env.action_space, "start", 0)),
            action_dtype=np.dtype(env.action_space.dtype),
        )
    finally:
        env.close()
    specs = jax.tree.map(lambda leaf: ArraySpec(leaf.shape, leaf.dtype), observation)
    return EnvironmentSpec(name, specs, action), setup


def _display_name(environment: Any) -> str:
    if isinstance(environment, str):
        return f"gymnasium:{environment}"
    if isinstance(environment, functools.partial):
        keywords = [f"{key}={value!r}" for key, value in environment.keywords.items()]
        arguments = ", ".join([*map(repr, environment.args), *keywords])
        return f"{_display_name(environment.func)}({arguments})"
    return f"gymnasium:{getattr(environment, '__qualname__', type(environment).__qualname__)}"


def _registered(name: str) -> Callable[[], Env]:
    """Return a call with the registry's entry itself, so that workers need no registration."""
    import gymnasium as library

    module, _, environment_id = name.rpartition(":")
    try:
        if module:
            importlib.import_module(module)
        entry = library.spec(environment_id)
        return functools.partial(library.make, entry, disable_env_checker=True)
    except ImportError as error:
        raise ConfigError(f"gymnasium:{name} cannot be imported: {error}.") from error
    except library.error.Error as error:
        suggestion = nearest(environment_id, sorted(library.registry))
        raise ConfigError(f"Gymnasium has no environment {name!r}: {suggestion}") from error


def _pickle(name: str, environment: Any) -> tuple[bytes, str | None]:
    """Return a reference for other processes, and the main module where they must import it."""
    if gymnasium_worker.inside_worker:  # where `Gymnasium.make` refuses anyway
        return b"", None
    try:
        pickled = pickle.dumps(environment)
    except Exception as error:
        raise ConfigError(
            f"{name} cannot be found by name in another process: define it at the top of a module."
        ) from error
    if b"__main__" not in pickled:
        return pickled, None
    main = sys.modules["__main__"]
    if main.__spec__ is not None:
        return pickled, f":{main.__spec__.name}"
    if getattr(main, "__file__", None) is None:
        raise ConfigError(f"{name} is defined in an interactive session: put it into a file.")
    return pickled, os.path.abspath(str(main.__file__))


def _observation(name: str, space: Any, path: str) -> Any:
    """Return a space as a tree of `Leaf`. Raises `ConfigError`."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict) and space.spaces:
        return {k: _observation(name, x, f"{path}[{k!r}]") for k, x in space.spaces.items()}
    if isinstance(space, spaces.Tuple) and space.spaces:
        return tuple(_observation(name, x, f"{path}[{i}]") for i, x in enumerate(space.spaces))
    if isinstance(space, spaces.Discrete):
        space = spaces.Box(space.start, space.start + space.n - 1, (), np.int64)
    if not isinstance(space, spaces.Box) or space.dtype.kind not in "fiub":
        raise ConfigError(
            f"{name}: the {path} space {space} cannot be used: it must be a Box of numbers or "
            "Discrete, or a Dict or Tuple of them that is not empty."
        )
    dtype = np.dtype(_NARROWER.get(space.dtype.name, space.dtype))
    low, high = space.low, space.high
    min_value, max_value = -np.inf, np.inf
    if dtype.kind in "iu":
        min_value, max_value = np.iinfo(dtype.name).min, np.iinfo(dtype.name).max
        low, high = np.maximum(low, min_value), np.minimum(high, max_value)
    if dtype.kind == "b" or not ((low > min_value) | (high < max_value)).any():
        return Leaf(path, space.shape, dtype, space.dtype)
    with np.errstate(over="ignore"):  # rounding keeps the order, so values stay within bounds
        return Leaf(path, space.shape, dtype, space.dtype, low.astype(dtype), high.astype(dtype))


def _action(name: str, space: Any) -> Discrete | Continuous:
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return Discrete(int(space.n))
    if isinstance(space, spaces.Box) and len(space.shape) == 1 and space.dtype.kind == "f":
        low = _round_inward(space.low, np.float32(np.inf), np.less)
        high = _round_inward(space.high, np.float32(-np.inf), np.greater)
        if low.size and np.isfinite([low, high]).all() and (low < high).all():
            return Continuous(tuple(low.tolist()), tuple(high.tolist()))
    raise ConfigError(
        f"{name}: the action space {space} cannot be used: it must be Discrete, or a Box of "
        "floats with one axis and finite bounds."
    )


def _round_inward(
    bounds: np.ndarray, target: np.float32, outside: Callable[..., Any]
) -> np.ndarray:
    """Return bounds in f32, none of them outside of the original ones."""
    with np.errstate(over="ignore"):
        rounded = bounds.astype(np.float32)
    return np.where(outside(rounded, bounds), np.nextafter(rounded, target), rounded)
