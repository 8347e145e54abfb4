"""Ranges of hyperparameters: where a sweep and a tournament draw from."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from podracer.types import ConfigError


@dataclasses.dataclass(frozen=True)
class Range:
    """Where a hyperparameter may lie. Raises `ConfigError` if there is nothing in between."""

    name: str
    """A float of the agent, dotted where it lies deeper."""
    low: float
    """The least value. Draws are even on a logarithmic scale if it is positive."""
    high: float
    """The greatest value."""

    def __post_init__(self) -> None:
        if not -math.inf < self.low < self.high < math.inf:
            raise ConfigError(
                f"the range of {self.name} must be finite and not empty, "
                f"but it is {self.low} to {self.high}."
            )

    def draw(self, rng: np.random.Generator) -> float:
        """Return a random value in the range."""
        if self.low > 0:
            return self.clip(math.exp(rng.uniform(math.log(self.low), math.log(self.high))))
        return self.clip(rng.uniform(self.low, self.high))

    def clip(self, value: float) -> float:
        """Return the nearest value in the range."""
        return float(min(max(value, self.low), self.high))


def read_range(text: str) -> Range:
    """Return the range of `--vary name=low:high`. Raises `ConfigError` if it cannot be read."""
    name, _, bounds = text.partition("=")
    low, _, high = bounds.partition(":")
    try:
        return Range(name, float(low), float(high))
    except (ValueError, ConfigError):
        raise ConfigError(
            f"--vary {text!r} cannot be read: write name=low:high, such as learning_rate=1e-5:1e-2."
        ) from None
