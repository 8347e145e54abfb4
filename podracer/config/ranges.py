"""Ranges of hyperparameters, from which sweeps and tournaments draw, on the command line."""

from __future__ import annotations

from podracer.drivers.selection import Range
from podracer.errors import ConfigError


def read_range(text: str) -> Range:
    """Return the range of `--vary name=low:high`. Raises `ConfigError` if it cannot be read."""
    name, _, bounds = text.partition("=")
    low, _, high = bounds.partition(":")
    try:
        return Range(name.replace("-", "_"), float(low), float(high))
    except (ValueError, ConfigError):
        raise ConfigError(
            f"`vary` {text!r} cannot be read: write name=low:high, such as learning_rate=1e-5:1e-2."
        ) from None
