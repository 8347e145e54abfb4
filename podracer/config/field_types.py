"""Types of a configuration's fields: whether a value fits, and what would."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
import typing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.agent import Agent
from podracer.agents.common.optimizers import Optimizer, OptimizerBuilder
from podracer.environment import Environment, HostEnvironments
from podracer.errors import ConfigError
from podracer.networks import NetworkBuilder
from podracer.networks.torsos import Torso
from podracer.schedules import Linear

_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "text without control characters",
    types.NoneType: "None",
    Linear: "podracer.Linear(1e-3, 0.0)",
    Agent: "an agent, such as podracer.PPO()",
    Environment: "an environment",
    HostEnvironments: "an environment",
    NetworkBuilder: "an object with a method `build`, such as podracer.TorsoNetwork()",
    OptimizerBuilder: "podracer.Optimizer() or an object of a class of your own, whose `build` "
    "returns an optimizer of optax without its learning rate (docs/how-to.md)",
}


type_hints = functools.cache(typing.get_type_hints)  # a tournament needs them at each round


def check_types(config: Any) -> None:
    """Raise `ConfigError` for a value that its field does not take.

    Objects of the user's own are checked where they are used.
    """
    if type(config).__module__.partition(".")[0] != "podracer":
        return
    hints = type_hints(type(config))
    for field in dataclasses.fields(config):
        value, hint = getattr(config, field.name), hints[field.name]
        is_plain = isinstance(value, bool | int | float | str | tuple | list | dict | None)
        is_plain |= isinstance(value, type) and field.name != "environment"
        if field.name in ("agent", "environment") and not is_plain:  # they have their own checks
            if field.name == "agent" and dataclasses.is_dataclass(value):
                check_types(value)
            continue
        if not fits(value, hint):
            raise ConfigError(refusal(type(config), field.name, value, hint))
        if hint is OptimizerBuilder and not isinstance(value, Optimizer):
            _check_optimizer(type(config).__name__, value)
        elif dataclasses.is_dataclass(value):
            check_types(value)


def fits(value: Any, hint: Any) -> bool:
    """Return whether a value is of an annotated type, as far as configurations need it."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, option) for option in typing.get_args(hint))
    if origin is typing.Literal:
        return value in typing.get_args(hint)
    if origin is tuple:
        return isinstance(value, tuple) and all(
            fits(item, typing.get_args(hint)[0]) for item in value
        )
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint is str:  # no control characters, which a terminal would obey
        return isinstance(value, str) and value.isprintable()
    return hint is Any or (isinstance(value, hint) and not isinstance(value, type))


def refusal(kind: type, name: str, value: Any, hint: Any) -> str:
    """Return the sentence that says what a field cannot be, and what it must be."""
    is_plain = isinstance(value, bool | int | float | str | tuple | list | dict | Linear | None)
    text = repr(value) if is_plain else f"an object of class {type(value).__name__}"
    remedy = f"it must be {_words(hint)}"
    if isinstance(value, type):
        text, remedy = f"the class {value.__name__}", f"write {value.__name__}(...)"
    elif hint is NetworkBuilder and isinstance(value, Torso):
        remedy = f"write podracer.TorsoNetwork(podracer.networks.{type(value).__name__}(...))"
    elif isinstance(value, list) and fits(tuple(value), hint):
        remedy = f"write {tuple(value)}"
    elif isinstance(value, np.generic | jax.Array) and not value.shape and fits(value.item(), hint):
        remedy = "write " + str(value)  # the shortest number of its precision, as in 0.001
    elif isinstance(value, Linear) and fits(0, hint):
        remedy += ", as it follows no schedule"
    return f"{kind.__name__}.{name} cannot be {text}: {remedy}."


def _words(hint: Any) -> str:
    """Return an annotated type in words."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(map(_words, options)))
    if origin is typing.Literal:
        return f"one of {', '.join(map(repr, options))}"
    if origin is tuple:
        plural = {int: "whole numbers", float: "numbers"}.get(options[0], "objects")
        return f"a tuple of {plural}"
    return _WORDS.get(hint) or f"{getattr(hint, '__name__', hint)}(...)"


def _check_optimizer(kind: str, optimizer: Any) -> None:
    """Raise `ConfigError` for an optimizer of the user's own that would climb the loss."""
    name = type(optimizer).__name__
    if jax.tree_util.all_leaves([optimizer]):
        raise ConfigError(
            f"{kind}.optimizer is no tree of numbers: put @podracer.struct above its class {name}."
        )
    params, gradient = jnp.zeros((2, 2)), jnp.ones((2, 2))
    descends = False
    with contextlib.suppress(Exception):  # the agent's check explains them
        method = optimizer.build(1.0)
        state = method.init(params)
        for _ in range(3):  # the first one may be 0, as of a learning rate that warms up
            update, state = method.update(gradient, state, params)
            descends = descends or bool(jnp.all(update < 0))
    if descends:
        raise ConfigError(
            f"{kind}.optimizer: updates of {name} point downhill already, and the agent multiplies "
            "them by -learning_rate: leave out the learning rate (optax.scale_by_adam, not "
            "optax.adam)."
        )
