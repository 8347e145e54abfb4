"""The command that lists what has a name: `podracer list`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from podracer.cli.arguments import parse
from podracer.cli.values import Mark

_OTHER_NAMES = {
    "agent": "agents",
    "env": "environments",
    "envs": "environments",
    "environment": "environments",
    "recipe": "recipes",
}
Row = dict[str, str]  # its name and its description, and what else there is to know


@dataclasses.dataclass(frozen=True)
class ListOptions:
    """Flags of `podracer list`."""

    kind: Annotated[Literal["all", "agents", "environments", "recipes"], Mark.POSITIONAL] = "all"
    """What to list."""
    json: bool = False
    """Print one JSON object."""


def list_names(arguments: Sequence[str]) -> int:
    """Run `podracer list`: print the agents, environments and recipes."""
    description = "List the agents, environments and recipes that have a name."
    names = [_OTHER_NAMES.get(argument, argument) for argument in arguments]
    options = parse(ListOptions, "list", names, description=description)
    tables: dict[str, Callable[[], list[Row]]] = {
        "agents": _agents,
        "environments": _environments,
        "recipes": _recipes,
    }
    titles = tables if options.kind == "all" else (options.kind,)
    rows = {title: tables[title]() for title in titles}
    if options.json:
        print(json.dumps(rows))
        return 0
    for title, table in rows.items():
        print(f"{title}:" if table else f"{title}: none")
        for row in table:
            note = f" [{row['note']}]" if row.get("note") else ""
            print(f"  {row['name']:24} {row['description']}{note}")
    return 0


def _agents() -> list[Row]:
    from podracer.agents import AGENTS
    from podracer.io.entry_points import installed, summary

    texts = {name: _summary(kind) for name, kind in AGENTS.items()}
    return _rows(texts | {name: summary(x) for name, x in installed("agents").items()})


def _environments() -> list[Row]:
    from podracer import envs

    return [
        {"name": name, "description": description}
        | ({} if status == "installed" else {"note": status})
        for name, description, status in sorted(envs.names())
    ]


def _recipes() -> list[Row]:
    from podracer import recipes
    from podracer.io.entry_points import installed, summary

    texts = {name: _summary(recipe) for name, recipe in recipes.RECIPES.items()}
    return _rows(texts | {name: summary(entry) for name, entry in installed("recipes").items()})


def _rows(texts: dict[str, str]) -> list[Row]:
    return [{"name": name, "description": texts[name]} for name in sorted(texts)]


def _summary(thing: Any) -> str:
    return (thing.__doc__ or "").split("\n")[0]
