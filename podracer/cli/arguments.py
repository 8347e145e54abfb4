"""The reader of the command line: flags become configurations, and dataclasses of options."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from podracer.cli.help import page
from podracer.cli.settings import Flag, Table, split_flags, with_values
from podracer.cli.values import kind_of
from podracer.errors import ConfigError
from podracer.io.addresses import address_of, local_run


def read_parts(
    parts: Sequence[Any],
    command: str,
    arguments: Sequence[str],
    description: str = "",
    explain: Callable[[str], str] = lambda name: "",
) -> list[Any]:
    """Return configurations with the values of flags; `--help` prints their page and exits with 0.

    Flags that choose a part are read first. Raises `ConfigError` for what does not fit.
    """
    first, flags = split_flags(arguments)
    pages = [flag for flag in flags if flag.spelling in ("--help", "-h")]
    flags = [flag for flag in flags if flag not in pages]
    table = Table(parts, command, explain)
    values: dict[str, Any] = {}
    strays: list[tuple[str, Flag | None]] = [(word, None) for word in first]
    while choice := table.choice(flags):
        flags.remove(choice)
        setting, value, extra_words = table.read(choice)
        parts = [with_values(part, {setting.path: value}) for part in parts]
        table = Table(parts, command, explain)
        strays += extra_words
    if pages:
        print(page(table, description, pages[0].words))
        sys.exit(0)
    for flag in flags:  # the last of equal ones counts; texts are collected
        setting, value, extra_words = table.read(flag)
        is_collected = setting.kind.is_tuple and setting.kind.names == ("str",)
        values[setting.path] = values.get(setting.path, ()) + value if is_collected else value
        strays += extra_words
    for setting in table.settings.values():
        if setting.is_positional and setting.path not in values:
            count = len(strays) if setting.kind.is_tuple else 1
            if words := [word for word, _ in strays[:count]]:
                values[setting.path] = setting.read(words)
            elif setting.value is dataclasses.MISSING:
                usage = " ".join(x.word for x in table.settings.values() if x.is_positional)
                raise ConfigError(
                    f"{command} needs {setting.word}: write podracer {command} {usage}."
                )
            strays = strays[count:]
    for word, flag in strays:
        table.refuse(word, flag)
    return [with_values(part, values) for part in parts]


def parse(kind: Any, command: str, arguments: Sequence[str], description: str = "") -> Any:
    """Return the dataclass `kind` made from flags; `description` stands above its help.

    Runs at addresses are copied. The rest is as in `read_parts`.
    """
    text = description or kind.__doc__ or ""
    (options,) = read_parts([blank(kind)], command, arguments, text)
    choice, changed = getattr(options, "checkpoint", None), {}
    for name, value in vars(options).items():
        paths = value if isinstance(value, tuple) else (value,)
        if any(isinstance(path, Path) and address_of(path) for path in paths):
            copies = tuple(local_run(path, choice) for path in paths)
            changed[name] = copies if isinstance(value, tuple) else copies[0]
    return dataclasses.replace(options, **changed)


def blank(kind: Any) -> Any:
    """Return options by default; those that must be given are `dataclasses.MISSING`."""
    fields = [x for x in dataclasses.fields(kind) if x.default_factory is dataclasses.MISSING]
    return kind(**{field.name: field.default for field in fields})


def take_values(
    arguments: Sequence[str], hints: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return the values of flags, by name, of these types, and the other arguments.

    For flags on which others depend. The last of equal ones counts. Raises `ConfigError` for one
    without a value.
    """
    first, flags = split_flags(arguments)
    values: dict[str, Any] = {}
    remaining: list[str] = []
    for flag in flags:
        name = flag.name
        if not flag.words and hints.get(name.removeprefix("no_")) is bool:
            name = name.removeprefix("no_")
            flag = flag._replace(words=(str(name == flag.name),))
        if name in hints:
            words, extra_words = flag.split(str if hints[name] is bool else hints[name])
            values[name] = kind_of(hints[name]).read(words, flag.spelling)
            first += extra_words
        else:
            remaining += flag.arguments
    return values, [*first, *remaining]


def leading_name(arguments: Sequence[str], default: str) -> tuple[str, list[str]]:
    """Return the name that comes first, or the default, and the other arguments.

    It alone is read before the flags: which ones there are depends on it.
    """
    if arguments and not arguments[0].startswith("-"):
        return arguments[0], list(arguments[1:])
    return default, list(arguments)
