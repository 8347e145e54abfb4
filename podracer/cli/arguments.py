"""The reader of the command line: flags become configurations, and dataclasses of options."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from podracer.cli.help import page
from podracer.cli.settings import Explain, Flag, Table, split_flags
from podracer.cli.values import Limits as Limits
from podracer.cli.values import Mark, item_of
from podracer.errors import ConfigError
from podracer.io.addresses import address_of, local_run

Count = Annotated[int, Limits()]
Seed = Annotated[int, Limits(0, 2**32 - 1)]
RunPath = Annotated[Path, Mark.RUN, Mark.POSITIONAL]
Attachments = Annotated[
    tuple[str, ...],
    "Parts of packages that follow what is saved, as NAME:ARGUMENT: `mirror:s3://bucket/run` of "
    "podracer-cloud copies it in the background.",
]
Trackers = Annotated[
    tuple[Literal["wandb", "trackio", "mlflow"], ...],
    "Experiment trackers that get every record too. Their own environment variables say where they "
    "keep runs, such as WANDB_PROJECT and MLFLOW_TRACKING_URI.",
]


def read_parts(
    parts: Mapping[str, Any],
    command: str,
    arguments: Sequence[str],
    description: str = "",
    explain: Explain | None = None,
) -> dict[str, Any]:
    """Return configurations with the values of flags; `--help` prints their page and exits with 0.

    Flags that choose a part are read first. Raises `ConfigError` for what does not fit.
    """
    first, flags = split_flags(arguments)
    pages = [flag for flag in flags if flag.spelling in ("--help", "-h")]
    flags = [flag for flag in reversed(dict.fromkeys(reversed(flags))) if flag not in pages]
    table = Table(parts, command, explain)
    choosers: list[Flag] = []
    while choice := table.choice([flag for flag in flags if flag not in choosers]):
        setting = table.find(choice)
        part = setting.choose(choice.split(setting)[0][0], choice.spelling)
        table = table.with_values({setting.path: part})
        choosers.append(choice)
    if pages:
        print(page(table, description, pages[0].words))
        sys.exit(0)
    words_of: dict[str, list[str]] = {}
    strays: list[tuple[str, Flag | None]] = [(word, None) for word in first]
    for flag in flags:
        setting = table.find(flag)
        words, stray = flag.split(setting)
        strays += [(word, flag) for word in stray]
        if setting.hint is bool and not words:
            words = ("true" if table.paths(flag.name) else "false",)
        earlier = words_of.get(setting.path, []) if item_of(setting.hint) is str else []
        words_of[setting.path] = [*earlier, *words]  # the last flag counts; texts are collected
    positional = [x for x in table.settings.values() if x.is_positional]
    for setting in (x for x in positional if x.path not in words_of):
        count = len(strays) if item_of(setting.hint) else min(len(strays), 1)
        if count:
            words_of[setting.path] = [word for word, _ in strays[:count]]
            del strays[:count]
        elif setting.value is dataclasses.MISSING:
            word = setting.word
            raise ConfigError(f"{command} needs {word}: write podracer {command} {word}.")
    for word, flag in strays:
        table.refuse(word, flag)
    settings = (table.settings[path] for path in words_of)
    values = {x.path: x.read(words_of[x.path]) for x in settings if not (x.is_part or x.choices)}
    return dict(table.with_values(values).parts)


def parse(kind: Any, command: str, arguments: Sequence[str], description: str = "") -> Any:
    """Return the dataclass `kind` made from flags; `description` stands above its help.

    Runs at addresses are copied. The rest is as in `read_parts`.
    """
    text = description or kind.__doc__ or ""
    options = read_parts({"": blank(kind)}, command, arguments, text)[""]
    choice, changed = getattr(options, "checkpoint", None), {}
    for name, value in vars(options).items():
        paths = value if isinstance(value, tuple) else (value,)
        if any(isinstance(path, Path) and address_of(path) for path in paths):
            copies = tuple(local_run(path, choice) for path in paths)
            changed[name] = copies if isinstance(value, tuple) else copies[0]
    return dataclasses.replace(options, **changed) if changed else options


def blank(kind: Any) -> Any:
    """Return options by default; those that must be given are `dataclasses.MISSING`."""
    fields = [x for x in dataclasses.fields(kind) if x.default_factory is dataclasses.MISSING]
    return kind(**{field.name: field.default for field in fields})


def take_flags(arguments: Sequence[str], *names: str) -> tuple[dict[str, str], list[str]]:
    """Return the values of the flags that are given, the last ones, and the other arguments.

    For flags on which others depend. Raises `ConfigError` for one without a value.
    """
    remaining, flags = split_flags(arguments)
    values = {}
    for flag in flags:
        if flag.name in names:
            (values[flag.name],), strays = flag.split()
            remaining += strays
        elif flag.is_joined:
            remaining += [f"{flag.spelling}={flag.words[0]}", *flag.words[1:]]
        else:
            remaining += [flag.spelling, *flag.words]
    return values, remaining


def leading_name(arguments: Sequence[str], default: str) -> tuple[str, list[str]]:
    """Return the name that comes first, or the default, and the other arguments.

    It alone is read before the flags: which ones there are depends on it.
    """
    if arguments and not arguments[0].startswith("-"):
        return arguments[0], list(arguments[1:])
    return default, list(arguments)
