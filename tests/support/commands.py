"""The tables of settings of commands and recipes, for checks of pages."""

from typing import Any, get_args

from podracer import recipes
from podracer.cli.completion import parts_of_commands
from podracer.cli.settings import ALIASES, Table
from podracer.drivers.selection import Rule
from podracer.tournament.selection import SelectionRule

Words = dict[str, set[str]]


def flags_of_commands() -> Words:
    """Return the flags of each command, without those of a recipe."""
    rules = {"sweep": get_args(Rule), "tournament": get_args(SelectionRule)}
    return {
        name: {*flags(*parts, *(rule() for rule in rules.get(name, ()))), "--help"}
        for name, parts in parts_of_commands().items()
    }


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
