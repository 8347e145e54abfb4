"""Ranges of hyperparameters, from which sweeps and tournaments draw."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from podracer.types import ConfigError


@dataclasses.dataclass(frozen=True)
class Range:
    """Interval of a hyperparameter's values. Raises `ConfigError` if it is empty."""

    name: str
    """Name of a float field of the agent, dotted if nested."""
    low: float
    """Smallest value. Draws are log-uniform if it is positive."""
    high: float
    """Largest value."""

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
