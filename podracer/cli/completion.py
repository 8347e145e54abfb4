"""Scripts that complete commands, recipes and flags in a shell: `podracer --completion SHELL`."""

from __future__ import annotations

import importlib
import typing
from collections.abc import Sequence
from typing import Any

from podracer import recipes
from podracer.cli.arguments import Arch
from podracer.cli.bench import RecipeOptions, SebulbaOptions
from podracer.cli.commands import COMMANDS
from podracer.cli.flags import Field, fields_of, flag_names
from podracer.config.torso import TorsoKind, torso_kind
from podracer.devices.startup import Hosts
from podracer.drivers.sebulba import SebulbaConfig
from podracer.drivers.selection import RULES
from podracer.envs.catalog import ENVIRONMENTS
from podracer.errors import ConfigError
from podracer.io.entry_points import installed
from podracer.run.resume import FREE_ON_RESUME
from podracer.tournament.config import Tournament
from podracer.tournament.selection import SELECTION_RULES

Words = dict[str, list[str]]
SHELLS = ("bash", "zsh", "fish")


def script(shell: str) -> str:
    """Return the completion script of a shell. Raises `ConfigError` if there is none."""
    if shell not in SHELLS:
        raise ConfigError(f"--completion needs the name of a shell: {', '.join(SHELLS)}.")
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell]()


def names_after() -> Words:
    """Return the names that may follow a command."""
    names = sorted([*recipes.RECIPES, *installed("recipes")])
    return {
        **dict.fromkeys(("train", "sweep", "tournament", "tune", "plan"), names),
        "bench": ["anakin", "recipe", "sebulba"],
        "list": ["agents", "environments", "recipes"],
        "--completion": list(SHELLS),
    }


def flags_of_commands() -> Words:
    """Return the flags of each command, without those of a recipe."""
    parts = {
        "bench": (RecipeOptions, SebulbaOptions, SebulbaConfig),
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
        table[name] = [*_flags(*filter(None, (options, *parts.get(name, ())))), "--help"]
    table["resume"] += sorted(map(_flag, FREE_ON_RESUME))
    return table


def flags_of_recipes() -> Words:
    """Return the flags that `train`, `sweep` and `plan` have for each recipe."""
    table = {}
    for name in sorted(recipes.RECIPES):
        experiment = recipes.find(name)
        names = ("size", *recipes.options_of(name), *("torso",) * bool(torso_kind(experiment)))
        table[name] = [*_flags(experiment), *map(_flag, names)]
    return table


def values_of_flags() -> Words:
    """Return the values of the flags that are a choice between names."""
    values = {
        "arch": typing.get_args(Arch),
        "size": typing.get_args(recipes.Size),
        "torso": typing.get_args(TorsoKind),
        "selection": SELECTION_RULES,
        "select": RULES,
    }
    for name in recipes.RECIPES:
        values |= _choices(fields_of(recipes.find(name)))
    values["environment"] = ENVIRONMENTS
    return {_flag(name): list(choices) for name, choices in sorted(values.items())}


def _choices(fields: Sequence[Field]) -> dict[str, Any]:
    """Return the choices of fields and of their parts' fields, by the names of the flags."""
    choices = {}
    for field in fields:
        if field.is_part:
            choices |= _choices(fields_of(field.value))
        elif names := [x for x in typing.get_args(field.hint) if isinstance(x, str)]:
            choices[field.flag] = names
    return choices


def _flags(*parts: Any) -> list[str]:
    """Return the flags of dataclasses, given as types, or as values with dataclasses inside."""
    return sorted({_flag(x) for part in parts for x in flag_names(fields_of(part)).values()})


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _bash() -> str:
    tables = {
        "names": names_after(),
        "flags": flags_of_commands(),
        "flags_of_recipe": flags_of_recipes(),
        "values": values_of_flags(),
    }
    cases = "\n".join(
        f'    "{title} {name}") echo "{" ".join(row)}" ;;'
        for title, table in tables.items()
        for name, row in table.items()
    )
    commands = [*COMMANDS, *installed("commands"), "--help", "--version", "--completion"]
    return f"""_podracer_words() {{
  case "$1 $2" in
{cases}
  esac
}}
_podracer() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" command="${{COMP_WORDS[1]}}" words
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="{" ".join(commands)}"
  elif [ "${{current#-}}" = "$current" ]; then
    words="$(_podracer_words values "${{COMP_WORDS[COMP_CWORD-1]}}")"
    words="${{words:-$(_podracer_words names "$command")}}"
  else
    words="$(_podracer_words flags "$command")"
    case "$command" in
      train|sweep|plan)
        words="$words $(_podracer_words flags_of_recipe "${{COMP_WORDS[2]}}")" ;;
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _podracer podracer"""


def _zsh() -> str:
    return f"autoload -U +X bashcompinit && bashcompinit\n{_bash()}"


def _fish() -> str:
    lines = ["", *(f"-n __fish_use_subcommand -a {x}" for x in (*COMMANDS, *installed("commands")))]
    for name, words in names_after().items():
        lines.append(f"-n '__fish_seen_subcommand_from {name}' -a '{' '.join(words)}'")
    for name, flags in (flags_of_commands() | flags_of_recipes()).items():
        lines += [f"-n '__fish_seen_subcommand_from {name}' -l {flag[2:]}" for flag in flags]
    for flag, values in values_of_flags().items():
        lines.append(f"-x -l {flag[2:]} -a '{' '.join(values)}'")
    return "\ncomplete -c podracer ".join(lines).strip()
