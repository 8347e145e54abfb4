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
    table = Table(() if agent is None else (agent,))
    spaces: dict[str, Space] = {}
    for text in variations:
        name = text.partition("=")[0].replace("-", "_").removeprefix("agent.")
        if table.paths(name):
            name = table.find(Flag(f"--{name}", (), False)).path
        if name in spaces:
            raise ConfigError("--vary names a hyperparameter twice: give each its values once.")
        values, problem = text.partition("=")[2], f"--vary {text!r} cannot be read:"
        if values.count(":") > 1:
            example = f"{name}=1e-4,3e-4"
            raise ConfigError(f"{problem} of a schedule only the start varies, as in {example}.")
        try:
            numbers = tuple(map(float, values.replace(":", ",").split(",")))
        except ValueError:
            numbers = (math.nan,)
        if ":" in values and len(numbers) == 2:
            spaces[name] = Range(name, *numbers)
            continue
        if ":" in values or not all(map(math.isfinite, numbers)):
            raise ConfigError(f"{problem} write name=1e-4,3e-4 or name=1e-5:1e-2.")
        if len(set(numbers)) < len(numbers):  # equal pods would count as independent seeds
            raise ConfigError(f"--vary {text!r} names a value twice: give each value once.")
        spaces[name] = numbers
    return spaces
