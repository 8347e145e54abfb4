"""The flags of every command and recipe, for checks of pages."""

import importlib
from typing import Any

from podracer import recipes
from podracer.cli.commands import COMMANDS
from podracer.cli.flags import fields_of, flag_names
from podracer.config.torso import torso_kind
from podracer.devices.startup import Hosts
from podracer.drivers.selection import RULES
from podracer.io.entry_points import installed
from podracer.run.resume import FREE_ON_RESUME
from podracer.tournament.config import Tournament
from podracer.tournament.selection import SELECTION_RULES

Words = dict[str, list[str]]


def flags_of_commands() -> Words:
    """Return the flags of each command, without those of a recipe."""
    parts = {
        "resume": (Hosts,),
        "sweep": tuple(RULES.values()),
        "train": (Hosts,),
        "tournament": (Tournament, *SELECTION_RULES.values()),
    }
    modules = {name: f"podracer.cli.{command.module}" for name, command in COMMANDS.items()}
    modules |= {name: entry.module for name, entry in installed("commands").items()}
    table = {}
    for name, module in modules.items():
        options = getattr(importlib.import_module(module), f"{name.capitalize()}Options", None)
        table[name] = [*flags(*filter(None, (options, *parts.get(name, ())))), "--help"]
    table["resume"] += sorted(map(flag, FREE_ON_RESUME))
    return table


def flags_of_recipes() -> Words:
    """Return the flags that `train`, `sweep` and `plan` have for each recipe."""
    table = {}
    for name in sorted(recipes.RECIPES):
        experiment = recipes.find(name)
        names = ("size", *recipes.options_of(name), *("torso",) * bool(torso_kind(experiment)))
        table[name] = [*flags(experiment), *map(flag, names)]
    return table


def flags(*parts: Any) -> list[str]:
    """Return the flags of dataclasses, given as types, or as values with dataclasses inside."""
    return sorted({flag(x) for part in parts for x in flag_names(fields_of(part)).values()})


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
