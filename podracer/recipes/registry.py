"""The registry of recipes: `RECIPES`, and the decorator that fills it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import ParamSpec

from podracer.config.experiment import Experiment
from podracer.errors import ConfigError

P = ParamSpec("P")

RECIPES: dict[str, Callable[..., Experiment]] = {}


def recipe(function: Callable[P, Experiment]) -> Callable[P, Experiment]:
    """Register a function as a recipe; its experiments carry the function's name."""
    RECIPES[function.__name__] = named = with_name(function, function.__name__)
    return named


def with_name(function: Callable[P, Experiment], name: str) -> Callable[P, Experiment]:
    """Return the function with the name of the recipe in the experiments that it returns."""

    @functools.wraps(function)
    def named(*args: P.args, **kwargs: P.kwargs) -> Experiment:
        experiment = function(*args, **kwargs)
        if not isinstance(experiment, Experiment):
            kind = type(experiment).__name__
            raise ConfigError(f"the recipe {name} must return an Experiment, not {kind}.")
        return dataclasses.replace(experiment, recipe=name)

    return named
