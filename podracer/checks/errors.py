"""One line on what a user's code raised while it was traced."""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import jax

from podracer.errors import ConfigError

_HINTS = {
    jax.errors.TracerBoolConversionError: (
        "a Python `if` or `while` depends on a traced value: take jnp.where or jax.lax.cond"
    ),
    jax.errors.TracerArrayConversionError: "NumPy got a traced value: take jax.numpy",
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
    text = next((hint for kind, hint in _HINTS.items() if isinstance(error, kind)), text)
    reason = ": ".join(filter(None, (type(error).__name__, text.removesuffix("."))))
    return f"{reason}{_user_line(error)}."


@contextlib.contextmanager
def explain(failure: str) -> Iterator[None]:
    """Raise `ConfigError` that says what failed, and the error and line by which it did."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{failure}: {describe_error(error)}") from error


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
