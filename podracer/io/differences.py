"""Differences between nested JSON objects, such as configurations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def leaves(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every leaf with its dotted name; lists and empty objects count as leaves."""
    for key, value in tree.items():
        name = f"{path}.{key}" if path else key
        if isinstance(value, Mapping) and value:
            yield from leaves(value, name)
        else:
            yield name, value


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the dotted names of leaves that differ with both values, None for a missing leaf."""
    old, new = dict(leaves(first)), dict(leaves(second))
    pairs = {name: (old.get(name), new.get(name)) for name in old | new}
    # A value that does not equal itself is NaN, which equals another NaN here.
    return {name: (x, y) for name, (x, y) in pairs.items() if x != y and not (x != x and y != y)}
