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

    what: Annotated[Literal["all", "agents", "environments", "recipes"], tyro.conf.Positional] = (
        "all"
    )
    """What to list."""


def list_names(arguments: Sequence[str]) -> int:
    """Run `podracer list`: print the agents, environments and recipes."""
    about = "List the agents, environments and recipes that have a name."
    names = [_OTHER_NAMES.get(argument, argument) for argument in arguments]
    what = parse(ListOptions, "list", names, about=about).what
    from podracer import envs, recipes
    from podracer.agents import AGENTS
    from podracer.io.entry_points import installed, summary

    tables = {
        "agents": [(kind.__name__, _summary(kind)) for kind in AGENTS.values()],
        "environments": [
            (name, about if status == "installed" else f"{about} [{status}]")
            for name, about, status in envs.names()
        ],
        "recipes": [
            *((name, _summary(recipe)) for name, recipe in recipes.RECIPES.items()),
            *((name, summary(entry)) for name, entry in installed("recipes").items()),
        ],
    }
    for title in tables if what == "all" else (what,):
        print(f"{title}:")
        for name, about in sorted(tables[title]):
            print(f"  {name:24} {about}")
    return 0


def _summary(thing: object) -> str:
    return (thing.__doc__ or "").split("\n")[0]
