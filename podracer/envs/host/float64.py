"""Observations in float64, which devices have as float32. Imports no JAX."""

from __future__ import annotations

import numpy as np

LARGEST_EXACT = 2.0**24  # float32 has all whole numbers up to it


def may_lose_changes(array: np.ndarray) -> bool:
    """Return whether numbers are so large that float32 may lose changes by 1."""
    return bool(np.abs(array).max(initial=0) > LARGEST_EXACT)


def describe_lost_change(name: str, old: np.ndarray, new: np.ndarray) -> str | None:
    """Describe a change by 1 or more from one step to the next that float32 loses, if any is."""
    with np.errstate(invalid="ignore", over="ignore"):
        is_lost = np.abs(new - old) >= 1
        is_lost &= old.astype(np.float32) == new.astype(np.float32)
    if not is_lost.any():
        return None
    first, second = float(old[is_lost][0]), float(new[is_lost][0])
    return (
        f"{name} changes from {first!r} to {second!r}, which are one number in float32: subtract a "
        "constant in a wrapper of the environment, or divide if such changes do not matter"
    )
