"""Types of a configuration's fields, at any depth."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from podracer.agents.common.optimizers import Optimizer, OptimizerBuilder
from podracer.arguments import fits, refusal, type_hints
from podracer.errors import ConfigError


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
            raise ConfigError(refusal(f"{type(config).__name__}.{field.name}", value, hint))
        if hint is OptimizerBuilder and not isinstance(value, Optimizer):
            _check_optimizer(type(config).__name__, value)
        elif dataclasses.is_dataclass(value):
            check_types(value)


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
