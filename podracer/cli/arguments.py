"""The one reader of the command line: arguments become dataclasses, by tyro."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from podracer.cli.values import REGISTRY
from podracer.errors import ConfigError

Arch = Literal["anakin", "sebulba"]
RunPath = Annotated[Path, tyro.conf.Positional]
Trackers = Annotated[
    tuple[Literal["wandb", "trackio", "mlflow"], ...],
    tyro.conf.arg(
        help="Experiment trackers that get every record too. Their own environment variables say "
        "where they keep runs, such as WANDB_PROJECT and MLFLOW_TRACKING_URI."
    ),
]
Variations = Annotated[
    tuple[tuple[str, ...], ...],
    tyro.conf.UseAppendAction,
    tyro.conf.arg(metavar="NAME=VALUES ...", help_behavior_hint=""),
]


def parse(
    kind: Any,
    command: str,
    arguments: Sequence[str],
    default: Any = None,
    description: str = "",
    explain: Callable[[str], None] = lambda flag: None,
) -> Any:
    """Return the dataclass `kind` made from flags; `description` stands above its help.

    Exits with 78 if the flags do not fit, and with 0 after `--help`. `explain` may raise a better
    error for an unknown flag, which it gets as it was written.
    """
    parsed, unknown = _tyro(
        kind, command, arguments, default=default, description=description or None
    )
    if not unknown:
        return parsed
    for argument in unknown:
        if argument.startswith("--"):
            explain(argument.partition("=")[0])
    return _tyro(kind, command, arguments, default=default, strict=True)  # refuses them


def take_flags(
    arguments: Sequence[str], *names: str, command: str = ""
) -> tuple[dict[str, str], list[str]]:
    """Return the values of the flags that are given, the last ones, and the other arguments.

    For flags on which others depend. Raises `SystemExit` for one without a value.
    """
    kind = Annotated[tuple[str, ...], tyro.conf.UseAppendAction]
    flags = dataclasses.make_dataclass("Flags", [(name, kind, ()) for name in names])
    values, remaining = _tyro(flags, command, arguments, add_help=False)
    return {name: texts[-1] for name, texts in vars(values).items() if texts}, remaining


def leading_name(arguments: Sequence[str], default: str) -> tuple[str, list[str]]:
    """Return the name that comes first, or the default, and the other arguments.

    It alone is read before the flags: which ones there are depends on it.
    """
    if arguments and not arguments[0].startswith("-"):
        return arguments[0], list(arguments[1:])
    return default, list(arguments)


def read_value(kind: Any, name: str, text: str) -> Any:
    """Return the value of a type that a text gives, as a flag would. Exits with 78 otherwise."""
    kind = Annotated[kind, tyro.conf.arg(name=name)]
    return _tyro(kind, "", [text], strict=True, add_help=False)


def _tyro(
    kind: Any,
    command: str,
    arguments: Sequence[str],
    *,
    default: Any = None,
    strict: bool = False,
    **options: Any,
) -> Any:
    """Return what the arguments give, and those that are unknown unless `strict` refuses them."""
    if default is not None:
        options["default"] = default
    try:
        return tyro.cli(
            kind,
            prog=f"podracer {command}".strip(),
            args=list(arguments),
            config=(tyro.conf.AvoidSubcommands, tyro.conf.OmitArgPrefixes),
            registry=REGISTRY,
            return_unknown_args=not strict,
            **options,
        )
    except SystemExit as stop:
        sys.exit(78 if stop.code else 0)


def require_in_range(flag: str, value: float, low: float = 1, high: float = 2**31 - 1) -> Any:
    """Return the value of a flag. Raises `ConfigError` if it is too small or too large."""

    if not low <= value <= high:
        raise ConfigError(f"{flag} must lie in [{low:,}, {high:,}], but it is {value}.")
    return value


@contextlib.contextmanager
def explained_address(host: str, port: int) -> Iterator[None]:
    """Raise `ConfigError` in place of the `OSError` of a server that cannot listen there."""

    try:
        yield
    except OSError as error:
        is_of_host = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        flag = "--host" if is_of_host else "--port"
        raise ConfigError(
            f"cannot listen at {host}, port {port}: {error.strerror}; take another {flag}."
        ) from error
