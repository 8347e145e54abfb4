"""The command that lists what has a name: `podracer list`."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from podracer.cli.sentences import in_flags
from podracer.cli.values import Mark
from podracer.io.text import print_json


@dataclasses.dataclass(frozen=True)
class ListOptions:
    """List the agents, environments and recipes that have a name."""

    kind: Annotated[Literal["all", "agents", "environments", "recipes"], Mark.POSITIONAL] = "all"
    """What to list."""
    json: bool = False
    """Print one JSON object."""


def list_names(options: ListOptions) -> int:
    """Run `podracer list`: print the agents, environments and recipes."""
    kinds = ("agents", "environments", "recipes") if options.kind == "all" else (options.kind,)
    rows = {kind: [row for _, row in sorted(_rows(kind).items())] for kind in kinds}
    if options.json:
        print_json(rows)
        return 0
    for title, table in rows.items():
        print(f"{title}:" if table else f"{title}: none")
        for row in table:
            note = f" [{row['note']}]" if "note" in row else ""
            print(f"  {row['name']:24} {in_flags(row['description'])}{note}")
    return 0


def _rows(kind: str) -> dict[str, dict[str, str]]:
    """Return what has a name, by the name: it, its description, and what else there is to know."""
    from podracer import agents, envs, recipes
    from podracer.io.entry_points import installed, summary

    if kind == "environments":
        return {
            name: {"name": name, "description": text}
            | ({} if status == "installed" else {"note": status})
            for name, text, status in envs.names()
        }
    things = agents.AGENTS if kind == "agents" else recipes.RECIPES
    texts = {name: (thing.__doc__ or "").split("\n")[0] for name, thing in things.items()}
    texts |= {name: summary(entry) for name, entry in installed(kind).items()}
    return {name: {"name": name, "description": text} for name, text in texts.items()}
