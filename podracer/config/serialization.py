"""Experiments as JSON: writing and reading a run's `config.json`.

A file names classes by their bare names. Only the library's own classes (`KINDS`) and those of a
recipe that the user names are created from it; a file never decides what is imported.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from podracer.agents import AGENTS
from podracer.agents.common.optimizers import Optimizer
from podracer.config.experiment import Experiment
from podracer.config.field_types import fits, refusal
from podracer.drivers.anakin import AnakinConfig
from podracer.drivers.population import Pod
from podracer.drivers.sebulba import SebulbaConfig
from podracer.environment import Environment, HostEnvironments
from podracer.envs.catalog import imported_module
from podracer.errors import CheckpointError, ConfigError
from podracer.io.differences import differences
from podracer.io.edits import encode_json
from podracer.io.reading import read_limited
from podracer.io.seal import CONFIG, check_is_run, read_sealed_json, seal_json
from podracer.io.text import redact_settings
from podracer.networks import Table, TorsoNetwork


def kinds_in(annotation: Any) -> dict[str, type]:
    """Return the dataclasses that a value of an annotated type may be made of, by name."""
    if not (isinstance(annotation, type) and dataclasses.is_dataclass(annotation)):
        options = typing.get_args(annotation)
        return {name: kind for option in options for name, kind in kinds_in(option).items()}
    hints = typing.get_type_hints(annotation)
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
        names = (f.name for f in dataclasses.fields(value) if not f.metadata.get("derived"))
        fields = {name: to_json(getattr(value, name)) for name in names if name != "spec"}
        return {"kind": type(value).__name__, **fields}
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    if isinstance(value, Mapping):
        return {str(name): to_json(item) for name, item in value.items()}
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, functools.partial):
        bound = {"function": value.func, "arguments": value.args, "keywords": value.keywords}
        return {"kind": "partial", **to_json(bound)}
    if isinstance(value, Environment | HostEnvironments):
        return {"kind": type(value).__name__}
    return getattr(value, "__qualname__", type(value).__name__)


def from_json(data: Any, kinds: Mapping[str, type] = KINDS, like: Any = None) -> Any:
    """Return a configuration of these kinds from its JSON.

    Where the JSON describes a part of `like`, that part itself is taken, so that objects that
    JSON cannot hold are restored. Raises `ConfigError` that names what is unknown or missing.
    """
    if like is not None and to_json(like) == data:
        return like
    if isinstance(data, list):
        return tuple(from_json(item, kinds) for item in data)
    if not isinstance(data, dict):
        return data
    kind = kinds.get(data.get("kind", ""))
    if kind is None:
        raise ConfigError(
            f"the run was made with an object of class {data.get('kind')!r}, which no file can "
            'bring back: name its recipe, such as `recipe="my_package.recipes:mine"`, or in Python '
            "pass the object itself."
        )
    hints = typing.get_type_hints(kind)
    values = {}
    for name, value in data.items():
        if name == "kind":
            continue
        if name not in hints:
            raise ConfigError(f"the configuration of {kind.__name__} has an unknown {name!r}.")
        part = getattr(like, name, None) if type(like) is kind else None
        values[name] = from_json(value, kinds, part)
        if name == "environment" and part is not values[name]:
            _refuse_import(values[name])
        of_recipe = part is not None and type(values[name]) is type(part)
        if not of_recipe and not fits(values[name], hints[name]):
            raise ConfigError(refusal(kind, name, values[name], hints[name]))
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


# These decide when and where things happen, not what is computed, so a resumed run may change them.
FREE_ON_RESUME = {
    "frames",
    "devices",
    "evaluations",
    "evaluation_episodes",
    "evaluation_policy",
    "evaluation_epsilon",
    "fixed_evaluation",
    "target_return",
    "max_seconds",
    "save_seconds",
    "keep_best",
    "stall_seconds",
}


def read_experiment(
    directory: Path,
    recipe: Experiment | None = None,
    environment: str | Environment | HostEnvironments | None = None,
) -> Experiment:
    """Return the experiment of a run.

    `recipe` is the experiment whose classes and objects may be used besides the library's, and
    `environment` replaces the run's own. Raises `ConfigError` if there is no run or it
    cannot be read.
    """
    check_is_run(directory)
    return experiment_of(directory / CONFIG, recipe, environment)


def experiment_digest(experiment: Experiment) -> str:
    """Return the SHA-256 of what an experiment computes, which a resumed run cannot change."""
    settings = to_json(experiment)
    return hashlib.sha256(
        encode_json({k: v for k, v in settings.items() if k not in FREE_ON_RESUME})
    ).hexdigest()


def read_config(path: Path) -> dict[str, Any]:
    """Return the JSON object in a run's `config.json`, or in a recipe's file, which has no seal.

    Raises `ConfigError` if it is none, or if a run's has changed since it was written.
    """
    if not path.is_file():
        raise ConfigError(f"there is no file {path}.")
    try:
        is_run = path.name == CONFIG
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


def update_config(directory: Path, experiment: Experiment) -> None:
    """Write the settings with which a run goes on into its `config.json`."""
    path = directory / "config.json"
    config, settings = read_config(path), to_json(experiment)
    if config["experiment"] != settings:
        seal_json(path, {**config, "experiment": settings})


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


def experiment_of(
    path: Path,
    recipe: Experiment | None = None,
    environment: str | Environment | HostEnvironments | None = None,
) -> Experiment:
    """Return the experiment in a file: a run's `config.json`, or a sweep's `best.json`.

    The other arguments are those of `read_experiment`. Raises `ConfigError` if it cannot be read.
    """
    kinds = KINDS if recipe is None else {**KINDS, **kinds_of(recipe)}
    try:
        data = read_config(path)["experiment"]
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


def check_same_experiment(saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Raise `ConfigError` with the differences if a checkpoint is of another computation.

    Secrets are no part of it, as checkpoints hold none.
    """
    saved, current = redact_settings(saved), redact_settings(current)
    changed = [
        f"{name} was {old} and is {new}"
        for name, (old, new) in differences(saved, current).items()
        if name not in FREE_ON_RESUME
    ]
    if changed:
        raise ConfigError(
            f"the run was saved with another configuration: {'; '.join(changed)}. A new run can go "
            "on from what it has learned: train with `weights=RUN`."
        )
