"""The command that lists what has a name: `podracer list`."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

import tyro

from podracer.cli.arguments import parse
from podracer.errors import ConfigError

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

    kind: Annotated[Literal["all", "agents", "environments", "recipes"], tyro.conf.Positional] = (
        "all"
    )
    """What to list."""
    observation: Annotated[str | None, tyro.conf.arg(metavar="vector|image|index|dict")] = None
    """Kind of the observations of your task: an image [H, W, C], the index of a state, a dict of
    several arrays, or else a vector of numbers. Only what fits is listed; of recipes first those
    in such an environment, then one of each agent that takes it, with the flags to add."""
    action: Annotated[str | None, tyro.conf.arg(metavar="discrete|multidiscrete|continuous")] = None
    """Kind of the actions of your task."""
    json: bool = False
    """Print one JSON object."""


def list_names(arguments: Sequence[str]) -> int:
    """Run `podracer list`: print the agents, environments and recipes."""
    description = "List the agents, environments and recipes that have a name."
    names = [_OTHER_NAMES.get(argument, argument) for argument in arguments]
    options = parse(ListOptions, "list", names, description=description)
    from podracer.envs.catalog import ACTIONS, OBSERVATIONS

    for name, kinds in (("observation", OBSERVATIONS), ("action", ACTIONS)):
        if (value := getattr(options, name)) not in (None, *kinds):
            possible = f"{', '.join(kinds[:-1])} or {kinds[-1]}"
            raise ConfigError(f"--{name} is {possible}, not {value!r}.")
    kinds = (options.observation, options.action)
    tables: dict[str, Callable[..., list[Row]]] = {
        "agents": _agents,
        "environments": _environments,
        "recipes": _recipes,
    }
    titles = tables if options.kind == "all" else (options.kind,)
    rows = {title: tables[title](*kinds) for title in titles}
    if options.json:
        print(json.dumps(rows))
        return 0
    for title, table in rows.items():
        print(f"{title}:" if table else f"{title}: none")
        for row in table:
            note = f" [{row['note']}]" if row.get("note") else ""
            print(f"  {row['name']:24} {row['description']}{note}")
    return 0


def _agents(observation: str | None, action: str | None) -> list[Row]:
    from podracer.agents import AGENTS, with_packages
    from podracer.envs.catalog import ACTIONS, OBSERVATIONS
    from podracer.io.entry_points import installed, summary
    from podracer.recipes.fitting import can_build

    texts = {name: _summary(kind) for name, kind in AGENTS.items()}
    texts |= {name: summary(entry) for name, entry in installed("agents").items()}
    if observation or action:
        tasks = list(
            itertools.product(
                (observation,) if observation else OBSERVATIONS, (action,) if action else ACTIONS
            )
        )
        fit = {name: any(can_build(kind(), *task) for task in tasks)
               for name, kind in with_packages().items()}  # fmt: skip
        texts = {name: text for name, text in texts.items() if fit[name]}
    return [{"name": name, "description": texts[name]} for name in sorted(texts)]


def _environments(observation: str | None, action: str | None) -> list[Row]:
    from podracer import envs
    from podracer.envs.catalog import spaces_of
    from podracer.recipes.fitting import intersect

    rows = []
    for name, description, status in sorted(envs.names()):
        row = {"name": name, "description": description}
        if observation or action:
            try:
                spaces = spaces_of(name)
            except Exception:  # a package's environment that needs more than its name, or is broken
                row["note"] = "spaces not known"
            else:
                if not intersect(spaces, observation, action):
                    continue
        rows.append(row if status == "installed" else row | {"note": status})
    return rows


def _recipes(observation: str | None, action: str | None) -> list[Row]:
    from podracer import recipes
    from podracer.io.entry_points import installed, summary
    from podracer.recipes.fitting import fitting

    of_packages = installed("recipes")
    texts = {name: _summary(recipe) for name, recipe in recipes.RECIPES.items()}
    texts |= {name: summary(entry) for name, entry in of_packages.items()}
    if not (observation or action):
        return [{"name": name, "description": texts[name]} for name in sorted(texts)]
    rows = []
    for fit in fitting(texts, observation, action):
        flags = "--environment NAME" if fit.elsewhere else ""
        flags += f" --torso {fit.torso}" if fit.torso else ""
        rows.append({"name": fit.name, "description": texts[fit.name], "note": flags})
    return rows


def _summary(thing: Any) -> str:
    return (thing.__doc__ or "").split("\n")[0]
