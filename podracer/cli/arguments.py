"""Arguments of the command line."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

import tyro

Arch = Literal["anakin", "sebulba"]
RunPath = Annotated[Path, tyro.conf.Positional]


def parse(kind: Any, command: str, arguments: Sequence[str], default: Any = None) -> Any:
    """Flags to a dataclass; what does not fit exits as a configuration error."""
    config = (tyro.conf.AvoidSubcommands, tyro.conf.OmitArgPrefixes)
    options = {} if default is None else {"default": default}
    try:
        return tyro.cli(
            kind, prog=f"podracer {command}", args=list(arguments), config=config, **options
        )
    except SystemExit as leaving:
        sys.exit(78 if leaving.code else 0)


def recipe_of(name: str, arguments: Sequence[str]) -> tuple[Any, list[str]]:
    """The recipe, told what its own flags say, and the flags that are left."""
    from podracer.experiments import recipes

    rest = list(arguments)
    options = {own: given for own in recipes.options_of(name) if (given := taken(rest, own))}
    return recipes.find(name, **options), rest


def taken(arguments: list[str], name: str) -> str | None:
    """The value of `--name`, taken out of the arguments: a flag of the recipe itself."""
    for i, argument in enumerate(arguments):
        flag, _, joined = argument.partition("=")
        if flag == f"--{name}" and (joined or i + 1 < len(arguments)):
            value = joined or arguments[i + 1]
            del arguments[i : i + 1 + (not joined)]
            return value
    return None


def value_of(arguments: Sequence[str], flag: str) -> str | None:
    """What a flag says, before those that depend on it are known; it stays where it is."""
    for given, following in itertools.pairwise([*arguments, ""]):
        name, joined, value = given.partition("=")
        if name == flag:
            return value if joined else following
    return None


def named_arch(arguments: Sequence[str]) -> Arch | None:
    """The architecture that `--arch` names, if it does."""
    value = value_of(arguments, "--arch")
    return cast(Arch, value) if value in get_args(Arch) else None
