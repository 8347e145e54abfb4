"""Schemas of JSON: what must be in a file that others may have written or changed.

- `int`, `str`: the exact type of a value
- a function: a test of a value, such as `count`
- `None`: null
- `(schema, schema)`: alternatives
- `[schema, ...]`: a list of any length
- `[schema, schema]`: a list of as many items
- `{"name": schema}`: an object with these fields; `...: schema` permits others
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

Schema = Any


def conforms(value: Any, schema: Schema) -> bool:
    """Return whether a value of JSON is as its schema requires."""
    match schema:
        case None:
            return value is None
        case dict():
            return isinstance(value, dict) and not unsound_fields(value, schema)
        case tuple():
            return any(conforms(value, option) for option in schema)
        case [item, e] if e is ...:
            return isinstance(value, list) and all(conforms(x, item) for x in value)
        case list():
            is_list = isinstance(value, list) and len(value) == len(schema)
            return is_list and all(map(conforms, value, schema))
        case type():
            return type(value) is schema
    return schema(value)


def unsound_fields(values: Mapping[str, Any], schema: Mapping[Any, Schema]) -> list[str]:
    """Return the names of fields that are missing, unknown or do not conform."""
    other_fields = schema.get(..., lambda value: False)
    names = [name for name in {**schema, **values} if name is not ...]
    return [
        name
        for name in names
        if name not in values or not conforms(values[name], schema.get(name, other_fields))
    ]


def anything(value: Any) -> bool:
    """Return True."""
    return True


def count(value: Any) -> bool:
    """Return whether a value is a whole number, in [0, 2^63)."""
    return type(value) is int and 0 <= value < 2**63


def number(value: Any) -> bool:
    """Return whether a value is a number, be it not finite."""
    return isinstance(value, int | float)


def finite(value: Any) -> bool:
    """Return whether a value is a finite number."""
    return number(value) and math.isfinite(value)


def text(value: Any) -> bool:
    """Return whether a value is text without control characters, which a terminal would obey."""
    return isinstance(value, str) and value.isprintable()
