"""Catalog of named environments, for the command line and for recipes.

Other environments are passed as objects.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import json
import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from podracer.arguments import typed, unknown_argument
from podracer.environment import Environment, HostEnvironments, auto_reset
from podracer.envs.cartpole import CartPole
from podracer.envs.catch import Catch
from podracer.envs.common import atari_remedy
from podracer.envs.lifetimes import Lifetimes
from podracer.envs.pendulum import Pendulum
from podracer.envs.probes import PROBES
from podracer.envs.worlds import Worlds
from podracer.errors import ConfigError, install_command
from podracer.io.entry_points import installed, missing_packages, package_of, summary
from podracer.names import nearest


class Entry(NamedTuple):
    """An environment, or a prefix of names for a family, mostly of another package's."""

    make: Callable[..., Environment | HostEnvironments]
    """Function of options; of a family also of the name without the prefix, which comes first."""
    description: str
    extra: str = ""
    """Extra of this package that installs what it imports."""
    packages: tuple[str, ...] = ()
    """Packages that must be installed."""
    on_host: bool = False
    """Whether its environments run on the host alone, so that Anakin cannot train in them."""


def _gymnasium(name: str, **options: Any) -> HostEnvironments:
    from podracer.envs.host.gymnasium import gymnasium  # slow to import

    return gymnasium(name, **options)


def _atari(protocol: str, name: str, **options: Any) -> HostEnvironments:
    from podracer.envs.host import atari

    return getattr(atari, protocol)(name, **options)


ENVIRONMENTS = {
    "catch": Entry(Catch, "a falling ball and a paddle on a board of 10 by 5 cells"),
    "cartpole": Entry(partial(auto_reset, CartPole()), "balance a pole on a cart, up to 500 steps"),
    "pendulum": Entry(partial(auto_reset, Pendulum()), "swing up and hold, continuous torque"),
} | {
    f"probe:{name}": Entry(partial(auto_reset, probe), probe.description)
    for name, probe in PROBES.items()
}

ADAPTERS = {
    "worlds": Entry(
        lambda name, **options: Worlds(tuple(name.split("+")), **options),
        "tabular and random grids and chains, for meta-learning: worlds:dense, worlds:all",
    ),
    "lifetimes": Entry(
        lambda name, envs=64, steps=10_000, **options: Lifetimes(
            make(name, **options), envs, steps
        ),
        "another device environment, in groups that share a task for a while: lifetimes:worlds:all",
    ),
    "gymnasium": Entry(
        _gymnasium,
        "host: any environment registered with Gymnasium, such as gymnasium:CartPole-v1",
        "gymnasium",
        ("gymnasium",),
        on_host=True,
    ),
} | {
    prefix: Entry(
        partial(_atari, protocol),
        f"host: an Atari game {description}, such as {prefix}:pong",
        "atari",
        ("ale_py", "gymnasium"),
        on_host=True,
    )
    for prefix, protocol, description in (
        ("atari", "impala", "under IMPALA's protocol"),
        ("atari-sticky", "sticky", "with sticky actions, as in Cleanba"),
        ("atari-machado", "machado", "under Machado et al. 2018's protocol"),
    )
}

_ADDRESS = re.compile(r"=(?:https?|wss?|tcp)://[^,]*")
_AS_IN_JSON = {"True": "true", "False": "false", "None": "null"}


@typed
def make(name: str, **options: Any) -> Any:
    """Make the environment `name`, such as `catch`, `probe:memory` or `atari:pong`.

    Options may be part of the name: `lifetimes:catch,envs=16`. An installed package has
    environments, too, see `podracer.io.entry_points`.
    Raises `ConfigError` for an unknown name or option, and where a package is not installed.
    """
    name, *settings = name.split(",")
    options = {**dict(map(_parse_option, settings)), **options}
    if function := _function(name):
        try:
            with contextlib.suppress(ValueError):  # a function in C may have no signature
                inspect.signature(function).bind(**options)
            return function(**options)
        except TypeError as error:
            name, remedy = name.rstrip(":"), unknown_argument(error, function)
            problem = re.sub(".* unexpected keyword argument", "there is no option", str(error))
            part = r",\1=VALUE" if isinstance(function, partial) else ":NAME"
            problem = re.sub(r".*missing .* argument: '(\w+)'", f"add {part}", problem)
            raise ConfigError(f"{name}: {problem}{remedy or '.'}") from error
        except ConfigError as error:  # perhaps of an environment within, which got its options
            parameters = inspect.signature(function).parameters
            names = [key for key, x in parameters.items() if x.kind is not x.VAR_KEYWORD]
            if not isinstance(error.__cause__, TypeError) or len(names) in (0, len(parameters)):
                raise
            prefix = name.partition(":")[0]
            raise ConfigError(f"{error} {prefix} itself takes {', '.join(names)}.") from error
    if hint := atari_remedy(name) or package_of(name):
        raise ConfigError(hint)
    if (full_name := full_name_of(name)) != name:
        full_text = ",".join([full_name, *settings])
        raise ConfigError(f"There is no environment {name!r}: of Gymnasium it is {full_text}.")
    valid = [*ENVIRONMENTS, *(f"{prefix}:NAME" for prefix in ADAPTERS), *installed("environments")]
    page = (
        "`podracer list environments` shows the names; one of your own goes into a recipe, "
        "MODULE:FUNCTION, and a class of Gymnasium is gymnasium:MODULE:ID."
    )
    valid = [] if name.endswith(".py") else valid  # a file is near to none of the names
    raise ConfigError(f"There is no environment {name!r}: {nearest(name, valid, page)}")


def _function(name: str) -> Callable[..., Any] | None:
    """Return the function of options that makes an environment, None for an unknown name."""
    prefix, _, suffix = name.partition(":")
    if name in ENVIRONMENTS:
        return ENVIRONMENTS[name].make
    if prefix in ADAPTERS:
        return partial(ADAPTERS[prefix].make, suffix) if suffix else None
    if entry := installed("environments").get(prefix):
        return partial(entry.load(), suffix) if suffix else entry.load()
    return None


def has_name(name: str) -> bool:
    """Return whether a name is one of the library's environments or an installed package's."""
    name = name.partition(",")[0]
    prefix = name.partition(":")[0]
    return name in ENVIRONMENTS or prefix in ADAPTERS or prefix in installed("environments")


def full_name_of(name: str) -> str:
    """Return the name of an environment with its prefix where it is an id of Gymnasium."""
    is_id = re.search(r"-v\d+$", name) and not has_name(name)
    return f"gymnasium:{name.removeprefix('gym:')}" if is_id else name


def _parse_option(setting: str) -> tuple[str, Any]:
    """Return a name and its value: a number, `true`, `false`, `null`, or else a string.

    The last three may be written as in Python: as a string `False` would count as true.
    """
    key, equals, value = setting.partition("=")
    if not equals or not key.isidentifier():
        raise ConfigError(f"{setting!r} is not an option of an environment: write name,key=value.")
    try:
        parsed = json.loads(_AS_IN_JSON.get(value, value))
    except (json.JSONDecodeError, RecursionError):
        return key, value
    if isinstance(parsed, list | dict):
        raise ConfigError(f"{setting!r}: an option is a number, `true`, `false`, `null` or text.")
    return key, parsed


def runs_on_host(environment: str | Environment | HostEnvironments) -> bool:
    """Return whether an environment, or one of this name, runs on the host alone."""
    if not isinstance(environment, str):
        return isinstance(environment, HostEnvironments)
    prefix = environment.partition(",")[0].partition(":")[0]
    if prefix in ADAPTERS:
        return ADAPTERS[prefix].on_host
    entry = installed("environments").get(prefix)
    return entry is not None and getattr(entry.load(), "on_host", False)


def imported_module(name: str) -> str | None:
    """Return the module that the name of an environment can have imported, None if none.

    That is what stands before the id in `gymnasium:MODULE:ID`; an option of the environment may
    name a module too (Gymnasium's wrappers of older libraries take `MODULE:ID`), but the address of
    a server names none.
    """
    _, prefix, suffix = name.partition("gymnasium:")
    for part in _ADDRESS.sub("=", suffix).split(",") if prefix else ():
        module, colon, _ = part.rpartition(":")
        if colon:
            return module.rpartition("=")[2]
    return None


def names() -> list[tuple[str, str, str]]:
    """Return (name, description, "installed" or what is to be installed) for each."""
    entries, rows = ENVIRONMENTS | {f"{x}:NAME": entry for x, entry in ADAPTERS.items()}, []
    for name, entry in entries.items():
        is_installed = all(map(importlib.util.find_spec, entry.packages))
        state = "installed" if is_installed else install_command(entry.extra)
        rows.append((name, entry.description, state))
    for point in installed("environments").values():
        missing = ", ".join(missing_packages(point))
        rows.append((point.name, summary(point), f"needs {missing}" if missing else "installed"))
    return rows
