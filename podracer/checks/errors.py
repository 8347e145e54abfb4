"""One line on what a user's code raised while it was traced."""

from __future__ import annotations

import gc
import sys
import traceback
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.tree_util import all_leaves, keystr, tree_leaves_with_path

from podracer.errors import ConfigError
from podracer.types import leaves_by_path

ARRAYS = (bool, int, float, np.generic, np.ndarray, jax.Array)  # leaves that JAX takes
_NO_NUMBER = "Python needs a number and got a traced value: take jax.numpy or podracer.static"
_HINTS = {  # by a part of an error's type and text
    "TracerBoolConversionError": (
        "a Python `if` or `while` depends on a traced value: take jnp.where or podracer.static"
    ),
    "TracerArrayConversionError": "NumPy got a traced value: take jax.numpy",
    "ConcretizationTypeError": _NO_NUMBER,
    "TracerIntegerConversionError": _NO_NUMBER,
    "Shapes must be 1D": _NO_NUMBER,
    "Leaked trace": "what the call computes is kept beyond it, as on `self`: keep it in the state",
}
_LIBRARIES = sys.stdlib_module_names | {
    "podracer", "jax", "jaxlib", "jaxtyping", "beartype", "numpy",
}  # fmt: skip
_CHOSEN = {"optax", "equinox"}


def describe_error(error: BaseException) -> str:
    """Return an error's type, the first sentence of its text, and the user's line that caused it.

    The user's line is the innermost one outside of the library and of those that it is built on.
    """
    lines = [line.strip() for line in str(error).strip().split("\n") if line.strip()]
    text = lines.pop(0) if lines else ""
    while text.endswith(":") and lines:
        text += f" {lines.pop(0)}"
    kind = type(error).__name__
    text = next((hint for part, hint in _HINTS.items() if part in f"{kind}: {text}"), text)
    reason = ": ".join(filter(None, (kind, text.removesuffix("."))))
    return f"{reason}{_user_line(error)}."


def trace(place: str, function: Any, *args: Any, owner: Any = None) -> tuple[ClosedJaxpr, Any]:
    """Return the program of a user's code that returns arrays, and their shapes.

    Raises `ConfigError` with the error and the line by which it failed, for a leaf that JAX does
    not take, and where it draws from NumPy's global generator or those in attributes of `owner`,
    and does not seed them. Draws from `random` are allowed: beartype chooses by them what to check.
    """

    def checked(*args: Any) -> Any:
        result = function(*args)
        for path, leaf in leaves_by_path(result).items():
            if not isinstance(leaf, ARRAYS):
                kind = type(leaf).__name__
                advice = ": put @podracer.struct above it" if is_dataclass(leaf) else ""
                raise ConfigError(f"{place} returns a {kind} in {path}, no array{advice}.")
        return result

    for _ in range(2):  # code that seeds them changes them in its first call alone
        states = _generator_states(owner)
        try:
            # JAX would remember the trace of the function itself.
            result = jax.make_jaxpr(lambda *args: checked(*args), return_shape=True)(*args)
        except ConfigError:
            raise
        except (Exception, SystemExit) as error:  # its code 0 would count as success
            raise ConfigError(f"{place} cannot be traced: {describe_error(error)}") from error
        if _generator_states(owner) == states:
            return result
    raise ConfigError(f"{place} draws from NumPy's generators: draw by jax.random, with the key.")


def _generator_states(owner: Any) -> str:
    # Not `vars`, which makes a dictionary where there is none: JAX's check of leaks fails by it.
    parts = [x.values() if isinstance(x, dict) else (x,) for x in gc.get_referents(owner)]
    states = [x.bit_generator.state for p in parts for x in p if isinstance(x, np.random.Generator)]
    return f"{np.random.get_state()} {states}"  # noqa: NPY002


def structure_change(old: Any, new: Any, path: str) -> str:
    """Return where, from `path` on, a tree first changed its structure, and how."""
    names = ["array" if all_leaves([x]) else type(x).__name__ for x in (old, new)]
    if names[0] != names[1]:
        return f"{path} changed from {names[0]} to {names[1]}"
    pairs = (tree_leaves_with_path(x, lambda y, x=x: y is not x) for x in (old, new))
    old_parts, new_parts = ({path + keystr(key): part for key, part in x} for x in pairs)
    for part in old_parts | new_parts:
        if part not in new_parts:
            return f"{part} is missing"
        if part not in old_parts:
            return f"{part} is new"
        if jax.tree.structure(old_parts[part]) != jax.tree.structure(new_parts[part]):
            return structure_change(old_parts[part], new_parts[part], part)
    return f"{path} has other static fields or empty parts"


def type_text(leaf: Any) -> str:
    """Return the dtype and the shape of an array or of what describes one."""
    return f"{leaf.dtype}{list(leaf.shape)}"


def _user_line(error: BaseException) -> str:
    """Return " (FILE, line N)" of the user's line, else of a library that the user may choose."""
    lines = list(traceback.walk_tb(error.__traceback__))[::-1]
    for libraries in (_LIBRARIES | _CHOSEN, _LIBRARIES):
        for frame, line in lines:
            package = str(frame.f_globals.get("__name__")).partition(".")[0]
            path = frame.f_code.co_filename
            if package not in libraries and not path.startswith("<"):  # such as code of beartype
                return f" ({Path(path).name}, line {line})"
    return ""
