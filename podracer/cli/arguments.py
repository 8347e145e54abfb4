"""The one reader of the command line: arguments become dataclasses, by tyro."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import tyro

from podracer.cli.sentences import of_parser, unexpected
from podracer.cli.values import REGISTRY, RUN
from podracer.errors import ConfigError
from podracer.io.addresses import address_of, local_run


@dataclasses.dataclass(frozen=True)
class Limits:
    """Marker of a field of options: its value, if there is one, lies in `[low, high]`."""

    low: float = 1
    high: float = 2**31 - 1

    def check(self, name: str, value: Any) -> None:
        """Raise `ConfigError` if the value of a field, or an item of it, is outside."""
        for number in value if isinstance(value, tuple) else (value,):
            if not self.low <= number <= self.high:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(
                    f"{flag} must lie in [{self.low:,}, {self.high:,}], but it is {number}."
                )


Count = Annotated[int, Limits()]
Seed = Annotated[int, Limits(0, 2**32 - 1)]
Arch = Literal["anakin", "sebulba"]
StoredRun = Annotated[Path, RUN]
RunPath = Annotated[StoredRun, tyro.conf.Positional]
Attachments = Annotated[
    tuple[str, ...],
    tyro.conf.arg(
        metavar="NAME:ARGUMENT",
        help="Parts of packages that follow what is saved: `mirror:s3://bucket/run` of "
        "podracer-cloud copies it in the background.",
    ),
]
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

    Exits with 0 after `--help`. Raises `ConfigError` if the flags do not fit or a value is outside
    its `Limits`. `explain` may raise a better error for an unknown flag, which it gets as it was
    written.
    """
    text = description or None
    parsed, unknown = _tyro(kind, command, arguments, default=default, description=text)
    if not unknown:
        check_limits(get_type_hints(kind, include_extras=True), vars(parsed))
        return _with_copies(parsed)
    for argument in unknown:
        if argument.startswith("--"):
            explain(argument.partition("=")[0])
    raise ConfigError(unexpected(unknown, command, flags_of(kind)))


def flags_of(kind: Any) -> Iterator[str]:
    """Yield the names of the flags of a dataclass and of the dataclasses in it, with `--`."""
    for name, hint in get_type_hints(kind, include_extras=True).items():
        markers, field_type = getattr(hint, "__metadata__", ()), getattr(hint, "__origin__", hint)
        if dataclasses.is_dataclass(field_type):
            yield from flags_of(field_type)
        elif not {tyro.conf.Positional, tyro.conf.Suppress} & {*markers}:
            own_names = filter(None, (getattr(marker, "name", None) for marker in markers))
            yield "--" + next(own_names, name.replace("_", "-"))


def _with_copies(options: Any) -> Any:
    """Return options with copies of runs in the places of their addresses."""
    choice, changed = getattr(options, "checkpoint", None), {}
    for name, value in vars(options).items():
        paths = value if isinstance(value, tuple) else (value,)
        if any(isinstance(path, Path) and address_of(path) for path in paths):
            copies = tuple(local_run(path, choice) for path in paths)
            changed[name] = copies if isinstance(value, tuple) else copies[0]
    return dataclasses.replace(options, **changed) if changed else options


def take_flags(
    arguments: Sequence[str], *names: str, command: str = ""
) -> tuple[dict[str, str], list[str]]:
    """Return the values of the flags that are given, the last ones, and the other arguments.

    For flags on which others depend. Raises `ConfigError` for one without a value.
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
    """Return the value of a type that a text gives, as a flag would, or raise `ConfigError`."""
    return _tyro(kind, "", [text], name=name, add_help=False)[0]


def _tyro(
    kind: Any,
    command: str,
    arguments: Sequence[str],
    *,
    default: Any = None,
    name: str = "",
    **options: Any,
) -> Any:
    """Return what the arguments give, and those that are unknown.

    Raises `ConfigError` for those that do not fit, which the value of one flag calls by its `name`.
    """
    if default is not None:
        options["default"] = default
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(
                kind,
                prog=f"podracer {command}".strip(),
                args=list(arguments),
                config=(
                    tyro.conf.AvoidSubcommands,
                    tyro.conf.OmitArgPrefixes,
                    tyro.conf.SuppressFixed,
                ),
                registry=REGISTRY,
                return_unknown_args=True,
                **options,
            )
    except SystemExit as stop:
        if not stop.code:  # after the page of `--help`
            sys.exit(0)
        raise ConfigError(of_parser(box.getvalue(), command, name)) from None


def check_limits(hints: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a value outside the `Limits` of its field's annotation."""
    for name, value in values.items():
        for marker in getattr(hints[name], "__metadata__", ()):
            if isinstance(marker, Limits) and value is not None:
                marker.check(name, value)
