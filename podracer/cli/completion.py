"""The command that prints completions for a shell: `podracer completion`."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from podracer import recipes
from podracer.cli.arguments import blank
from podracer.cli.commands import COMMANDS
from podracer.cli.resume import free_settings
from podracer.cli.settings import ALIASES, Table
from podracer.devices.startup import Hosts
from podracer.io.entry_points import installed
from podracer.tournament.config import Tournament

_SCRIPT = """\
# Completions for bash and zsh: eval "$(podracer completion)", or keep them in a file.
_podracer() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} words=
  if [[ $word == -* ]]; then
    words=--help
    case ${{COMP_WORDS[1]}} in
{flags}
    esac
    case ${{COMP_WORDS[1]}} in train|sweep|tune|plan|compile) case ${{COMP_WORDS[2]}} in
{flags_of_recipes}
    esac ;; esac
  fi
  case "$before" in
{choices}
  esac
  case "$COMP_CWORD ${{COMP_WORDS[1]}}" in
    "1 "*) words="{commands}" ;;
    "2 train"|"2 sweep"|"2 tune"|"2 plan"|"2 compile"|"2 tournament") words="$words {recipes}" ;;
  esac
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
[[ -z $ZSH_VERSION ]] || {{ autoload -Uz compinit bashcompinit; compinit; bashcompinit; }}
complete -o default -F _podracer podracer
"""


@dataclasses.dataclass(frozen=True)
class CompletionOptions:
    """Print a script that completes commands, recipes, flags and their choices in bash and zsh."""


def completion(options: CompletionOptions) -> int:
    """Run `podracer completion`: print the script."""
    of_commands = {name: Table(parts) for name, parts in parts_of_commands().items()}
    of_recipes: dict[str, Table] = {}
    for name in (*recipes.RECIPES, *installed("recipes")):
        with contextlib.suppress(Exception):  # one of a package that is broken or needs an option
            of_recipes[name] = Table([recipes.find(name)])
    flags, choices = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for name, table in (of_commands | of_recipes).items():
        for setting in table.settings.values():
            if setting.is_positional or (setting.is_part and not setting.choices):
                continue
            names = [table.shortest_flag(setting.path)]
            names += [f"--{alias}" for alias, path in ALIASES.items() if path == setting.path]
            names += [f"--no-{names[0][2:]}"] if setting.hint is bool else []
            flags[name].update(names)
            for flag in names if not setting.kind.names else ():
                choices[flag].update(setting.kind.words)
    for name in of_recipes:
        flags[name] |= {f"--{x.replace('_', '-')}" for x in ("size", *recipes.options_of(name))}
    script = _SCRIPT.format(
        commands=" ".join(of_commands),
        recipes=" ".join(of_recipes),
        choices=_cases(choices, choices),
        flags=_cases(flags, of_commands),
        flags_of_recipes=_cases(flags, of_recipes),
    )
    print(script, end="")
    return 0


def _cases(words: Mapping[str, Iterable[str]], names: Iterable[str]) -> str:
    """Return the branches of a `case` for names, one for all that have the same words."""
    names_of = defaultdict[str, list[str]](list)
    for name in names:
        names_of[" ".join(sorted(words[name]))].append(name)
    return "\n".join(f'    {"|".join(names_of[x])}) words="$words {x}" ;;' for x in names_of)


def parts_of_commands() -> dict[str, tuple[Any, ...]]:
    """Return the configurations that each command reads, without those of a recipe."""
    more_parts = {"resume": (free_settings(), Hosts()), "tournament": (Tournament(()),)}
    modules = {name: f"podracer.cli.{command.module}" for name, command in COMMANDS.items()}
    modules |= {name: entry.module for name, entry in installed("commands").items()}
    parts: dict[str, tuple[Any, ...]] = {}
    for name, module in modules.items():
        kind = getattr(importlib.import_module(module), f"{name.capitalize()}Options", None)
        parts[name] = (*((blank(kind),) if kind else ()), *more_parts.get(name, ()))
    return parts
