"""What `--vary` gives: the values or the range of each hyperparameter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from podracer.cli.settings import Flag, Table
from podracer.drivers.selection import Range
from podracer.errors import ConfigError
from podracer.run.sweep import Space


def read_spaces(variations: Sequence[str], agent: Any = None) -> dict[str, Space]:
    """Return the values or the range of each hyperparameter that `NAME=VALUES` names.

    A name is a path in the `agent`, or the end of one. Raises `ConfigError` for what cannot be
    read.
    """
    table = Table({} if agent is None else {"agent": agent}, "")
    spaces: dict[str, Space] = {}
    for text in variations:
        name = text.partition("=")[0].replace("-", "_").removeprefix("agent.")
        if table.paths(name):
            name = table.find(Flag(f"--{name}", (), False)).path
        if name in spaces:
            raise ConfigError("--vary names a hyperparameter twice: give each its values once.")
        spaces[name] = _read_space(name, text)
    return spaces


def _read_space(name: str, text: str) -> Space:
    """Return the space of `NAME=VALUE,VALUE` or `NAME=LOW:HIGH`."""
    values = text.partition("=")[2]
    if values.count(":") > 1:
        raise ConfigError(
            f"--vary {text!r} cannot be read: of a schedule only the start varies, as in "
            f"{name}=1e-4,3e-4."
        )
    try:
        if ":" in values:
            return Range(name, *map(float, values.split(":")))
        numbers = tuple(float(value) for value in values.split(","))
        if not all(map(math.isfinite, numbers)):
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"--vary {text!r} cannot be read: write name=1e-4,3e-4 or name=1e-5:1e-2."
        ) from None
    if len(set(numbers)) < len(numbers):  # equal pods would count as independent seeds
        raise ConfigError(f"--vary {text!r} names a value twice: give each value once.")
    return numbers
