"""The command that lists what has a name: `podracer list`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Literal

import tyro

from podracer.cli.arguments import parse

_OTHER_NAMES = {
    "agent": "agents",
    "env": "environments",
    "envs": "environments",
    "environment": "environments",
    "recipe": "recipes",
}


@dataclasses.dataclass(frozen=True)
class ListOptions:
    """Flags of `podracer list`."""

    kind: Annotated[Literal["all", "agents", "environments", "recipes"], tyro.conf.Positional] = (
        "all"
    )
    """What to list."""


def list_names(arguments: Sequence[str]) -> int:
    """Run `podracer list`: print the agents, environments and recipes."""
    description = "List the agents, environments and recipes that have a name."
    names = [_OTHER_NAMES.get(argument, argument) for argument in arguments]
    kind = parse(ListOptions, "list", names, description=description).kind
    from podracer import envs, recipes
    from podracer.agents import AGENTS
    from podracer.io.entry_points import installed, summary

    tables = {
        "agents": [(agent.__name__, _summary(agent)) for agent in AGENTS.values()],
        "environments": [
            (name, description if status == "installed" else f"{description} [{status}]")
            for name, description, status in envs.names()
        ],
        "recipes": [
            *((name, _summary(recipe)) for name, recipe in recipes.RECIPES.items()),
            *((name, summary(entry)) for name, entry in installed("recipes").items()),
        ],
    }
    for title in tables if kind == "all" else (kind,):
        print(f"{title}:")
        for name, description in sorted(tables[title]):
            print(f"  {name:24} {description}")
    return 0


def _summary(thing: object) -> str:
    return (thing.__doc__ or "").split("\n")[0]
