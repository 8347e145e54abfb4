"""Experiments as JSON: writing and reading a run's `config.json`.

A file names classes by their bare names. Only the library's own classes (`KINDS`), those that
installed packages declare and those of a recipe that the user names are created from it; a file
never decides what else is imported.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from podracer.agents import AGENTS
from podracer.agents.common.optimizers import Optimizer
from podracer.arguments import fits, refusal, type_hints
from podracer.config.experiment import Experiment
from podracer.drivers.anakin import AnakinConfig
from podracer.drivers.population import Pod
from podracer.drivers.sebulba import SebulbaConfig
from podracer.environment import Environment, HostEnvironments
from podracer.envs.catalog import imported_module
from podracer.errors import CheckpointError, ConfigError
from podracer.io.entry_points import installed_class, package_of
from podracer.io.reading import read_limited
from podracer.io.seal import CONFIG, check_is_run, read_sealed_json
from podracer.networks import Table, TorsoNetwork


def kinds_in(annotation: Any) -> dict[str, type]:
    """Return the dataclasses that a value of an annotated type may be made of, by name."""
    if not (isinstance(annotation, type) and dataclasses.is_dataclass(annotation)):
        options = typing.get_args(annotation)
        return {name: kind for option in options for name, kind in kinds_in(option).items()}
    hints = type_hints(annotation)
    fields = [hints[field.name] for field in dataclasses.fields(annotation) if field.name != "spec"]
    parts = {name: kind for hint in fields for name, kind in kinds_in(hint).items()}
    return {annotation.__name__: annotation, **parts}


_ROOTS = (
    Experiment, AnakinConfig, SebulbaConfig, Pod, Table, TorsoNetwork, Optimizer, *AGENTS.values(),
)  # fmt: skip
KINDS: dict[str, type] = {name: kind for root in _ROOTS for name, kind in kinds_in(root).items()}


def kinds_of(value: Any) -> dict[str, type]:
    """Return the dataclasses that a value is made of, by name."""
    if isinstance(value, tuple):
        return {name: kind for item in value for name, kind in kinds_of(item).items()}
    if not dataclasses.is_dataclass(value):
        return {}
    fields = [getattr(value, field.name) for field in dataclasses.fields(value)]
    parts = {name: kind for part in fields for name, kind in kinds_of(part).items()}
    return {type(value).__name__: type(value), **parts}


def to_json(value: Any) -> Any:
    """Return a configuration as plain JSON; dataclasses carry the name of their class as `kind`.

    The `spec` of an environment and fields whose metadata has `derived` are left out. An object
    that JSON cannot hold is described by its name or by its class, a `functools.partial` also by
    the arguments it binds.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {name: to_json(getattr(value, name)) for name in _names_in_json(type(value))}
        return {"kind": type(value).__name__, **fields}
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    if isinstance(value, Mapping):
        return {str(name): to_json(item) for name, item in value.items()}
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, np.bool_ | np.integer | np.floating):
        return value.item()
    if isinstance(value, functools.partial):
        bound = {"function": value.func, "arguments": value.args, "keywords": value.keywords}
        return {"kind": "partial", **to_json(bound)}
    if isinstance(value, Environment | HostEnvironments):  # or a class, of Gymnasium
        return {"kind": getattr(value, "__qualname__", type(value).__name__)}
    return getattr(value, "__qualname__", type(value).__name__)


@functools.cache
def _names_in_json(kind: type) -> tuple[str, ...]:
    fields = (f for f in dataclasses.fields(kind) if not f.metadata.get("derived"))
    return tuple(f.name for f in fields if f.name != "spec")


# Fields that have left a class, with the value for which a run is what it would be without them.
_RETIRED: dict[str, dict[str, Any]] = {
    "Experiment": {"records": "chunk"},
    "DDPG": {"cloning_alpha": None, "scaled_return_max": None},
    "DiscreteSAC": {"scaled_return_max": None},
    "DQN": {"munchausen": {"kind": "Munchausen", "temperature": 0.0, "weight": 0.9, "clip": -1.0}},
    "MLP": {"spherical": False},
    "QTOpt": {"scaled_return_max": None},
    "Replay": {"data": None, "storage": "device"},
    "ResNet": {"pooled_size": 0, "spectral_norm": False},
    "SAC": {
        "batch_norm": False, "batch_norm_targets": False, "cloning_alpha": None,
        "policy_period": 1, "scaled_return_max": None, "squashed_scale": False,
    },
    "SebulbaConfig": {"average_hosts": None, "average_every": 16},
    "TD3BC": {"scaled_return_max": None},
}  # fmt: skip


def of_this_version(data: Any, kinds: Mapping[str, type] = KINDS) -> Any:
    """Return a configuration's JSON as this version writes it, to compare it with one.

    Fields that have left their classes are gone, and fields that came later have their defaults.
    Raises `ConfigError` where one that is gone has another value than the one that changes nothing.
    """
    if isinstance(data, list):
        return [of_this_version(item, kinds) for item in data]
    if not isinstance(data, dict):
        return data
    name = str(data.get("kind"))
    retired, kind = _RETIRED.get(name, {}), kinds.get(name)
    for field, value in retired.items():
        if data.get(field, value) != value:
            raise ConfigError(
                f"the run was made with {field}={data[field]!r}, which this version no longer has. "
                f"{package_of(field)}".rstrip()
            )
    fields = {name: of_this_version(x, kinds) for name, x in data.items() if name not in retired}
    return fields if kind is None else {**_defaults_in_json(kind), **fields}


@functools.cache
def _defaults_in_json(kind: type) -> dict[str, Any]:
    """Return the defaults of a class's fields, of those that have one."""
    fields = [f for f in dataclasses.fields(kind) if f.name in _names_in_json(kind)]
    defaults = {f.name: f.default_factory() for f in fields if callable(f.default_factory)}
    defaults |= {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
    return {name: to_json(value) for name, value in defaults.items()}


def from_json(data: Any, kinds: Mapping[str, type] = KINDS, original: Any = None) -> Any:
    """Return a configuration of these kinds from its JSON.

    Where the JSON describes a part of `original`, that part itself is taken, so that objects that
    JSON cannot hold are restored. Raises `ConfigError` that names what is unknown or missing.
    """
    if original is not None and to_json(original) == data:
        return original
    if isinstance(data, list):
        return tuple(from_json(item, kinds) for item in data)
    if not isinstance(data, dict):
        return data
    name = data.get("kind", "")
    kind = kinds.get(name) or installed_class(name)
    if kind is None:
        hint = package_of(str(name)) if name != "partial" else ""  # a function, no environment
        raise ConfigError(
            hint
            or f"the run was made with an object of class {name!r}, which no file can "
            'bring back: name its recipe, such as `recipe="my_package.recipes:mine"`, or in Python '
            "pass the object itself."
        )
    hints = type_hints(kind)
    values = {}
    for name, value in data.items():
        if name == "kind":
            continue
        if name not in hints:
            raise ConfigError(f"{kind.__name__} has no {name!r} in this version of podracer.")
        part = getattr(original, name, None) if type(original) is kind else None
        values[name] = from_json(value, kinds, part)
        if name == "environment" and part is not values[name]:
            _refuse_import(values[name])
        of_recipe = part is not None and type(values[name]) is type(part)
        if not of_recipe and not fits(values[name], hints[name]):
            raise ConfigError(refusal(f"{kind.__name__}.{name}", values[name], hints[name]))
    try:
        return kind(**values)
    except TypeError as error:
        raise ConfigError(f"the configuration is incomplete: {error}.") from error


def _refuse_import(environment: Any) -> None:
    """Raise `ConfigError` where a file names an environment that has a module imported."""
    if isinstance(environment, str) and (module := imported_module(environment)):
        raise ConfigError(
            f"the environment {environment!r} imports the module {module!r}, and a file does "
            f"not decide that: add `environment={environment!r}`."
        )


def read_config(path: Path) -> dict[str, Any]:
    """Return the JSON object in a run's `config.json`, or in a recipe's file, which has no seal.

    Raises `ConfigError` if it is none, or if a run's has changed since it was written.
    """
    if is_run := path.name == CONFIG:
        check_is_run(path.parent)
    if not path.is_file():
        raise ConfigError(f"there is no file {path}.")
    try:
        config = read_sealed_json(path) if is_run else json.loads(read_limited(path))
    except CheckpointError as error:
        raise ConfigError(
            f"{error}; bring it back as it was, and change settings by flags of `podracer resume`."
        ) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not a run's configuration: {error}.") from error
    if not isinstance(config, dict) or not isinstance(config.get("experiment"), dict):
        raise ConfigError(f"{path} is not a run's configuration: it has no experiment.")
    return config


def saved_devices(directory: Path) -> int:
    """Return the number of devices that a run began with, 0 if there is no run."""
    path = directory / "config.json"
    if not path.is_file():
        return 0
    devices = read_config(path).get("device", {}).get("devices")
    if not isinstance(devices, int) or devices < 1:
        raise ConfigError(f"{path} is not a run's configuration: it has no number of devices.")
    return devices


def recipe_name(directory: Path) -> str | None:
    """Return the name of the recipe of a run, None if it has none."""
    path = directory / "config.json"
    name = read_config(path)["experiment"].get("recipe") if path.is_file() else None
    return name if isinstance(name, str) else None


def read_experiment(
    path: Path,
    recipe: Experiment | None = None,
    environment: str | Environment | HostEnvironments | None = None,
) -> Experiment:
    """Return the experiment in a file: a run's `config.json`, or a sweep's `best.json`.

    `recipe` is the experiment whose classes and objects may be used besides the library's, and
    `environment` replaces the file's own. Raises `ConfigError` if there is no such file or it
    cannot be read.
    """
    kinds = KINDS if recipe is None else {**KINDS, **kinds_of(recipe)}
    try:
        data = of_this_version(read_config(path)["experiment"], kinds)
        if environment is not None:
            data["environment"] = ""
        experiment = from_json(data, kinds, recipe)
    except (ValueError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path} is not a run's configuration: {error}.") from error
    if not isinstance(experiment, Experiment):
        raise ConfigError(f"{path} is not a run's configuration.")
    if environment is not None:
        experiment = dataclasses.replace(experiment, environment=environment)
    experiment.check()
    return experiment
