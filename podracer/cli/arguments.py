"""Parsing of command-line arguments into dataclasses."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import errno
import inspect
import itertools
import os
import socket
import sys
import textwrap
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast, get_args

import tyro

from podracer.cli.values import REGISTRY
from podracer.io.names import OTHER_NAMES

if TYPE_CHECKING:
    from podracer.experiments.experiment import Experiment

Arch = Literal["anakin", "sebulba"]
RunPath = Annotated[Path, tyro.conf.Positional]
Trackers = Annotated[
    tuple[Literal["wandb", "trackio", "mlflow"], ...],
    tyro.conf.arg(
        help="Experiment trackers that get every record too. Their own environment variables say "
        "where they keep runs, such as WANDB_PROJECT and MLFLOW_TRACKING_URI."
    ),
]

# The flags of an experiment in the order of the help page: what matters first comes first.
RUN_FLAGS = (
    "frames", "seed", "run_dir", "arch", "devices", "environment", "evaluations",
    "evaluation_episodes", "evaluation_policy", "evaluation_epsilon", "fixed_evaluation",
    "target_return", "max_seconds", "save_seconds", "keep_best", "stall_seconds", "torso",
)  # fmt: skip
_TORSO = (
    "Layers of the network before its outputs: fully connected ones (mlp) or convolutions (cnn, "
    "resnet), for images [H, W, C]. Their own flags are shown with this one before --help."
)


def parse(
    kind: Any, command: str, arguments: Sequence[str], default: Any = None, about: str = ""
) -> Any:
    """Return the dataclass `kind` made from flags; `about` is the text above its help.

    Exits with 78 if the flags do not fit, and with 0 after `--help`.
    """
    _refuse_other_names(kind if default is None else default, arguments)
    if hasattr(default, "agent"):
        from podracer.cli.foreign_flags import refuse_foreign_flags

        refuse_foreign_flags(command, default, arguments)
    options: dict[str, Any] = {} if default is None else {"default": default}
    if about:
        options["description"] = about
    try:
        return tyro.cli(
            kind,
            prog=f"podracer {command}",
            args=list(arguments),
            config=(tyro.conf.AvoidSubcommands, tyro.conf.OmitArgPrefixes),
            registry=REGISTRY,
            **options,
        )
    except SystemExit as stop:
        sys.exit(78 if stop.code else 0)
    except AssertionError as error:
        if "conflict" not in str(error).lower():
            raise
        from podracer.types import ConfigError

        names = list(flag_names(default))
        twice = sorted({name for name in names if names.count(name) > 1})
        raise ConfigError(
            f"podracer {command}: several fields would have the flag {', '.join(twice)}: rename "
            "those of your own, or leave a part without flags: Annotated[TYPE, tyro.conf.Suppress]."
        ) from error


def _refuse_other_names(part: Any, arguments: Sequence[str]) -> None:
    """Raise `ConfigError` for a flag as other libraries call it, with its name here."""
    flags = [argument.partition("=")[0] for argument in arguments if argument.startswith("--")]
    by_name = {flag[2:].replace("-", "_"): flag for flag in flags}
    for name in by_name.keys() & OTHER_NAMES.keys():
        names = list(flag_names(part))  # which imports JAX
        own_name = next((x for x in OTHER_NAMES[name] if x in names), None)
        if own_name is not None and name not in names:
            from podracer.types import ConfigError

            flag = f"--{own_name.replace('_', '-')}"
            raise ConfigError(f"There is no flag {by_name[name]} here: did you mean {flag}?")


def flag_names(part: Any) -> Iterator[str]:
    """Yield the names of the flags of a dataclass, with underscores, those of its parts included.

    The dataclass is given as a type, or as a value with dataclasses inside.
    """
    from podracer.schedules import Linear

    kind = part if isinstance(part, type) else type(part)
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        value = getattr(part, field.name, hints[field.name])
        markers = getattr(hints[field.name], "__metadata__", ())
        if dataclasses.is_dataclass(value) and not isinstance(value, Linear):
            yield from flag_names(value)
        elif field.name != "spec" and not {tyro.conf.Suppress, tyro.conf.Positional} & set(markers):
            # Some fields have a longer flag, see `podracer.types.flag`.
            longer = (getattr(marker, "name", None) for marker in markers)
            yield next(filter(None, longer), field.name).replace("-", "_")


def parse_parts(
    parts: dict[str, Any], command: str, arguments: Sequence[str], about: str = ""
) -> Any:
    """Parse flags into several dataclasses at once; each is a group of the help page.

    `parts` are the defaults by the title of their group. Returns an object with these attributes.
    """
    kind = dataclasses.make_dataclass(
        "Command", [(title, type(part)) for title, part in parts.items()], frozen=True
    )
    return parse(kind, command, arguments, kind(**parts), about)


def parse_experiment(
    command: str,
    arguments: Sequence[str],
    experiment: Experiment,
    options: Any,
    extra: dict[str, Any] | None = None,
    about: str = "",
) -> tuple[Any, Experiment, dict[str, Any]]:
    """Parse the flags of a command that trains: its own `options` and those of an experiment.

    The help page has a group for the run, one for the agent and for each of its parts, one for
    the driver, named by its architecture, and one for each value of `extra`. Returns `options`,
    `experiment` and `extra` with the values of the flags.
    """
    parts = {"run": _run_group(options, experiment), "agent": experiment.agent}
    parts |= {experiment.arch: experiment.driver} | (extra or {})
    parsed = parse_parts(parts, command, arguments, about)
    values = {
        field.name: getattr(parsed.run, field.name) for field in dataclasses.fields(parsed.run)
    }
    values.pop("torso", None)  # which `find_recipe` has read
    own = {field.name: values.pop(field.name) for field in dataclasses.fields(options)}
    driver = getattr(parsed, experiment.arch)
    experiment = dataclasses.replace(experiment, agent=parsed.agent, driver=driver, **values)
    extra = {title: getattr(parsed, title) for title in extra or ()}
    return dataclasses.replace(options, **own), experiment, extra


def _run_group(options: Any, experiment: Experiment) -> Any:
    """Return the fields of both as one dataclass, but the agent and the driver.

    An environment that is an object has no flag, a network without a torso none for its kind.
    """
    from podracer.experiments.torso import TorsoKind, torso_kind

    fields, values = {}, {}
    if torso := torso_kind(experiment):
        fields["torso"] = Annotated[TorsoKind, tyro.conf.arg(help=_TORSO)]
        values["torso"] = torso
    for source in (options, experiment):
        texts = field_texts(type(source))
        hints = typing.get_type_hints(type(source), include_extras=True)
        if "environment" in hints:
            hints["environment"] = str
            if not isinstance(experiment.environment, str):
                del hints["environment"]
        for name in hints.keys() - {"agent", "driver"}:
            fields[name] = hints[name]
            if name in texts:
                fields[name] = Annotated[hints[name], tyro.conf.arg(help=texts[name])]
            values[name] = getattr(source, name)
    order = {name: place for place, name in enumerate(RUN_FLAGS)}
    run = dataclasses.make_dataclass(
        "Run",
        sorted(fields.items(), key=lambda field: (order.get(field[0], len(order)), field[0])),
        frozen=True,
        namespace={"__doc__": "Length, place and hardware of the run."},
    )
    return run(**values)


def field_texts(kind: type) -> dict[str, str]:
    """Return the docstring below each field of a dataclass, by the field's name."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    texts = {}
    for field, text in itertools.pairwise(cast(ast.ClassDef, definition).body):
        match field, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(
                value=ast.Constant(value=str(x))
            ):
                texts[name] = " ".join(x.split())
    return texts


def split_recipe(arguments: Sequence[str], default: str) -> tuple[str, list[str]]:
    """Return the name of the recipe, which comes first or is the default, and the flags."""
    if arguments and not arguments[0].startswith("-"):
        return arguments[0], list(arguments[1:])
    return default, list(arguments)


def own_recipe(name: str, flags: Sequence[str] = ()) -> str | None:
    """Return the name of a recipe if it is the user's own; of a file, the one that a flag names."""
    from podracer.experiments.recipes import RECIPES

    if name.endswith(".json"):
        return peek_flag(flags, "recipe")
    return None if name in RECIPES else name


def find_recipe(name: str, flags: Sequence[str]) -> tuple[Experiment, list[str]]:
    """Return a recipe's experiment, made with the recipe's own flags, and the other flags.

    It is in the environment that a flag names, under the architecture which that needs, and has
    the torso that a flag names.
    """
    from podracer.experiments import recipes
    from podracer.experiments.torso import TorsoKind, torso_kind, with_torso

    environment = peek_flag(flags, "environment")
    for recipe in (name, own_recipe(name, flags)):
        find_modules_here(recipe, environment)
    remaining = list(flags)
    options = {
        option: value
        for option in recipes.options_of(name)
        if (value := pop_flag(remaining, option)) is not None
    }
    experiment = recipes.find(name, **options)
    if environment is not None and "environment" not in options:
        experiment = experiment.with_environment(environment)
    torso = peek_flag(remaining, "torso")
    if torso in get_args(TorsoKind) and torso_kind(experiment):
        experiment = with_torso(experiment, cast(TorsoKind, torso))
    return experiment, remaining


def options_of(recipe: str) -> list[str]:
    """Return the flags of a recipe itself, such as `--game`."""
    from podracer.experiments import recipes

    return [f"--{name.replace('_', '-')}" for name in recipes.options_of(recipe)]


def find_experiment(arguments: Sequence[str]) -> tuple[str, Experiment, list[str]]:
    """Return the recipe's name, `catch` by default, its experiment and the other flags.

    The experiment is under the architecture and the update rule that flags name.
    """
    recipe, flags = split_recipe(arguments, "catch")
    experiment, flags = find_recipe(recipe, flags)
    if (file := pop_flag(flags, "update-rule")) is not None:
        from podracer.experiments.recipes import with_update_rule

        experiment = with_update_rule(experiment, file)
    return recipe, experiment.with_arch(peek_arch(flags) or experiment.arch), flags


def find_modules_here(recipe: str | None, environment: str | None) -> None:
    """Let Python find modules in the working directory where a recipe or environment names one."""
    from podracer.envs.catalog import imported_module

    if ":" in (recipe or "") or imported_module(environment or ""):
        sys.path.append(os.getcwd())


def pop_flag(arguments: list[str], name: str) -> str | None:
    """Remove every `--name` from the arguments, and return the value of the last, None without."""
    value = peek_flag(arguments, name)
    while found := _find_flag(arguments, name):
        start, count, _ = found
        del arguments[start : start + count]
    return value


def peek_flag(arguments: Sequence[str], name: str) -> str | None:
    """Return the value of `--name` and leave it in the arguments, or None if it has none."""
    found = _find_flag(arguments, name)
    return found[2] if found else None


def _find_flag(arguments: Sequence[str], name: str) -> tuple[int, int, str] | None:
    """Return the place of `--name`, how many arguments it and its value are, and the value.

    Of several it is the last, which the parser of flags takes, too. Hyphens and underscores are the
    same. Returns None where it is not there or has no value.
    """
    for i, argument in reversed(list(enumerate(arguments))):
        flag, joined, value = argument.partition("=")
        if flag.replace("_", "-") != f"--{name}".replace("_", "-"):
            continue
        if joined:
            return i, 1, value
        for following in arguments[i + 1 : i + 2]:
            if not following.startswith("--"):
                return i, 2, following
    return None


def join_values(arguments: Sequence[str], name: str) -> list[str]:
    """Return the arguments with the values of every `--name` behind a single one, at the end.

    Raises `ConfigError` for a `--name` without values.
    """
    values: list[str] = []
    others: list[str] = []
    is_value = False
    for argument in arguments:
        flag, _, joined = argument.partition("=")
        if argument.startswith("--"):
            is_value = flag == f"--{name}"
        if not argument.startswith("--") or not is_value:
            (values if is_value else others).append(argument)
        elif "=" in argument:
            values.append(joined)
    if len(others) == len(arguments):
        return others
    if not all(values) or not values:
        from podracer.types import ConfigError

        raise ConfigError(f"--{name} needs a value: write it behind the flag, or leave it out.")
    return [*others, f"--{name}", *values]


def peek_arch(arguments: Sequence[str]) -> Arch | None:
    """Return the architecture of `--arch`, or None if it names none."""
    value = peek_flag(arguments, "arch")
    return cast(Arch, value) if value in get_args(Arch) else None


def require_in_range(flag: str, value: float, least: float = 1, most: float = 2**31 - 1) -> Any:
    """Return the value of a flag. Raises `ConfigError` if it is too small or too large."""
    from podracer.types import ConfigError

    if not least <= value <= most:
        raise ConfigError(f"{flag} must lie in [{least:,}, {most:,}], but it is {value}.")
    return value


@contextlib.contextmanager
def explained_address(host: str, port: int) -> Iterator[None]:
    """Raise `ConfigError` in place of the `OSError` of a server that cannot listen there."""
    from podracer.types import ConfigError

    try:
        yield
    except OSError as error:
        is_of_host = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
        flag = "--host" if is_of_host else "--port"
        raise ConfigError(
            f"cannot listen at {host}, port {port}: {error.strerror}; take another {flag}."
        ) from error
