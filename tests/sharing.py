"""Programs of equal agents, environments and settings are traced once in a process of tests.

Most of a short run's time goes into tracing and lowering what an earlier test has run already: each
run makes functions of its own, which JAX cannot know to be equal. Here the package's functions that
make programs return what they returned for equal arguments. A test that replaces a part of the
package by `monkeypatch` gets programs of its own.
"""

from __future__ import annotations

import functools
import importlib
import types
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import jax

MAX_PROGRAMS = 48  # of each function
MAKERS = (  # a module before those that import its function
    ("podracer.drivers.common", "abstract_state"),
    ("podracer.drivers.anakin", "make_chunk"),
    ("podracer.drivers.anakin", "check_agent"),  # as the drivers call them, not as tests do
    ("podracer.drivers.anakin", "check_environment"),
    ("podracer.drivers.population", "make_chunk"),
    ("podracer.drivers.sebulba.update", "make_update"),
    ("podracer.drivers.sebulba.driver", "check_agent"),
)
# Settings of JAX that programs depend on.
SETTINGS = ("jax_disable_most_optimizations", "jax_enable_x64", "jax_numpy_rank_promotion")

is_shared = True


def install() -> None:
    for module_name, name in MAKERS:
        module = importlib.import_module(module_name)
        setattr(module, name, shared(getattr(module, name)))
    jax.jit = _shared_jit(jax.jit)


def shared(make: Callable[..., Any]) -> Callable[..., Any]:
    """A function that returns what it returned for equal arguments, where these have hashes."""
    known: OrderedDict[Any, Any] = OrderedDict()

    @functools.wraps(make)
    def remember(*args: Any, **settings: Any) -> Any:
        key = _key(args, settings) if is_shared else None
        if key is None:
            return make(*args, **settings)
        if key not in known:
            known[key] = make(*args, **settings)
            if len(known) > MAX_PROGRAMS:
                known.popitem(last=False)
        return known[key]

    return remember


def _shared_jit(jit: Callable[..., Any]) -> Callable[..., Any]:
    """`jax.jit` that knows partial functions and methods by their parts."""
    jit_of = shared(lambda parts, function, jit_settings: jit(function.tree, **jit_settings.tree))

    @functools.wraps(jit)
    def remember(*args: Any, **settings: Any) -> Any:
        function = args[0] if len(args) == 1 else None
        if type(function) is functools.partial:
            parts = (function.func, function.args, _Tree(function.keywords))
        elif isinstance(function, types.MethodType) and _is_value(function.__self__):
            parts = (function.__func__, function.__self__)
        else:
            return jit(*args, **settings)
        return jit_of(parts, _Ignored(function), _Tree(settings))

    return remember


class _Ignored:
    """What is no part of the key, as something else in it stands for it."""

    def __init__(self, tree: Any) -> None:
        self.tree = tree

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Ignored)

    def __hash__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return ""


class _Tree:
    """Keyword arguments, which compare by their leaves."""

    def __init__(self, tree: dict[str, Any]) -> None:
        self.tree = tree
        leaves, structure = jax.tree.flatten(tree)
        self._parts = (tuple(leaves), structure)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Tree) and self._parts == other._parts

    def __hash__(self) -> int:
        return hash(self._parts)

    def __repr__(self) -> str:
        return repr(self._parts[0])


def _is_value(x: Any) -> bool:
    """Whether something is equal to others of the same content, and not to itself alone."""
    return type(x).__hash__ not in (None, object.__hash__)


def _key(args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
    """None where an argument has no hash; 1, 1.0 and True are equal, but their texts are not."""
    context = tuple(jax.config.values[name] for name in SETTINGS)
    key = (args, tuple(sorted(settings.items())), context)
    try:
        hash(key)
    except TypeError:
        return None
    return (*key, repr(args))
