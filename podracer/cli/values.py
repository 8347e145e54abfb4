"""Values of settings as text, read by the types of their fields, and types of common ones."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from podracer.errors import ConfigError
from podracer.io.addresses import address_of
from podracer.io.paths import user_path
from podracer.names import nearest


class Mark(enum.Enum):
    """Markers of a field: `Annotated[Path, Mark.RUN]`."""

    POSITIONAL = enum.auto()  # its words need no flag
    RUN = enum.auto()  # a directory, or an address in a store, which `address_of` reads back


class Limits(NamedTuple):
    """Marker of a field: its value, or each item of it, lies in `[low, high]`."""

    low: float = 1
    high: float = 2**31 - 1


Count = Annotated[int, Limits()]
Seed = Annotated[int, Limits(0, 2**32 - 1)]
RunPath = Annotated[Path, Mark.RUN, Mark.POSITIONAL]


def read_whole_number(text: str) -> int:
    """Return the number of a text, which may be written as 1e6. Raises `ValueError`."""
    with contextlib.suppress(ValueError):
        return int(text)
    if (number := float(text)).is_integer():
        return int(number)
    raise ValueError(text)


def _read_linear(text: str) -> Any:
    from podracer.schedules import Linear

    start, end, *frames = map(float, text.split(":"))
    if len(frames) > 1:
        raise ValueError(text)
    return Linear(start, end, *frames)


# Types whose values are texts: the words for a type, and its reader, which raises `ValueError`.
_READERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "bool": ("true or false", lambda text: bool(("false", "true").index(text.lower()))),
    "int": ("a whole number, such as 4096 or 1e6", read_whole_number),
    "float": ("a number", float),
    "str": ("text", str),
    "Path": ("a path", user_path),
    "Linear": (
        "START:END[:FRAMES] for a linear change, such as 1e-3:0 over the whole run or 1e-3:0:5e6",
        _read_linear,
    ),
}


@dataclasses.dataclass(frozen=True)
class Kind:
    """Type of a value, or of each item of a tuple: a union, as a reader of texts meets it."""

    words: dict[str, Any]  # values and classes that it names one by one
    names: tuple[str, ...]  # other types
    is_tuple: bool = False

    @property
    def reads_texts(self) -> bool:
        """Whether texts beside the words are values."""
        return not _READERS.keys().isdisjoint(self.names)

    def read(self, texts: Sequence[str], flag: str, *, is_run: bool = False) -> Any:
        """Return the value that the texts behind a flag give; a class is one.

        Several numbers may be separated by commas; `is_run` allows addresses. Raises
        `ConfigError`, which names the flag.
        """
        if self.is_tuple and self.names not in (("str",), ("Path",)):
            texts = [part for text in texts for part in text.split(",") if text]
        values = tuple(self._read_one(text, flag, is_run) for text in texts)
        return values if self.is_tuple else values[0]

    def _read_one(self, text: str, flag: str, is_run: bool) -> Any:
        if text in self.words:
            return self.words[text]
        if is_run and address_of(text):
            return Path(text)
        for name in self.names:
            with contextlib.suppress(ValueError, KeyError):
                if text or name == "str":
                    return _READERS[name][1](text)
        if not self.names:
            by_lower = {word.lower(): value for word, value in self.words.items()}
            if (word := text.lower().replace("-", "")) in by_lower:
                return by_lower[word]
            raise ConfigError(f"{flag} cannot be {text!r}: {nearest(text, sorted(self.words))}")
        texts = [_READERS.get(x, (f"{x}, which only Python gives",))[0] for x in self.names]
        raise ConfigError(f"{flag}: {text!r} must be {' or '.join([*self.words, *texts])}.")


@functools.cache
def kind_of(hint: Any) -> Kind:
    """Return the kind of an annotated type."""
    if typing.get_origin(hint) is tuple:
        return dataclasses.replace(kind_of(typing.get_args(hint)[0]), is_tuple=True)
    is_union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    words, names = {}, []
    for option in typing.get_args(hint) if is_union else (hint,):
        name = getattr(option, "__name__", str(option))
        if typing.get_origin(option) is typing.Literal:
            words |= {str(value): value for value in typing.get_args(option)}
        elif option is types.NoneType:
            words["None"] = None
        elif dataclasses.is_dataclass(option) and name not in _READERS:
            words[name.removesuffix("Config")] = option
        else:
            names.append(name)
    return Kind(words, tuple(names))


def format_value(value: Any) -> str:
    """Return the words that a `Kind` reads; the class of what it cannot read."""
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    if type(value).__name__ == "Linear":
        frames = "" if value.frames is None else f":{value.frames:g}"
        return f"{value.start:g}:{value.end:g}{frames}"
    is_plain = isinstance(value, bool | int | float | str | Path | None)
    return str(value) if is_plain else type(value).__name__
