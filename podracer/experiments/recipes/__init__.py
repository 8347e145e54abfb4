"""Recipes: named functions, each of which returns a complete `Experiment`.

A module for each family of environments; importing it registers its recipes.
"""

from __future__ import annotations

import difflib
import inspect
from pathlib import Path

from podracer.experiments.experiment import Experiment, experiment_of
from podracer.experiments.recipes import (  # noqa: F401
    atari,
    cartpole,
    catch,
    lpg,
    memory,
    minatar,
    mujoco,
    pendulum,
    trading,
)
from podracer.experiments.recipes.lpg import with_update_rule
from podracer.experiments.recipes.registry import RECIPES
from podracer.types import ConfigError

__all__ = ["RECIPES", "find", "options_of", "with_update_rule"]


def find(name: str, **options: str) -> Experiment:
    """Return the experiment of a recipe.

    A name that ends in .json is a file with an experiment: a run's `config.json`, or a sweep's
    `best.json`. `options` are the recipe's own, see `options_of`.

    Raises `ConfigError` with the nearest name if there is no such recipe.
    """
    if name.endswith(".json"):
        return experiment_of(Path(name))
    if name not in RECIPES:
        matches = difflib.get_close_matches(name, RECIPES, n=1)
        hint = f"did you mean {matches[0]}" if matches else f"choose one of {', '.join(RECIPES)}"
        raise ConfigError(f"There is no recipe {name!r}: {hint}.")
    return RECIPES[name](**options)


def options_of(name: str) -> tuple[str, ...]:
    """Return the names of a recipe's own options, such as the `game` of `atari_impala`."""
    return tuple(inspect.signature(RECIPES[name]).parameters) if name in RECIPES else ()
