"""Helpers that the adapters share."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

from podracer.errors import ConfigError
from podracer.types import PyTree


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
