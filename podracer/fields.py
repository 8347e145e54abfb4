"""Fields of settings and states: leaf or structure, and range."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, TypeVar, dataclass_transform

import jax
import numpy as np

from podracer.arguments import named
from podracer.errors import ConfigError
from podracer.names import NO_FLAG as NO_FLAG

T = TypeVar("T")
_MAX_INT32 = 2**31 - 1


def static(
    *, default: Any = dataclasses.MISSING, low: float | int | None = None, high: float = math.inf
) -> Any:
    """Declare a field of a `struct` as structure, not a leaf; its value lies in `[low, high]`."""
    metadata = {"static": True} | ({} if low is None else {"range": (low, high)})
    return dataclasses.field(default=default, metadata=metadata)


def bounded(
    default: Any, low: float | int = 0.0, high: float | int = math.inf, *, exclusive: bool = False
) -> Any:
    """Declare a field of a dataclass whose value is finite and lies in `[low, high]`.

    With `exclusive` it lies in `(low, high]`. If the value is a tuple this holds for each of its
    items. An integer without `high` must be below 2^31. `check_ranges` checks it.
    """
    return dataclasses.field(default=default, metadata={"range": (low, high, exclusive)})


def reset_on_warm_start() -> Any:
    """Declare a field of a learner's state that begins anew where a run takes another's weights.

    It stays an array, or a tree of them. Counters of frames and what belongs to one environment
    are such fields.
    """
    return dataclasses.field(metadata={"reset_on_warm_start": True})


@dataclass_transform(
    frozen_default=True, field_specifiers=(static, reset_on_warm_start, dataclasses.field)
)
def struct(cls: type[T]) -> type[T]:
    """Make a class a frozen dataclass and a pytree; `static()` fields are structure, not leaves."""
    cls = named(dataclasses.dataclass(frozen=True)(cls))
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    meta = [f.name for f in fields if f.metadata.get("static")]
    data = [f.name for f in fields if f.name not in meta]
    return jax.tree_util.register_dataclass(cls, data_fields=data, meta_fields=meta)


def unchecked(cls: type[T]) -> type[T]:
    """Exempt the fields of a `struct` from the type checks that tests switch on.

    Their annotations describe arrays on a device, but the same class also holds specifications,
    shapes and shardings, leaf by leaf.
    """
    cls.__no_type_check__ = True  # type: ignore[attr-defined]
    return cls


def check_ranges(config: Any, path: str, default_range: tuple[Any, ...] | None = None) -> None:
    """Raise `ConfigError` if a field is outside the range that `bounded` or `static` declared.

    A field of integers takes no other numbers, and a bool or a tuple no text. Fields that are
    dataclasses are checked too; the range of such a field holds for its numbers without one. `path`
    names `config` in the message, and `default_range` holds for its fields without one.
    """
    for field in dataclasses.fields(config):
        value: Any = getattr(config, field.name)
        name = f"{path}.{field.name}" if path else field.name
        limits_of_field = field.metadata.get("range", default_range)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            check_ranges(value, name, limits_of_field)
            continue
        if isinstance(value, str) and str(field.type).startswith(("bool", "tuple")):
            # Any text would count as true, and its letters as names.
            kind = f"a tuple, {(value,)}" if "tuple" in str(field.type) else "true or false"
            raise ConfigError(f"{name} must be {kind}, but it is {value!r}.")
        if limits_of_field is not None and value is not None:
            if isinstance(value, list):
                raise ConfigError(f"{name} must be a tuple, {tuple(value)}, and no list.")
            is_whole = str(field.type).startswith(("int", "tuple[int", "<class 'int'"))
            for number in value if isinstance(value, tuple) else (value,):
                if type(number) is bool or not isinstance(number, int if is_whole else int | float):
                    kind = "whole number" if is_whole else "number"
                    raise ConfigError(f"{name} must be a {kind}, but it is {value!r}.")
                if violation := _violation(number, *limits_of_field):
                    raise ConfigError(f"{name} must {violation}, but it is {value}.")


def _violation(value: float, low: float, high: float, is_open: bool = False) -> str | None:
    """Return what a value must be instead, None if it lies in its range, perhaps open below."""
    if isinstance(value, int):  # on a device it is an int32
        high = _MAX_INT32 if high == math.inf else high
        if value < low or (is_open and value == low):
            return f"be above {low:g}" if is_open else f"be at least {low:,}".removesuffix(".0")
        return f"be at most {high:,}".removesuffix(".0") if value > high else None
    if not abs(value) <= float(np.finfo(np.float32).max):  # nor nan
        return "be finite as a float32"
    if (low < value or (low == value and not is_open)) and value <= high:
        return None
    if high == math.inf:
        return f"be above {low:g}" if is_open else f"be at least {low:g}"
    return f"lie in {'(' if is_open else '['}{low:g}, {high:g}]"
