"""Specification of a Gymnasium environment, and the setup of its workers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import json
import logging
import os
import pickle
import subprocess
import threading
from collections.abc import Iterator
from multiprocessing import spawn
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from podracer import types
from podracer.arguments import unknown_argument
from podracer.checks.errors import describe_error
from podracer.envs.common import atari_remedy, import_optional, narrower
from podracer.envs.host import gymnasium_worker
from podracer.envs.host.gymnasium_worker import Factory, Leaf, WorkerSetup
from podracer.errors import WEIGHTED_SUM, ConfigError
from podracer.io.processes import children, kill_tree
from podracer.io.text import redact
from podracer.names import nearest

if TYPE_CHECKING:
    from gymnasium import Env

_LOG = logging.getLogger("podracer")
_TRY_SECONDS = 60.0
Options = tuple[tuple[str, Any], ...]
# Packages that register ids when they are imported: how the ids begin, the module, and how to
# install it. A name can have no other module imported than these and those that it contains.
_PACKAGES = {
    "MiniGrid-": ("minigrid", "pip install minigrid"),
    "BabyAI-": ("minigrid", "pip install minigrid"),
    "dm_control/": ("shimmy", 'pip install "shimmy[dm-control]"'),
}


@functools.cache
def inspect_environment(
    factory: Factory, *, in_process: bool = False
) -> tuple[types.EnvironmentSpec, WorkerSetup]:
    """Make one environment in this process and return its specification and its workers' setup.

    With `in_process` no other process needs to import it. The setup still lacks rows and deadlines.
    Raises `ConfigError` for what cannot be imported, made or used.
    """
    name = display_name(factory.environment, factory.options, factory.observe)
    library = import_optional("gymnasium", name, "gymnasium")
    factory = dataclasses.replace(factory, environment=_entry(name, factory))
    setup = WorkerSetup(factory, {}) if in_process else _for_processes(name, factory)
    if factory.pictures and not in_process:
        _check_drawable(name, setup)
    earlier_children = children()
    try:
        env = factory()
    except (Exception, SystemExit) as error:
        reason = str(error).strip().split("\n")[0]
        if isinstance(error, TypeError):
            entry: Any = factory.load()
            creator = getattr(entry, "entry_point", entry)
            if isinstance(creator, str):
                creator = library.envs.registration.load_env_creator(creator)
            reason += unknown_argument(error, creator)
        raise ConfigError(f"{name} cannot be made: {type(error).__name__}: {reason}") from error
    if not isinstance(env, library.Env):
        raise ConfigError(f"{name} must make a gymnasium.Env, but it made {type(env).__name__}.")
    try:
        for attribute in ("observation_space", "action_space"):
            if not isinstance(getattr(env, attribute, None), library.Space):
                raise ConfigError(
                    f"{name} has no {attribute}: set one of gymnasium.spaces in the class or in "
                    "its __init__."
                )
        if shape := getattr(getattr(env, "reward_space", None), "shape", None):
            raise ConfigError(
                f"{name} has rewards of the shape {list(shape)}, not a number: {WEIGHTED_SUM}, as "
                "the wrapper `LinearReward` of MO-Gymnasium does."
            )
        for text in running_statistics(env):
            _LOG.warning("%s: %s", name, text)
        observation = _observation(name, env.observation_space, "observation")
        space: Any = env.action_space
        action, source = _action(name, space), np.dtype(space.dtype)
    finally:
        _close(name, env)
        for pid in children() - earlier_children:  # they would outlive the run
            kill_tree(pid)
            with contextlib.suppress(OSError):
                os.waitpid(pid, 0)
    dtype = np.dtype(np.float32 if source.kind == "f" else np.int32)
    first_value = np.asarray(getattr(space, "start", 0)).tolist()
    leaf = Leaf("action", tuple(space.shape or ()), dtype, source, first_value=first_value)
    specs = jax.tree.map(
        lambda leaf: types.ArraySpec(
            leaf.shape,
            leaf.dtype,
            num_values=leaf.num_values,
            start=leaf.first_value,
            scaled=leaf.dtype == np.uint8 and leaf.low is None,  # 0 to 255
        ),
        observation,
    )
    setup = dataclasses.replace(setup, observation=observation, action=leaf)
    return types.EnvironmentSpec(name, specs, action), setup


def layers(env: Any) -> list[Any]:
    """Return an environment, what it wraps, what that wraps, and so on."""
    chain: list[Any] = []
    while env is not None and all(env is not layer for layer in chain):
        chain.append(env)
        env = getattr(env, "__dict__", {}).get("env")
    return chain


def running_statistics(env: Any) -> Iterator[str]:
    """Yield a sentence on each wrapper that normalizes by running statistics of its own."""
    for layer in layers(env):
        parts = getattr(layer, "__dict__", {})
        for name, value in parts.items() if parts.get("_update_running_mean", True) else ():
            if {"mean", "var", "count"} <= getattr(value, "__dict__", {}).keys():
                part = "rewards" if name.startswith("ret") else "observations"
                yield (
                    f"{type(layer).__name__} has running statistics (`{name}`): each environment "
                    "has its own, evaluations begin with none and no checkpoint keeps them, so "
                    "that numbers and returns mean something else everywhere. Leave it out, and "
                    f"let the agent's `normalize_{part}` do it."
                )


def _close(name: str, env: Env) -> None:
    """Close an environment; one that raises or does not return is left behind, and named."""

    def close() -> None:
        try:
            env.close()
        except Exception as error:
            _LOG.warning("%s: `close` raised %s: %s", name, type(error).__name__, error)

    thread = threading.Thread(target=close, daemon=True)
    thread.start()
    seconds = gymnasium_worker.CLOSE_SECONDS
    thread.join(seconds)
    if thread.is_alive():
        _LOG.warning("%s: `close` has not returned after %g s.", name, seconds)


def _check_drawable(name: str, setup: WorkerSetup) -> None:
    """Raise `ConfigError` where an environment does not draw itself in a process of its own.

    Without a screen, MuJoCo for one may end the process that tries.
    """
    try:
        subprocess.run(
            gymnasium_worker.command("try_environment()"),
            input=pickle.dumps(setup),
            capture_output=True,
            timeout=_TRY_SECONDS,
            check=True,
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{name} cannot be drawn: it takes too long.") from error
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").strip().splitlines()
        reason = lines[-1] if lines and error.returncode == 1 else "its process crashed"
        raise ConfigError(f"{name} cannot be drawn: {reason.rstrip('.')}.") from error


def display_name(environment: Any, options: Options = (), observe: tuple[str, ...] = ()) -> str:
    """Return what messages call an environment, without secrets."""
    if isinstance(environment, str):
        if observe:
            options = (*options, ("observe", "+".join(observe)))
        settings = [f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in options]
        return redact(",".join([f"gymnasium:{environment}", *settings]), stable=True)
    if isinstance(environment, functools.partial):
        keywords = [f"{key}={value!r}" for key, value in environment.keywords.items()]
        arguments = ", ".join([*map(repr, environment.args), *keywords])
        return redact(f"{display_name(environment.func)}({arguments})", stable=True)
    return f"gymnasium:{getattr(environment, '__qualname__', type(environment).__qualname__)}"


def _entry(name: str, factory: Factory) -> Any:
    """Return the `Factory.environment` that other processes can find."""
    import gymnasium as library

    environment: Any = factory.environment
    if not isinstance(environment, str):
        if factory.options:
            raise ConfigError(f"{name} takes no arguments: bind them by functools.partial.")
        return environment
    module, _, environment_id = environment.rpartition(":")
    package = next((x for start, x in _PACKAGES.items() if environment.startswith(start)), None)
    module, install = (module, None) if package is None else package
    try:
        if module:
            importlib.import_module(module)
        entry = library.spec(environment_id)
        return f"{module}:{environment_id}" if module else entry
    except (Exception, SystemExit) as error:
        if install is not None:
            raise ConfigError(f"{name} needs the package {module}: {install}.") from error
        if not isinstance(error, library.error.Error):
            raise ConfigError(f"{name} cannot be imported: {describe_error(error)}") from error
        if remedy := atari_remedy(environment):
            raise ConfigError(remedy) from error
        registered = "`gymnasium.pprint_registry()` lists them."
        suggestion = nearest(environment_id, sorted(library.registry), registered)
        raise ConfigError(
            f"Gymnasium has no environment {environment!r}: {suggestion} If a package registers "
            f"it, write gymnasium:MODULE:{environment_id}."
        ) from error


def _for_processes(name: str, factory: Factory) -> WorkerSetup:
    """Return the setup by which other processes find the factory."""
    if gymnasium_worker.inside_worker:  # where `Gymnasium.make` refuses anyway
        return WorkerSetup(b"", {})
    try:
        pickled = pickle.dumps(factory)
    except Exception as error:
        remedy = "define it at the top of a module"
        if not callable(factory.environment):
            remedy = "name the module that registers it, gymnasium:MODULE:ID"
        raise ConfigError(
            f"{name} cannot be found by name in another process: {remedy}, or take workers=0, "
            "which steps it in this one."
        ) from error
    main: dict[str, Any] = {}
    if b"__main__" in pickled:
        data = spawn.get_preparation_data(name)
        main = {key: value for key, value in data.items() if key.startswith("init_main_")}
        if not main or main.get("init_main_from_name", "").endswith("__main__"):
            place = "the `__main__` of a package" if main else "an interactive session"
            raise ConfigError(
                f"{name} is defined in {place}: take workers=0, which steps it in this process, or "
                "put it into another file."
            )
    return WorkerSetup(pickled, main)


def _observation(name: str, space: Any, path: str) -> Any:
    """Return a space as a tree of `Leaf`. Raises `ConfigError`."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict) and space.spaces:
        if len({type(key) for key in space.spaces}) > 1:  # JAX cannot sort them
            raise ConfigError(
                f"{name}: keys of {path} must be of one type, but they are {list(space.spaces)}."
            )
        leaves = {k: _observation(name, x, f"{path}[{k!r}]") for k, x in space.spaces.items()}
        declared: Any = space.spaces.get(types.ACTION_MASK)
        mask = leaves.get(types.ACTION_MASK)
        if isinstance(mask, Leaf) and (  # RLlib's are floats from 0 to 1
            mask.source.kind != "f" or ((declared.low == 0) & (declared.high == 1)).all()
        ):
            leaves[types.ACTION_MASK] = Leaf(mask.name, mask.shape, np.dtype(np.bool_), mask.source)
        return leaves
    if isinstance(space, spaces.Tuple) and space.spaces:
        return tuple(_observation(name, x, f"{path}[{i}]") for i, x in enumerate(space.spaces))
    if isinstance(space, spaces.MultiBinary):
        space = spaces.Box(0, 1, space.shape, np.int8)
    is_one = isinstance(space, spaces.Discrete)
    if is_one or (isinstance(space, spaces.MultiDiscrete) and len(set(space.start.flat)) == 1):
        numbers = np.asarray(space.n if is_one else space.nvec, np.int64)
        high = np.asarray(np.minimum(numbers - 1, 2**31 - 1), np.int32)
        return Leaf(
            path,
            numbers.shape,
            high.dtype,
            numbers.dtype if is_one else space.dtype,
            np.zeros_like(high),
            high,
            num_values=int(numbers.max()),
            first_value=int(np.min(space.start)),
        )
    if not isinstance(space, spaces.Box) or space.dtype.kind not in "fiub":
        raise ConfigError(
            f"{name}: the {path} space {space} cannot be used: it must be a Box of numbers, "
            "Discrete, MultiDiscrete with one `start` for all, MultiBinary, or a Dict or Tuple of "
            "them that is not empty. An entry of a Dict, such as a text, can be left out by naming "
            "the others: `observe=NAME+NAME`."
        )
    dtype = narrower(space.dtype)
    if dtype.kind not in "iu":  # many environments exceed the bounds of their floats
        return Leaf(path, space.shape, dtype, space.dtype)
    if len(space.shape) == 3 and (space.low == 0).all() and (space.high == 255).all():
        dtype = np.dtype(np.uint8)  # an image
    limits = np.iinfo(dtype.name)
    low, high = np.maximum(space.low, limits.min), np.minimum(space.high, limits.max)
    if not ((low > limits.min) | (high < limits.max)).any():
        return Leaf(path, space.shape, dtype, space.dtype)
    return Leaf(path, space.shape, dtype, space.dtype, low.astype(dtype), high.astype(dtype))


def _action(name: str, space: Any) -> types.ActionSpace:
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return types.Discrete(int(space.n), int(space.start))
    if isinstance(space, spaces.MultiDiscrete) and len(space.shape) == 1:
        start = tuple(space.start.tolist()) if space.start.any() else ()
        return types.MultiDiscrete(tuple(space.nvec.tolist()), start)
    if isinstance(space, spaces.MultiBinary) and len(space.shape) == 1:
        return types.MultiDiscrete((2,) * space.shape[0])
    if isinstance(space, spaces.Box) and len(space.shape) == 1 and space.dtype.kind == "f":
        with contextlib.suppress(ConfigError):  # infinite bounds, say
            return types.Continuous.within(space.low, space.high)
    raise ConfigError(
        f"{name}: the action space {space} cannot be used: it must be Discrete, or have one axis "
        "and be MultiDiscrete, MultiBinary, or a Box of floats with finite bounds, low < high in "
        "each coordinate. Give a function that makes the environment and wraps it, such as in "
        "gymnasium.wrappers.TransformAction(env, FUNCTION, SPACE) with SPACE as one of these."
    )
