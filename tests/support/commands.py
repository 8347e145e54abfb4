"""The tables of settings of commands and recipes, for checks of pages."""

import importlib
from typing import Any

from podracer import recipes
from podracer.cli.arguments import blank
from podracer.cli.commands import COMMANDS
from podracer.cli.resume import free_settings
from podracer.cli.settings import ALIASES, Table
from podracer.devices.startup import Hosts
from podracer.drivers.selection import RULES
from podracer.io.entry_points import installed
from podracer.tournament.config import Tournament
from podracer.tournament.selection import SELECTION_RULES

Words = dict[str, set[str]]


def flags_of_commands() -> Words:
    """Return the flags of each command, without those of a recipe."""
    parts = {
        "resume": (Hosts(), free_settings()),
        "sweep": tuple(rule() for rule in RULES.values()),
        "train": (Hosts(),),
        "tournament": (Tournament(()), *(rule() for rule in SELECTION_RULES.values())),
    }
    modules = {name: f"podracer.cli.{command.module}" for name, command in COMMANDS.items()}
    modules |= {name: entry.module for name, entry in installed("commands").items()}
    table = {}
    for name, module in modules.items():
        kind = getattr(importlib.import_module(module), f"{name.capitalize()}Options", None)
        options = (blank(kind),) if kind else ()
        table[name] = {*flags(*options, *parts.get(name, ())), "--help"}
    return table


def flags_of_recipes() -> Words:
    """Return the flags that `train`, `sweep` and `plan` have for each recipe."""
    table = {}
    for name in sorted(recipes.RECIPES):
        names = {flag(x) for x in ("size", *recipes.options_of(name))}
        table[name] = flags(recipes.find(name)) | names
    return table


def flags(*parts: Any) -> set[str]:
    """Return the flags of configurations, all the ends of their paths that name one setting."""
    found = set()
    for part in parts:
        table = Table([part])
        ends = {
            path.split(".", count)[-1]
            for path in table.settings
            for count in range(path.count(".") + 1)
        }
        found |= {flag(end) for end in ends if len(table.paths(end)) == 1}
        found |= {flag(alias) for alias, path in ALIASES.items() if path in table.settings}
    return found


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"
