"""Values of flags as text: whole numbers, tuples of them, schedules, and what varies."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin

import tyro

from podracer.errors import ConfigError
from podracer.io.addresses import address_of
from podracer.io.paths import user_path

if TYPE_CHECKING:
    from podracer.run.sweep import Space
    from podracer.schedules import Linear

REGISTRY = tyro.constructors.ConstructorRegistry()


@REGISTRY.primitive_rule
def _path_rule(info: Any) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
    """Parse fields of type `Path`, see `user_path`."""
    return _path_spec("PATH", _read_path) if info.type is Path else None


def _path_spec(
    metavar: str, read: Callable[[str], Path]
) -> tyro.constructors.PrimitiveConstructorSpec[Any]:
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda texts: read(texts[0]),
        is_instance=lambda value: isinstance(value, Path),
        str_from_instance=lambda value: [str(value)],
    )


@REGISTRY.primitive_rule
def _schedule_rule(info: Any) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
    """Parse fields of type `Schedule`: a number or START:END or START:END:FRAMES."""
    if not any(getattr(x, "__module__", "") == "podracer.schedules" for x in get_args(info.type)):
        return None  # without the import of JAX, which a mistyped flag need not wait for
    from podracer.schedules import Linear

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="FLOAT|START:END[:FRAMES]",
        instance_from_str=lambda texts: read_schedule(texts[0]),
        is_instance=lambda value: isinstance(value, int | float | Linear),
        str_from_instance=lambda value: [format_schedule(value)],
    )


@REGISTRY.primitive_rule
def _whole_numbers_rule(info: Any) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
    """Parse fields of type `tuple[int, ...]`: 64 64 or 64,64."""
    if get_origin(info.type) is not tuple or get_args(info.type) != (int, ...):
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar="[INT [INT ...]]",
        instance_from_str=_read_whole_numbers,
        is_instance=lambda value: isinstance(value, tuple) and all(type(x) is int for x in value),
        str_from_instance=lambda value: list(map(str, value)),
    )


@REGISTRY.primitive_rule
def _whole_number_rule(info: Any) -> tyro.constructors.PrimitiveConstructorSpec[Any] | None:
    """Parse fields of type `int`: 4096, 4_096 or 1e6."""
    if info.type is not int:
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT",
        instance_from_str=lambda texts: read_whole_number(texts[0]),
        is_instance=lambda value: type(value) is int,
        str_from_instance=lambda value: [str(value)],
    )


def _read_path(text: str) -> Path:
    """Return the path of a flag's value. Raises `ValueError` for "", which would be this folder."""
    if not text:
        raise ValueError("'' names no file and no directory.")
    return user_path(text)


def _read_run(text: str) -> Path:
    """Return the path of a run, or its address in a store, which `address_of` reads back."""
    return _read_path(text) if address_of(text) is None else Path(text)


RUN = _path_spec("RUN", _read_run)
"""Parser of a run that a command reads: a directory, or an address in a store."""


def _read_whole_numbers(texts: list[str]) -> tuple[int, ...]:
    """Return the numbers of a flag, none for a bare flag and for ''."""
    parts = [part for text in texts for part in text.split(",")]
    return () if parts == [""] else tuple(map(read_whole_number, parts))


def read_whole_number(text: str) -> int:
    """Return the number of a flag's value, which may be written as 1e6. Raises `ValueError`."""
    with contextlib.suppress(ValueError):
        return int(text)
    with contextlib.suppress(ValueError):
        if (number := float(text)).is_integer():
            return int(number)
    raise ValueError(f"{text!r} must be a whole number, such as 4096 or 1e6.")


def read_schedule(text: str) -> float | Linear:
    """Return the schedule of a flag's value: a number, `START:END` or `START:END:FRAMES`.

    Raises `ValueError` if it is none of them.
    """
    from podracer.schedules import Linear

    try:
        numbers = [float(part) for part in text.split(":")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2, 3):
        raise ValueError(
            f"{text!r} must be a number, or START:END[:FRAMES] for a linear change, such as 1e-3:0 "
            "over the whole run or 1e-3:0:5e6."
        )
    return numbers[0] if len(numbers) == 1 else Linear(*numbers)


def format_schedule(schedule: float | Linear) -> str:
    """Return the text of a schedule, which `read_schedule` reads."""
    if isinstance(schedule, int | float):
        return str(schedule)
    text = f"{schedule.start:g}:{schedule.end:g}"
    return text if schedule.frames is None else f"{text}:{schedule.frames:g}"


def read_spaces(variations: Sequence[Sequence[str]]) -> dict[str, Space]:
    """Return the values or the range of each hyperparameter that `--vary` names.

    It is given once or several times. Raises `ConfigError` for what cannot be read.
    """
    if not all(texts and all(texts) for texts in variations):
        raise ConfigError("--vary needs a value: write it behind the flag, or leave it out.")
    spaces: dict[str, Space] = {}
    for text in (text for texts in variations for text in texts):
        name = text.partition("=")[0].replace("-", "_")
        if name in spaces:
            raise ConfigError("--vary names a hyperparameter twice: give each its values once.")
        spaces[name] = _read_space(name, text)
    return spaces


def _read_space(name: str, text: str) -> Space:
    """Return the space of `NAME=VALUE,VALUE` or `NAME=LOW:HIGH`."""
    from podracer.drivers.selection import Range

    values = text.partition("=")[2]
    if values.count(":") > 1:
        raise ConfigError(
            f"--vary {text!r} cannot be read: of a schedule only the start varies, as in "
            f"{name}=1e-4,3e-4."
        )
    try:
        if ":" in values:
            return Range(name, *map(float, values.split(":")))
        numbers = tuple(float(value) for value in values.split(","))
        if not all(map(math.isfinite, numbers)):
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"--vary {text!r} cannot be read: write name=1e-4,3e-4 or name=1e-5:1e-2."
        ) from None
    if len(set(numbers)) < len(numbers):  # equal pods would count as independent seeds
        raise ConfigError(f"--vary {text!r} names a value twice: give each value once.")
    return numbers
