"""Scripts that complete commands, recipes and flags in a shell: `podracer --completion SHELL`."""

from __future__ import annotations

import dataclasses
import importlib
import typing
from typing import Any

from podracer.cli.arguments import Arch, flag_names
from podracer.cli.main import COMMANDS
from podracer.io.entry_points import installed
from podracer.types import ConfigError

SHELLS = ("bash", "zsh", "fish")


def script(shell: str) -> str:
    """Return the completion script of a shell. Raises `ConfigError` if there is none."""
    if shell not in SHELLS:
        raise ConfigError(f"--completion needs the name of a shell: {', '.join(SHELLS)}.")
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell]()


def names_after() -> dict[str, list[str]]:
    """Return the names that may follow a command."""
    from podracer.experiments import recipes

    names = sorted([*recipes.RECIPES, *installed("recipes")])
    return {
        **dict.fromkeys(("train", "sweep", "tournament", "tune", "plan"), names),
        "bench": ["anakin", "recipe", "sebulba"],
        "list": ["agents", "environments", "recipes"],
        "--completion": list(SHELLS),
    }


def flags_of_commands() -> dict[str, list[str]]:
    """Return the flags of each command, without those of a recipe."""
    from podracer.cli.bench import AnakinOptions, RecipeOptions, SebulbaOptions
    from podracer.drivers.sebulba import SebulbaConfig
    from podracer.drivers.selection import RULES
    from podracer.experiments.hosts import Hosts
    from podracer.tournament.config import Tournament
    from podracer.tournament.selection import SELECTION_RULES

    parts = {
        "bench": (AnakinOptions, RecipeOptions, SebulbaOptions, SebulbaConfig),
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
    return table


def flags_of_recipes() -> dict[str, list[str]]:
    """Return the flags that `train`, `sweep` and `plan` have for each recipe."""
    from podracer.experiments import recipes
    from podracer.experiments.torso import torso_kind

    return {
        name: flags(recipes.find(name))
        + [f"--{option}" for option in recipes.options_of(name)]
        + ["--torso"] * bool(torso_kind(recipes.find(name)))
        for name in sorted(recipes.RECIPES)
    }


def values_of_flags() -> dict[str, list[str]]:
    """Return the values of the flags that are a choice between names."""
    from podracer.drivers.selection import RULES
    from podracer.envs.catalog import ENVIRONMENTS
    from podracer.experiments import recipes
    from podracer.experiments.torso import TorsoKind
    from podracer.tournament.selection import SELECTION_RULES

    values = {"arch": list(typing.get_args(Arch)), "environment": list(ENVIRONMENTS)}
    values |= {"torso": list(typing.get_args(TorsoKind))}
    values |= {"selection": list(SELECTION_RULES), "select": list(RULES)}
    for name in recipes.RECIPES:
        values |= _choices(recipes.find(name))
    return {_flag(name): choices for name, choices in sorted(values.items())}


def _choices(config: Any) -> dict[str, list[str]]:
    """Return the choices of the fields of a dataclass, and of its parts, by name."""
    choices = {}
    for name, hint in typing.get_type_hints(type(config)).items():
        value = getattr(config, name, None)
        if typing.get_origin(hint) is typing.Literal:
            choices[name] = list(typing.get_args(hint))
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            choices |= _choices(value)
    return choices


def flags(*parts: Any) -> list[str]:
    """Return the flags of dataclasses, given as types, or as values with dataclasses inside."""
    return sorted({_flag(name) for part in parts for name in flag_names(part)})


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _bash() -> str:
    def cases(table: dict[str, list[str]]) -> str:
        return "\n".join(f'    {name}) echo "{" ".join(row)}" ;;' for name, row in table.items())

    return f"""_podracer_names() {{
  case "$1" in
{cases(names_after())}
  esac
}}
_podracer_command_flags() {{
  case "$1" in
{cases(flags_of_commands())}
  esac
}}
_podracer_recipe_flags() {{
  case "$1" in
{cases(flags_of_recipes())}
  esac
}}
_podracer_values() {{
  case "$1" in
{cases(values_of_flags())}
  esac
}}
_podracer() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" command="${{COMP_WORDS[1]}}" words
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="{" ".join([*COMMANDS, *installed("commands"), "--help", "--version", "--completion"])}"
  elif [ "${{current#-}}" = "$current" ]; then
    words="$(_podracer_values "${{COMP_WORDS[COMP_CWORD-1]}}")"
    words="${{words:-$(_podracer_names "$command")}}"
  else
    words="$(_podracer_command_flags "$command")"
    case "$command" in
      train|sweep|plan) words="$words $(_podracer_recipe_flags "${{COMP_WORDS[2]}}")" ;;
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _podracer podracer"""


def _zsh() -> str:
    return f"autoload -U +X bashcompinit && bashcompinit\n{_bash()}"


def _fish() -> str:
    commands = [*COMMANDS, *installed("commands")]
    lines = [f"complete -c podracer -n __fish_use_subcommand -a {name}" for name in commands]
    for command, names in names_after().items():
        condition = f"__fish_seen_subcommand_from {command}"
        lines.append(f"complete -c podracer -n '{condition}' -a '{' '.join(names)}'")
    for table in (flags_of_commands(), flags_of_recipes()):
        for name, row in table.items():
            condition = f"__fish_seen_subcommand_from {name}"
            lines += [f"complete -c podracer -n '{condition}' -l {flag[2:]}" for flag in row]
    for flag, values in values_of_flags().items():
        lines.append(f"complete -c podracer -x -l {flag[2:]} -a '{' '.join(values)}'")
    return "\n".join(lines)
