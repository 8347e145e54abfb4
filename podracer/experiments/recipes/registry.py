"""The registry of recipes: `RECIPES`, and the decorator that fills it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import ParamSpec

from podracer.experiments.experiment import Experiment

P = ParamSpec("P")

RECIPES: dict[str, Callable[..., Experiment]] = {}


def recipe(function: Callable[P, Experiment]) -> Callable[P, Experiment]:
    """Register a function as a recipe; its experiments carry the function's name."""

    @functools.wraps(function)
    def named(*args: P.args, **kwargs: P.kwargs) -> Experiment:
        return dataclasses.replace(function(*args, **kwargs), recipe=function.__name__)

    RECIPES[function.__name__] = named
    return named
