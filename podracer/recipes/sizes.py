"""Sizes of a recipe: its own, for a laptop, and one that fills an accelerator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

Size = Literal["laptop", "accelerator"]
Recipe = TypeVar("Recipe", bound=Callable[..., Any])


def accelerator(**changes: Any) -> Callable[[Recipe], Recipe]:
    """Declare a recipe's size for one accelerator: fields as in `Experiment.with_fields`."""

    def declare(recipe: Recipe) -> Recipe:
        vars(recipe)["accelerator"] = changes
        return recipe

    return declare
