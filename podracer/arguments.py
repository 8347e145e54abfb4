"""Arguments of public functions and classes: what does not fit is refused in a sentence."""

from __future__ import annotations

import collections.abc
import contextlib
import dataclasses
import functools
import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from podracer.errors import ConfigError
from podracer.names import nearest

T = TypeVar("T", bound=Callable[..., Any])
Named = TypeVar("Named")

# Classes by their names, as they stand above this file.
_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "True or False",
    "str": "text without control characters",
    "NoneType": "None",
    "Path": "the path of a directory or a file",
    "Linear": "podracer.Linear(1e-3, 0.0)",
    "Context": "podracer.Context(rollout_length=16)",
    "Orders": "podracer.drivers.progress.Orders(10) for 10 updates",
    "TrainState": "the state of a run, such as driver.init(jax.random.key(0))",
    "Agent": "an agent that was built, such as podracer.PPO().build(spec)",
    "Settings": "an agent, such as podracer.PPO()",
    "LearnerState": "the state of a learner, as podracer.load returns it after the agent",
    "Environment": "an environment",
    "HostEnvironments": "an environment",
    "EnvironmentSpec": "the `spec` of an environment",
    "Experiment": 'the name of a recipe, or podracer.Experiment(environment="cartpole", '
    "agent=podracer.PPO(), driver=podracer.AnakinConfig(), frames=100_000)",
    "NetworkBuilder": "an object with a method `build`, such as podracer.TorsoNetwork()",
    "OptimizerBuilder": "podracer.Optimizer() or an object of a class of your own, whose `build` "
    "returns an optimizer of optax without its learning rate (docs/add-an-agent.md)",
}
_NAMED = {"Experiment", "Path"}  # a text is the name of one
_CHECKED_LATER = {"Environment", "HostEnvironments"}  # but for plain values and classes

type_hints = functools.cache(typing.get_type_hints)  # a tournament needs them at each round


def typed(target: T) -> T:
    """Make a function, or a dataclass, raise `ConfigError` for names and types that do not fit."""
    if not isinstance(target, type):
        return typing.cast(T, _checked(target, target))
    target.__init__ = _checked(target.__init__, target)
    return typing.cast(T, target)


def named(cls: type[Named], advice: str = "") -> type[Named]:
    """Make a dataclass raise `ConfigError` for unknown names, with the nearest one.

    Where none is near it says the `advice`, by default all names. Values are not looked at.
    """
    init: Callable[..., None] = cls.__init__
    signature = inspect.signature(init)

    @functools.wraps(init)
    def checked(*args: Any, **kwargs: Any) -> None:
        try:
            init(*args, **kwargs)
        except TypeError:
            _bind(signature, cls, args, kwargs, advice)
            raise

    cls.__init__ = checked
    return cls


def unknown_argument(error: TypeError, function: Callable[..., Any]) -> str:
    """Return what to write in the place of a name that a function does not take, else ""."""
    match = re.search("unexpected keyword argument '(.+)'", str(error))
    if match is None:
        return ""
    if isinstance(function, functools.partial) and function.keywords:  # perhaps that name
        function = function.func
    with contextlib.suppress(TypeError, ValueError):  # a function in C may have no signature
        parameters = inspect.signature(function).parameters.values()
        names = [x.name for x in parameters if x.kind is not inspect.Parameter.VAR_KEYWORD]
        return f": {nearest(match[1], names)}" if names else ""
    return ""


def _checked(function: Any, owner: Any) -> Any:
    """Return a function that looks at its arguments first; `owner` has their types."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        bound, hints = _bind(signature, owner, args, kwargs), dict[str, Any]()
        with contextlib.suppress(NameError):  # a name that is imported for type checkers alone
            hints = type_hints(owner)
        for name, value in bound.arguments.items():
            hint = hints.get(name, Any)
            kind = signature.parameters[name].kind
            is_own = kind not in (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
            if is_own and not fits(to_python(value), hint):
                joint = "." if isinstance(owner, type) else ": "
                raise ConfigError(refusal(f"{_title(owner)}{joint}{name}", value, hint))
        try:
            return function(*args, **kwargs)
        except ConfigError as error:  # its sentence says all: nobody need read the library's lines
            if jax.config.jax_traceback_filtering == "off":  # pyright: ignore[reportAttributeAccessIssue]
                raise
            raise error.with_traceback(None) from error.__cause__

    return checked


def _bind(
    signature: inspect.Signature,
    owner: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    advice: str = "",
) -> inspect.BoundArguments:
    """Return arguments by their names; raise `ConfigError` where one is unknown or missing."""
    try:
        return signature.bind(*args, **kwargs)
    except TypeError as error:
        names = [name for name in signature.parameters if name != "self"]
        noun = "field" if isinstance(owner, type) else "argument"
        problem = f"{_title(owner)}: {error}; it takes {', '.join(names)}."
        takes_any = any(x.kind is x.VAR_KEYWORD for x in signature.parameters.values())
        if not takes_any and (wrong := next((x for x in kwargs if x not in names), "")):
            problem = f"{_title(owner)} has no {noun} {wrong!r}: {nearest(wrong, names, advice)}"
        raise ConfigError(problem) from None


def _title(owner: Any) -> str:
    return owner.__qualname__.removesuffix(".__init__")


@functools.cache
def _static_hints(kind: type) -> dict[str, Any]:
    hints, fields = type_hints(kind), dataclasses.fields(kind)
    return {x.name: hints[x.name] for x in fields if x.metadata.get("static") and x.name in hints}


def check_static(kind: type, values: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for values of static fields, which are no leaves, of other types."""
    if dataclasses.is_dataclass(kind):
        for name, hint in _static_hints(kind).items():
            if name in values and not fits(values[name], hint):
                raise ConfigError(refusal(f"{kind.__name__}.{name}", values[name], hint))


def to_python(value: Any) -> Any:
    """Return a number of NumPy, alone or in a tuple, as one of Python, which files can hold."""
    if type(value) is tuple:
        return tuple(map(to_python, value))
    return value.item() if isinstance(value, np.generic) else value


def fits(value: Any, hint: Any) -> bool:
    """Return whether a value is of an annotated type, as far as configurations need it."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, option) for option in options)
    if origin is typing.Literal:
        return value in options
    if origin is tuple:
        return isinstance(value, tuple) and all(fits(item, options[0]) for item in value)
    if origin is not None:  # a list, a mapping, a function
        return isinstance(value, origin) and not isinstance(value, str)
    if hint in (int, float):
        return isinstance(value, int | hint) and not isinstance(value, bool)
    if hint is str:  # no control characters, which a terminal would obey
        return isinstance(value, str) and value.isprintable()
    if _name(hint) in _CHECKED_LATER:
        return not _is_plain(value) and not isinstance(value, type)
    if hint is Any or not isinstance(hint, type):
        return True
    return isinstance(value, hint) and not isinstance(value, type)


def refusal(place: str, value: Any, hint: Any) -> str:
    """Return the sentence that says what a field or an argument cannot be, and what it must be."""
    kind, is_schedule = type(value), type(value).__name__ == "Linear"
    text = repr(value) if _is_plain(value) or is_schedule else f"an object of class {kind.__name__}"
    remedy = f"it must be {_words(hint)}"
    plain = _as_plain(value)
    if isinstance(value, type):
        text = f"the class {value.__name__}"
        remedy = f"write {value.__name__}(...)" if _may_make(value, hint) else remedy
    elif _name(hint) == "NetworkBuilder" and kind.__module__.startswith("podracer.networks."):
        remedy = f"write podracer.TorsoNetwork(podracer.networks.{kind.__name__}(...))"
    elif plain is not value and fits(plain, hint):  # a scalar by the digits of its precision
        remedy = f"write {plain if isinstance(plain, tuple) else str(value)}"
    elif isinstance(value, float) and value.is_integer() and fits(int(value), hint):
        remedy = f"write {int(value)}"
    elif fits((value,), hint) and (
        isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
    ):
        remedy = f"write {(value,)}"
    elif is_schedule and fits(0, hint):
        remedy += ", as it follows no schedule"
    return f"{place} cannot be {text}: {remedy}."


def _name(hint: Any) -> str:
    return getattr(hint, "__name__", str(hint))


def _is_plain(value: Any) -> bool:
    return isinstance(value, bool | int | float | str | tuple | list | dict | None)


def _as_plain(value: Any) -> Any:
    """Return a list or an array as a tuple or a number; anything else as it is."""
    if isinstance(value, list):
        return tuple(value)
    is_array = isinstance(value, np.generic | np.ndarray | jax.Array)
    if not is_array or jnp.issubdtype(value.dtype, jax.dtypes.prng_key) or value.ndim > 1:
        return value
    return tuple(value.tolist()) if value.ndim else value.item()


def _may_make(kind: type, hint: Any) -> bool:
    """Return whether an instance of a class may be of an annotated type."""
    if options := typing.get_args(hint):
        return any(_may_make(kind, option) for option in options)
    with contextlib.suppress(TypeError):  # a protocol with properties
        return issubclass(kind, hint)
    return True


def _words(hint: Any) -> str:
    """Return an annotated type in words."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        is_named = not _NAMED.isdisjoint(map(_name, options))
        texts = [_words(option) for option in options if not (is_named and option is str)]
        return " or ".join(dict.fromkeys(texts))
    if origin is typing.Literal:
        return f"one of {', '.join(map(repr, options))}"
    if origin is tuple:
        plural = {int: "whole numbers", float: "numbers", str: "names"}.get(options[0], "objects")
        return f"a tuple of {plural}"
    if origin is not None:
        return "a function" if origin is collections.abc.Callable else "a list"
    return _WORDS.get(_name(hint)) or f"{_name(hint)}(...)"
