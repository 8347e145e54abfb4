"""The experiment of a recipe, as the name and the flags of a command make it."""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from typing import TypeVar

from podracer import recipes
from podracer.cli.arguments import leading_name, read_parts, take_values
from podracer.config.experiment import Experiment
from podracer.envs.catalog import has_name, imported_module
from podracer.errors import ConfigError
from podracer.recipes import Size

T = TypeVar("T")
_IS_RECIPE = "{!r} is a recipe: write its name before the flags."


@dataclasses.dataclass(frozen=True)
class _Sizes:
    size: Size = "laptop"
    """Size of the recipe: environments, batches and what follows from them, for a laptop or for one
    accelerator; some recipes have one size."""


def own_recipe(name: str, flags: Sequence[str] = ()) -> str | None:
    """Return the recipe that later commands need, MODULE:FUNCTION; for a file, that of a flag."""
    if name.endswith(".json"):
        return take_values(flags, {"recipe": str})[0].get("recipe")
    return name if ":" in name else None


def recipe_flag(name: str | None) -> str:
    """Return the flag by which a command gets one's own recipe, "" without one."""
    return f" --recipe {name}" if name else ""


def find_recipe(name: str, flags: Sequence[str]) -> tuple[Experiment, list[str]]:
    """Return a recipe's experiment, made with the recipe's own flags, and the other flags.

    It has the size, and the environment with the architecture which that needs, of the flags.
    """
    find_modules_here(name, own_recipe(name, flags))
    options, remaining = take_values(flags, recipes.options_of(name))
    values = take_values(remaining, {"size": Size, "environment": str, "recipe": str})[0]
    title = values.get("recipe", name)
    if title != name and (":" in title or title in recipes.RECIPES):
        raise ConfigError(_IS_RECIPE.format(title))
    find_modules_here((values | options).get("environment"))
    experiment = recipes.find(name, **options)
    if "size" in values:
        experiment = recipes.with_size(experiment, name, values["size"])
    if "environment" in values:
        experiment = experiment.with_environment(values["environment"])
    return experiment, remaining


def find_experiment(arguments: Sequence[str]) -> tuple[str, Experiment, list[str]]:
    """Return the recipe's name, `catch` by default, its experiment and the other flags.

    The experiment is under the update rule that a flag names.
    """
    recipe, flags = leading_name(arguments, "catch")
    experiment, flags = find_recipe(recipe, flags)
    rules, flags = take_values(flags, {"update_rule": str})
    if rules:
        experiment = recipes.with_update_rule(experiment, rules["update_rule"])
    return recipe, experiment, flags


def find_modules_here(*names: str | None) -> None:
    """Let Python find modules in the working directory if a recipe or environment names one."""
    for name in filter(None, names):
        if imported_module(name) or (":" in name and not has_name(name)):
            sys.path.append(os.getcwd())


def parse_experiment(
    command: str,
    arguments: Sequence[str],
    experiment: Experiment,
    options: T,
    description: str = "",
) -> tuple[T, Experiment]:
    """Return a command's own `options` and an experiment with the values of flags."""

    def explain(name: str) -> str:
        return _IS_RECIPE.format(name) if name in recipes.RECIPES else ""

    parts = (experiment, options, _Sizes())  # `find_recipe` has read the size
    experiment, options, _ = read_parts(parts, command, arguments, description, explain)
    return options, experiment
