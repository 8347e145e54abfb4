"""Values of settings as text, read by the types of their fields."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from podracer.errors import ConfigError
from podracer.io.addresses import address_of
from podracer.io.paths import user_path
from podracer.names import nearest

_PLAIN = (bool, int, float, str, Path)  # types of which a word is a value


class Mark(enum.Enum):
    """Markers of a field: `Annotated[Path, Mark.RUN]`."""

    POSITIONAL = enum.auto()  # its words need no flag
    RUN = enum.auto()  # a directory, or an address in a store, which `address_of` reads back


@dataclasses.dataclass(frozen=True)
class Limits:
    """Marker of a field: its value, or each item of it, lies in `[low, high]`."""

    low: float = 1
    high: float = 2**31 - 1

    def check(self, flag: str, value: Any) -> None:
        """Raise `ConfigError` if a value is outside."""
        for number in value if isinstance(value, tuple) else (value,):
            if number is not None and not self.low <= number <= self.high:
                raise ConfigError(
                    f"{flag} must lie in [{self.low:,}, {self.high:,}], but it is {number}."
                )


def options_of(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself."""
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    return typing.get_args(hint) if is_union else (hint,)


def classes_of(hint: Any) -> tuple[type, ...] | None:
    """Return the dataclasses of which a type is a union, None where a word is a value."""
    options = options_of(hint)
    if any(option in _PLAIN for option in options):
        return None
    return tuple(option for option in options if hasattr(option, "__dataclass_fields__"))


def item_of(hint: Any) -> Any:
    """Return the type of a tuple's items, None for another type."""
    return typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else None


def read_value(hint: Any, words: Sequence[str], flag: str, *, is_run: bool = False) -> Any:
    """Return the value of a type that the words of a flag give.

    Several numbers may be separated by commas; `is_run` allows addresses. Raises `ConfigError`,
    which names the flag.
    """
    item = item_of(hint)
    if item is None:
        return _read_word(hint, words[0], flag, is_run)
    if item not in (str, Path):
        words = [part for word in words for part in word.split(",") if word]
    return tuple(_read_word(item, word, flag, is_run) for word in words)


def _read_word(hint: Any, text: str, flag: str, is_run: bool) -> Any:
    literals, kinds = _literals_and_kinds(hint)
    if text in literals:
        return literals[text]
    if is_run and address_of(text):
        return Path(text)
    for name, kind in kinds.items():
        with contextlib.suppress(ValueError, KeyError):
            if text or kind is str:
                return _READERS[name][1](kind, text)
    if not kinds:
        raise ConfigError(f"{flag} cannot be {text!r}: {nearest(text, sorted(literals))}")
    texts = [_READERS.get(name, (f"{name}, which only Python gives",))[0] for name in kinds]
    raise ConfigError(f"{flag}: {text!r} must be {' or '.join([*literals, *texts])}.")


def _literals_and_kinds(hint: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values that a type names one by one, by their words, and the other types."""
    literals, kinds = {}, {}
    for option in options_of(hint):
        if typing.get_origin(option) is typing.Literal:
            literals |= {str(value): value for value in typing.get_args(option)}
        elif option is types.NoneType:
            literals["None"] = None
        else:
            kinds[getattr(option, "__name__", str(option))] = option
    return literals, kinds


def choices_of(hint: Any) -> list[str]:
    """Return the words for all values of a type, none where they are many."""
    literals, kinds = _literals_and_kinds(hint)
    return [] if kinds else list(literals)


def read_whole_number(text: str) -> int:
    """Return the number of a text, which may be written as 1e6. Raises `ValueError`."""
    with contextlib.suppress(ValueError):
        return int(text)
    if (number := float(text)).is_integer():
        return int(number)
    raise ValueError(text)


def _read_linear(kind: Any, text: str) -> Any:
    start, end, *frames = map(float, text.split(":"))
    if len(frames) > 1:
        raise ValueError(text)
    return kind(start, end, *frames)


# The words for a type, and the function of it and of a text that returns the value, or raises.
_READERS: dict[str, tuple[str, Callable[[Any, str], Any]]] = {
    "bool": ("true or false", lambda _, text: {"true": True, "false": False}[text.lower()]),
    "int": ("a whole number, such as 4096 or 1e6", lambda _, text: read_whole_number(text)),
    "float": ("a number", lambda _, text: float(text)),
    "str": ("text", lambda _, text: text),
    "Path": ("a path", lambda _, text: user_path(text)),
    "Linear": (
        "START:END[:FRAMES] for a linear change, such as 1e-3:0 over the whole run or 1e-3:0:5e6",
        _read_linear,
    ),
}


def format_value(value: Any) -> str:
    """Return the words that `read_value` reads; the class of what it cannot read."""
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    if type(value).__name__ == "Linear":
        text = f"{value.start:g}:{value.end:g}"
        return text if value.frames is None else f"{text}:{value.frames:g}"
    is_plain = value is None or isinstance(value, _PLAIN)
    return str(value) if is_plain else type(value).__name__
