"""Values of settings as text, read by the types of their fields."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from podracer.errors import ConfigError
from podracer.io.addresses import address_of
from podracer.io.paths import user_path
from podracer.names import nearest

_PLAIN = (bool, int, float, str, Path)  # types of which a word is a value
_WORDS = {
    "bool": "true or false",
    "int": "a whole number, such as 4096 or 1e6",
    "float": "a number",
    "str": "text",
    "Path": "a path",
    "NoneType": "None",
    "Linear": "START:END[:FRAMES] for a linear change, such as 1e-3:0 over the whole run or "
    "1e-3:0:5e6",
}


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
    options = options_of(hint)
    if text == "None" and types.NoneType in options:
        return None
    for option in options:
        with contextlib.suppress(ValueError, KeyError):
            return _read_option(option, text, is_run)
    if words := choices_of(hint):
        raise ConfigError(f"{flag} cannot be {text!r}: {nearest(text, sorted(words))}")
    options = sorted(options, key=lambda option: option is not types.NoneType)
    raise ConfigError(f"{flag}: {text!r} must be {' or '.join(map(_describe, options))}.")


def choices_of(hint: Any) -> list[str]:
    """Return the words for all values of a type, none where they are many."""
    words = [_literals(option) for option in options_of(hint)]
    return [word for literals in words for word in literals] if all(words) else []


def _literals(option: Any) -> tuple[str, ...]:
    if option is types.NoneType:
        return ("None",)
    is_literal = typing.get_origin(option) is typing.Literal
    return tuple(map(str, typing.get_args(option))) if is_literal else ()


def _describe(option: Any) -> str:
    name = getattr(option, "__name__", str(option))
    words = _WORDS.get(name) or " or ".join(_literals(option))
    return words or f"{name}, which only Python gives"


def _read_option(kind: Any, text: str, is_run: bool) -> Any:
    """Return the value of one type. Raises where the text gives none."""
    if typing.get_origin(kind) is typing.Literal:
        return {str(choice): choice for choice in typing.get_args(kind)}[text]
    if getattr(kind, "__name__", "") == "Linear":
        numbers = [float(part) for part in text.split(":")]
        if len(numbers) not in (2, 3):
            raise ValueError(text)
        return kind(*numbers)
    if kind is bool:
        return {"true": True, "false": False}[text.lower()]
    if kind is int:
        return read_whole_number(text)
    if kind in (float, str):
        return kind(text)
    if kind is Path and text:
        return Path(text) if is_run and address_of(text) else user_path(text)
    raise ValueError(text)


def read_whole_number(text: str) -> int:
    """Return the number of a text, which may be written as 1e6. Raises `ValueError`."""
    with contextlib.suppress(ValueError):
        return int(text)
    if (number := float(text)).is_integer():
        return int(number)
    raise ValueError(text)


def format_value(value: Any) -> str:
    """Return the words that `read_value` reads; the class of what it cannot read."""
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    if type(value).__name__ == "Linear":
        text = f"{value.start:g}:{value.end:g}"
        return text if value.frames is None else f"{text}:{value.frames:g}"
    is_plain = value is None or isinstance(value, _PLAIN)
    return str(value) if is_plain else type(value).__name__
