"""The experiment of a recipe, as the name, the settings and the flags of a command make it."""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, cast, get_args, get_type_hints

import tyro

from podracer import recipes
from podracer.cli.arguments import Arch, leading_name, read_value, take_flags
from podracer.cli.flags import Field, Group, fields_of, group_of, is_part, parse_parts
from podracer.cli.sentences import no_setting
from podracer.config.experiment import Experiment
from podracer.config.torso import TorsoKind, torso_kind, with_torso
from podracer.envs.catalog import imported_module
from podracer.errors import ConfigError
from podracer.fields import NO_FLAG
from podracer.recipes import Size

# The flags of an experiment in the order of the help page: what matters first comes first.
RUN_FLAGS = (
    "frames", "seed", "run_dir", "arch", "devices", "environment", "evaluations",
    "evaluation_episodes", "evaluation_policy", "evaluation_epsilon", "fixed_evaluation",
    "target_return", "max_seconds", "save_seconds", "records", "keep_best", "stall_seconds", "size",
    "torso",
)  # fmt: skip
_TORSO = (
    "Layers of the network before its outputs: fully connected ones (mlp) or convolutions (cnn, "
    "resnet), for images [H, W, C]. Their own flags are shown with this one before --help."
)
_SIZE = (
    "Size of the recipe: environments, batches and what follows from them, for a laptop or for one "
    "accelerator. By default train, plan and compile take the accelerator's on an accelerator, "
    "unless --num-envs or few --frames are given; some recipes have one size."
)
_SETTINGS = (
    "Fields by their names in Python, such as agent.learning_rate=1e-3. They stand before the "
    "flags."
)
_SETTINGS_KIND = Annotated[
    tuple[str, ...],
    tyro.conf.Positional,
    tyro.conf.arg(metavar="FIELD=VALUE ...", help_behavior_hint=""),
]


def own_recipe(name: str, flags: Sequence[str] = ()) -> str | None:
    """Return the name of a recipe if it is the user's own; of a file, the one that a flag names."""
    if name.endswith(".json"):
        return take_flags(flags, "recipe")[0].get("recipe")
    return None if name in recipes.RECIPES else name


def find_recipe(name: str, flags: Sequence[str]) -> tuple[Experiment, list[str]]:
    """Return a recipe's experiment, made with the recipe's own flags, and the other flags.

    It has the size, the environment with the architecture which that needs, and the torso that
    flags name.
    """
    flags = _with_environment_flag(flags)
    environment = take_flags(flags, "environment")[0].get("environment")
    for recipe in (name, own_recipe(name, flags)):
        find_modules_here(recipe, environment)
    options, remaining = take_flags(flags, *recipes.options_of(name))
    experiment = recipes.find(name, **options)
    values = take_flags(remaining, "size", "torso")[0]
    size, torso = values.get("size"), values.get("torso")
    if size in get_args(Size):
        experiment = recipes.with_size(experiment, name, cast(Size, size))
    if "environment" not in options and environment is not None:
        experiment = experiment.with_environment(environment)
    if torso in get_args(TorsoKind) and torso_kind(experiment):
        experiment = with_torso(experiment, cast(TorsoKind, torso))
    return experiment, remaining


def _with_environment_flag(flags: Sequence[str]) -> list[str]:
    """Return arguments with a flag in the place of the setting `environment=NAME`.

    Other settings and flags belong to this environment.
    """
    return [f"--{x}" if x.startswith("environment=") else x for x in flags]


def find_experiment(arguments: Sequence[str]) -> tuple[str, Experiment, list[str]]:
    """Return the recipe's name, `catch` by default, its experiment and the other flags.

    The experiment is under the architecture and the update rule that flags name.
    """
    recipe, flags = leading_name(arguments, "catch")
    experiment, flags = find_recipe(recipe, flags)
    rules, flags = take_flags(flags, "update_rule")
    if rules:
        experiment = recipes.with_update_rule(experiment, rules["update_rule"])
    arch = take_flags(flags, "arch")[0].get("arch", "")
    if arch in get_args(Arch):
        experiment = experiment.with_arch(arch)
    return recipe, experiment, flags


def with_size_for(platform: str, arguments: Sequence[str], experiment: Experiment) -> Sequence[str]:
    """Return the arguments with the size for devices of a platform, or as they are."""
    recipe, flags = leading_name(arguments, "catch")
    if platform == "cpu" or not recipes.accelerator_changes(recipe):
        return arguments
    values, remaining = take_flags(_with_environment_flag(flags), "size", "environment", "arch")
    default = find_recipe(recipe, remaining)[0]
    size = recipes.fitting_size(recipe, platform, experiment, default)
    return arguments if "size" in values or size == "laptop" else [*arguments, "--size", size]


def find_modules_here(recipe: str | None, environment: str | None) -> None:
    """Let Python find modules in the working directory where a recipe or environment names one."""
    if ":" in (recipe or "") or imported_module(environment or ""):
        sys.path.append(os.getcwd())


def parse_experiment(
    command: str,
    arguments: Sequence[str],
    experiment: Experiment,
    options: Any,
    extra: Mapping[str, Any] | None = None,
    description: str = "",
) -> tuple[Any, Experiment, dict[str, Any]]:
    """Parse the flags of a command that trains: its own `options` and those of an experiment.

    The help page has a group for the run, one for the agent and for each of its parts, one for the
    driver, and one for each value of `extra`. The driver's is named by its architecture. Returns
    `options`, `experiment` and `extra` with the values of the flags.
    """
    parts = {"agent": experiment.agent, experiment.arch: experiment.driver, **(extra or {})}
    run_group = Group("Length, place and hardware of the run.", _run_fields(options, experiment))
    groups = {"run": run_group} | {title: group_of(part) for title, part in parts.items()}
    values = parse_parts(groups, command, arguments, description)
    run = values.pop("run")
    for name in ("size", "torso"):  # `find_recipe` has read them
        run.pop(name, None)
    settings = run.pop("settings")
    option_values = {field.name: run.pop(field.name) for field in dataclasses.fields(options)}
    parts = {title: dataclasses.replace(part, **values[title]) for title, part in parts.items()}
    agent, driver = parts.pop("agent"), parts.pop(experiment.arch)
    default = experiment
    experiment = dataclasses.replace(experiment, agent=agent, driver=driver, **run)
    for path in (setting.partition("=")[0] for setting in settings):
        if _value_at(experiment, path) != _value_at(default, path):
            raise ConfigError(f"{path} is given twice, as a setting and as a flag: give it once.")
    experiment = functools.reduce(with_setting, settings, experiment)
    return dataclasses.replace(options, **option_values), experiment, parts


def _run_fields(options: Any, experiment: Experiment) -> list[Field]:
    """Return the fields of both, in the order of the help page, but the agent and the driver.

    An environment that is an object has no flag, a network without a torso none for its kind.
    """
    fields = [
        field
        for source in (options, experiment)
        for field in fields_of(source)
        if not (source is experiment and field.name in ("agent", "driver"))
    ]
    by_name = {field.name: field for field in fields}
    if isinstance(experiment.environment, str):
        by_name["environment"] = by_name["environment"]._replace(hint=str)
    else:
        del by_name["environment"]
    by_name["size"] = Field("size", Size | None, None, _SIZE)
    if torso := torso_kind(experiment):
        by_name["torso"] = Field("torso", TorsoKind, torso, _TORSO)
    order = {name: place for place, name in enumerate(RUN_FLAGS)}
    fields = sorted(by_name.values(), key=lambda x: (order.get(x.name, len(order)), x.name))
    return [*fields, Field("settings", _SETTINGS_KIND, (), _SETTINGS)]


def _value_at(config: Any, path: str) -> Any:
    """Return the field that a path such as `agent.learning_rate` leads to, or None."""
    return functools.reduce(lambda part, name: getattr(part, name, None), path.split("."), config)


def with_setting(experiment: Experiment, setting: str) -> Experiment:
    """Return an experiment with the field that `PATH=VALUE` names, as Python's dictionaries do.

    Raises `ConfigError` for a name that leads to no field.
    """
    path, equals, text = setting.partition("=")
    *parts, name = path.split(".")
    if not equals and setting in recipes.RECIPES:
        raise ConfigError(f"{setting!r} is a recipe: write its name before the flags.")
    if not equals:
        raise ConfigError(no_setting(setting))
    if path == "environment":
        return experiment.with_environment(text)
    part = _value_at(experiment, ".".join(parts)) if parts else experiment
    if is_part(getattr(part, name, None)):
        raise ConfigError(f"{path} has fields of its own: write {path}.FIELD=VALUE.")
    hints = get_type_hints(type(part), include_extras=True)
    if NO_FLAG in getattr(hints.get(name), "__metadata__", ()):
        raise ConfigError(f"{path} is no setting of a command: it is one of Python, or of a sweep.")
    value: Any = read_value(hints[name], path, text) if name in hints else text
    for key in reversed((*parts, name)):
        value = {key: value}
    return experiment.with_fields(value)
