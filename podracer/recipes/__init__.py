"""Recipes: named functions, each of which returns a complete `Experiment`.

A module for each family of environments, whose public functions are the recipes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast, get_args, get_type_hints

from podracer.checks.errors import describe_error
from podracer.config.experiment import Experiment
from podracer.config.serialization import read_config, read_experiment
from podracer.envs.catalog import ENVIRONMENTS, full_name_of, has_name
from podracer.errors import ConfigError, PodracerError
from podracer.io.entry_points import installed, package_of
from podracer.io.paths import user_path
from podracer.names import nearest
from podracer.recipes import atari, cartpole, catch, memory, mujoco, pendulum, rules
from podracer.recipes.sizes import Size, accelerator
from podracer.recipes.update_rules import with_update_rule

__all__ = [
    "RECIPES", "Size", "accelerator", "accelerator_changes", "find", "lender", "options_of",
    "with_size", "with_update_rule",
]  # fmt: skip

_FAMILIES = (atari, cartpole, catch, rules, memory, mujoco, pendulum)
RECIPES: dict[str, Callable[..., Experiment]] = {
    name: function
    for family in _FAMILIES
    for name, function in vars(family).items()
    if getattr(function, "__module__", "") == family.__name__ and not name.startswith("_")
}

SUFFIX = "_accelerator"  # ends the name of an experiment at that size


def find(name: str, **options: Any) -> Experiment:
    """Return the experiment of a recipe.

    The name is a recipe of the library or of an installed package (an entry point of the group
    `podracer.recipes`), or it is `MODULE:FUNCTION`, which is imported. One that ends in .json
    is a file with an experiment: a run's `config.json`, or a sweep's `best.json`. `options` are the
    recipe's own, see `options_of`; the `recipe` of a file may be an experiment, too.

    Raises `ConfigError` with the nearest name if there is no such recipe.
    """
    if name.endswith(".json"):
        return _of_file(user_path(name), **options)
    function = _function(name)
    for key, parameter in _parameters(name).items():
        if parameter.default is parameter.empty and key not in options:
            raise ConfigError(
                f"{name} needs a value of {key!r}, which has no default: name a function that "
                f"gives it one, or add --{key} to `podracer train`, `sweep` or `eval`."
            )
    try:
        experiment = function(**options)
    except PodracerError:
        raise
    except (Exception, SystemExit) as error:  # its code 0 would count as success
        raise ConfigError(f"the recipe {name} raised {describe_error(error)}") from error
    name = name.rpartition(":")[2]
    if not isinstance(experiment, Experiment):
        kind = type(experiment).__name__
        raise ConfigError(f"the recipe {name} must return an Experiment, not {kind}.")
    return dataclasses.replace(experiment, recipe=name)


def lender(recipe: Experiment | str | None, recorded: Any) -> Experiment | None:
    """Return the experiment that lends a file its classes and objects, None if there is none.

    It is the `recipe`, or the one of an installed package that has the name in the file, unless it
    needs options, which no file has.
    """
    name = str(recorded).removesuffix(SUFFIX)
    if recipe is None and name in installed("recipes"):
        needs_options = any(x.default is x.empty for x in _parameters(name).values())
        recipe = None if needs_options else name
    return find(recipe) if isinstance(recipe, str) else recipe


def options_of(name: str) -> dict[str, Any]:
    """Return the types of a recipe's own options by name, such as the `game` of `atari_impala`.

    A file has the options `environment`, which replaces its own, and `recipe`, which names a recipe
    whose own classes the file may use.
    """
    if name.endswith(".json"):
        return {"environment": str, "recipe": str}
    hints = get_type_hints(_function(name))
    return {key: hints.get(key, str) for key in _parameters(name)}


def accelerator_changes(name: str) -> Mapping[str, Any]:
    """Return the fields that differ at a recipe's accelerator size, {} where it has one size."""
    return {} if name.endswith(".json") else getattr(_function(name), "accelerator", {})


def with_size(experiment: Experiment, name: str, size: Size) -> Experiment:
    """Return the experiment of a recipe at a size, which its name shows from then on.

    Raises `ConfigError` for another word, and where the recipe has one size, as a file has.
    """
    if size not in get_args(Size):
        raise ConfigError(f"`size` is {' or '.join(get_args(Size))}, not {size!r}.")
    if size == "laptop" and not name.endswith(".json"):
        return experiment
    if not (changes := accelerator_changes(name)):
        raise ConfigError(f"{name} has one size: leave `size` out, or set `driver.num_envs`.")
    sized = experiment.with_fields(changes)
    return dataclasses.replace(sized, recipe=f"{experiment.recipe}{SUFFIX}")


def _parameters(name: str) -> dict[str, inspect.Parameter]:
    """Return the parameters of a recipe's function that have a name of their own."""
    function = _function(name)
    with contextlib.suppress(ValueError):  # a class or a function in C has none
        parameters = inspect.signature(function).parameters
        if not any(x.kind is x.POSITIONAL_ONLY for x in parameters.values()):
            variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
            return {key: x for key, x in parameters.items() if x.kind not in variadic}
    raise ConfigError(f"{name} is no recipe: name a function that returns an Experiment.")


def _of_file(
    path: Path, environment: str | None = None, recipe: Experiment | str | None = None
) -> Experiment:
    recorded = read_config(path)["experiment"]
    experiment = read_experiment(path, lender(recipe, recorded.get("recipe")), environment)
    if environment is None:
        return experiment
    experiment = dataclasses.replace(experiment, environment=recorded["environment"])
    return experiment.with_environment(environment)


def _function(name: str) -> Callable[..., Experiment]:
    if name in RECIPES:
        return RECIPES[name]
    if name in (of_packages := installed("recipes")):
        return of_packages[name].load()
    if ":" in name or "." in name:
        return _imported(name)
    _refuse_environment(name)
    if hint := package_of(name):
        raise ConfigError(hint)
    if name and Path(name, "config.json").exists():
        raise ConfigError(f"{name} is a run: `podracer resume {name}` goes on with it.")
    is_package = name and Path(name, "recipes.py").exists()
    example = f", such as {name}.recipes:{name}" if is_package else ""
    raise ConfigError(
        f"There is no recipe {name!r}: {_suggestion(name, [*RECIPES, *of_packages])} One of your "
        f"own is MODULE:FUNCTION{example}."
    )


def _suggestion(name: str, recipes: Sequence[str]) -> str:
    """Return the end of an error message about an unknown recipe, such as ENVIRONMENT_AGENT."""
    name = name.lower()
    environment, _, agent = name.rpartition("_")
    of_agent = [x for x in recipes if x == agent or x.partition("_")[2] == agent]
    if not of_agent:  # scattered letters in common are no likeness, but for the first one
        candidates = difflib.get_close_matches(name, recipes, n=len(recipes), cutoff=0.6)
        candidates += [x for x in recipes if x.startswith(name[:1])]
        return nearest(name, candidates, "`podracer list recipes` names them.")
    environments = [x.partition("_")[0] for x in of_agent]
    if close := difflib.get_close_matches(environment, environments, n=1, cutoff=0.6):
        return f"did you mean {of_agent[environments.index(close[0])]}?"
    recipe = f"cartpole_{agent}" if f"cartpole_{agent}" in of_agent else of_agent[0]
    if not environment:
        return f"did you mean {recipe}?"
    if environment in ENVIRONMENTS:
        return f'did you mean {recipe} with `environment="{environment}"`?'
    place = f"{environment}:NAME" if has_name(environment) else "NAME"
    return f'take {recipe} with `environment="{place}"`; `podracer list environments` names them.'


def _refuse_environment(name: str) -> None:
    """Raise `ConfigError` where the name is not a recipe's but an environment's."""
    if has_name(full_name := full_name_of(name)):
        raise ConfigError(
            f"{name!r} is an environment and no recipe: train a recipe in it, such as cartpole_ppo "
            f'with `environment="{full_name}"`.'
        )


def _imported(name: str) -> Callable[..., Experiment]:
    """Return the recipe that `MODULE:FUNCTION` names."""
    module, _, attribute = name.partition(":")
    if module.endswith(".py"):
        recipe = f"{Path(module).stem}:{attribute or 'FUNCTION'}"
        raise ConfigError(f"{module!r} is a file: in its folder name the module, {recipe}.")
    if not all(part.isidentifier() for part in [*module.split("."), attribute]):
        _refuse_environment(name)
        raise ConfigError(f"There is no recipe {name!r}: name your own as MODULE:FUNCTION.")
    try:
        function = getattr(importlib.import_module(module), attribute, None)
    except (Exception, SystemExit) as error:  # its code 0 would count as success
        if isinstance(error, PodracerError):
            raise
        missing = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
        if missing is None or not f"{module}.".startswith(f"{missing}."):
            raise ConfigError(f"{module} cannot be imported: {describe_error(error)}") from error
        _refuse_environment(name)
        raise ConfigError(
            f"There is no module {missing!r}: install it, or run in the folder that holds it."
        ) from error
    if not callable(function):
        raise ConfigError(f"There is no function {attribute!r} in the module {module}.")
    return cast(Callable[..., Experiment], function)
