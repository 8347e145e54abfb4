"""The environments that have a name, for the command line and for recipes.

An environment of your own needs none: pass the object wherever an environment is asked for.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from podracer.environment import Environment, HostEnvironments, auto_reset
from podracer.envs.cartpole import CartPole
from podracer.envs.catch import Catch
from podracer.envs.pendulum import Pendulum
from podracer.envs.probes import PROBES
from podracer.io.names import nearest
from podracer.types import ConfigError


class Entry(NamedTuple):
    """An environment of the library itself."""

    make: Callable[..., Environment]
    about: str


class Adapter(NamedTuple):
    """A prefix that leads to the environments of another package."""

    make: Callable[
        ..., Environment | HostEnvironments
    ]  # the first argument is what follows the prefix
    about: str
    packages: tuple[str, ...]
    install: str


def _from(module: str, function: str) -> Callable[..., Any]:
    """A function of one of this folder's files, imported when it is called: packages are heavy."""

    def make(name: str, **options: Any) -> Any:
        adapter = importlib.import_module(f"podracer.envs.{module}")
        return getattr(adapter, function)(name, **options)

    return make


def _with_model(name: str, **options: Any) -> Environment:
    from podracer.envs.model import WithModel

    return WithModel(make(name, **options))


def _worlds(name: str, **options: Any) -> Environment:
    from podracer.envs.worlds import Worlds

    return Worlds(tuple(name.split("+")), **options)


def _lifetimes(name: str, envs: int = 64, steps: int = 10_000, **options: Any) -> Environment:
    from podracer.envs.lifetimes import Lifetimes

    return Lifetimes(make(name, **options), envs, steps)


def _trading(name: str, **options: Any) -> Environment:
    from podracer.envs.trading import trading

    return trading(name, **options)


ENVIRONMENTS = {
    "catch": Entry(Catch, "a falling ball and a paddle on a 10x5 board, image observation"),
    "cartpole": Entry(partial(auto_reset, CartPole()), "balance a pole on a cart, up to 500 steps"),
    "pendulum": Entry(partial(auto_reset, Pendulum()), "swing up and hold, continuous torque"),
} | {
    f"probe:{name}": Entry(partial(auto_reset, probe), probe.about)
    for name, probe in PROBES.items()
}

ADAPTERS = {
    "model": Adapter(
        _with_model,
        "another one on the device, with its state, for agents that plan in it: model:catch",
        (),
        "",
    ),
    "worlds": Adapter(
        _worlds,
        "tabular and random grids and chains, for learning to learn: worlds:dense, worlds:all",
        (),
        "",
    ),
    "lifetimes": Adapter(
        _lifetimes,
        "another one on the device, in groups that share a task for a while: lifetimes:worlds:all",
        (),
        "",
    ),
    "trading": Adapter(
        _trading,
        "trade in a market: trading:synthetic, trading:wave, or your own bars, trading:FILE.csv",
        (),
        "",
    ),
    "gymnax": Adapter(
        _from("gymnax", "gymnax"),
        "any environment of gymnax, such as gymnax:Breakout-MinAtar",
        ("gymnax", "six"),
        'pip install "podracer[gymnax]"',
    ),
    "pgx": Adapter(
        _from("pgx", "pgx"),
        "MinAtar, 2048 and board games of pgx, such as pgx:minatar-breakout or pgx:connect_four",
        ("pgx",),
        'pip install "podracer[pgx]"',
    ),
    "jumanji": Adapter(
        _from("jumanji", "jumanji"),
        "environments of jumanji with one action, such as jumanji:Snake-v1",
        ("jumanji",),
        'pip install "podracer[jumanji]"',
    ),
    "brax": Adapter(
        _from("brax", "brax"),
        "continuous control of brax, such as brax:ant",
        ("brax",),
        'pip install "podracer[brax]"',
    ),
    "playground": Adapter(
        _from("playground", "playground"),
        "MuJoCo Playground, such as playground:CartpoleBalance",
        ("mujoco_playground",),
        'pip install "podracer[playground]"',
    ),
    "craftax": Adapter(
        _from("craftax", "craftax"),
        "Craftax, such as craftax:Craftax-Classic-Symbolic-v1",
        ("craftax",),
        'pip install "podracer[craftax]"',
    ),
    "xminigrid": Adapter(
        _from("xminigrid", "xminigrid"),
        "XLand-MiniGrid, such as xminigrid:MiniGrid-Empty-8x8",
        ("xminigrid",),
        'pip install "podracer[xminigrid]"',
    ),
    "gymnasium": Adapter(
        _from("host.gymnasium", "gymnasium"),
        "host: any environment registered with Gymnasium, such as gymnasium:CartPole-v1",
        ("gymnasium",),
        'pip install "podracer[gymnasium]"',
    ),
    "atari": Adapter(
        _from("host.atari", "impala"),
        "host: an Atari game under IMPALA's protocol, such as atari:pong",
        ("ale_py", "gymnasium"),
        'pip install "podracer[atari]"',
    ),
    "atari-sticky": Adapter(
        _from("host.atari", "sticky"),
        "host: an Atari game with sticky actions (Machado et al. 2018), such as atari-sticky:pong",
        ("ale_py", "gymnasium"),
        'pip install "podracer[atari]"',
    ),
    "envpool": Adapter(
        _from("host.envpool", "envpool"),
        "host: any task of EnvPool, such as envpool:HalfCheetah-v4",
        ("envpool",),
        'pip install "podracer[envpool]"',
    ),
}


def make(name: str, **options: Any) -> Any:
    """The environment `name`, such as `catch`, `probe:memory` or `gymnax:Breakout-MinAtar`.

    Options may stand in the name, too: `gymnax:MemoryChain-bsuite,memory_length=20`.
    Raises `ConfigError` for an unknown name or option and where its package is not installed.
    """
    name, *settings = name.split(",")
    options = {**dict(map(_option, settings)), **options}
    prefix, _, rest = name.partition(":")
    try:
        if name in ENVIRONMENTS:
            return ENVIRONMENTS[name].make(**options)
        if prefix in ADAPTERS and rest:
            return ADAPTERS[prefix].make(rest, **options)
    except TypeError as error:
        raise ConfigError(f"{name}: {error}.") from error
    known = [*ENVIRONMENTS, *(f"{prefix}:NAME" for prefix in ADAPTERS)]
    raise ConfigError(f"There is no environment {name!r}: {nearest(name, known)}")


def _option(setting: str) -> tuple[str, Any]:
    """A name and its value: a number, `true`, `false`, or else a text."""
    key, equals, value = setting.partition("=")
    if not equals or not key.isidentifier():
        raise ConfigError(f"{setting!r} is no option of an environment: write name,key=value.")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def names() -> list[tuple[str, str, str]]:
    """(name, description, "installed" or the command that installs it) of each environment."""
    own = [(name, entry.about, "installed") for name, entry in ENVIRONMENTS.items()]
    adapted = [
        (f"{prefix}:NAME", adapter.about, "installed" if _found(adapter) else adapter.install)
        for prefix, adapter in ADAPTERS.items()
    ]
    return own + adapted


def _found(adapter: Adapter) -> bool:
    return all(importlib.util.find_spec(package) for package in adapter.packages)
