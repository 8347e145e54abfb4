"""Random actions of host environments, and what observations under them say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from podracer.ops.action_masks import component_masks
from podracer.types import Continuous, Discrete, EnvironmentSpec

MAX_CODE = 31  # pixels are brighter somewhere


def wrong_scales(name: str, leaf: Any, largest: float) -> Iterator[str]:
    """Yield what is wrong where networks divide the numbers of a leaf by 255, or do not.

    `leaf` has a dtype, a shape and `scaled`, and `largest` is their maximum in random play.
    """
    if leaf.scaled and 0 < largest <= MAX_CODE:
        yield (
            f"{name} reaches {largest:g}, and networks divide it by 255, as pixels from 0 to 255: "
            f"other numbers need a space of their own, such as Box(0, {largest:g}, ...), or "
            "ArraySpec(..., scaled=False)."
        )
    is_image = len(leaf.shape) == 3 or leaf.dtype == np.uint8
    if is_image and not leaf.scaled and 127 < largest < 256:
        yield (
            f"{name} reaches {largest:g}, and networks take it as it is: they divide pixels by 255 "
            "where a space of uint8 is from 0 to 255, or ArraySpec(..., scaled=True) says so."
        )


def random_actions(
    generator: np.random.Generator, spec: EnvironmentSpec, observation: Any, num_envs: int
) -> np.ndarray:
    """Return an action for each environment `[num_envs, ...]`, only those that its mask allows."""
    space = spec.action
    if isinstance(space, Continuous):
        uniform = generator.uniform(space.low, space.high, (num_envs, space.size))
        return np.clip(uniform, space.low, space.high).astype(np.float32)
    scores = generator.random((num_envs, sum(space.components)))
    parts = np.split(scores, np.cumsum(space.components)[:-1], axis=1)
    for part, mask in zip(parts, component_masks(spec, observation), strict=True):
        part[...] = part if mask is None else np.where(mask, part, -1.0)
    actions = np.stack([part.argmax(axis=1) for part in parts], axis=1).astype(np.int32)
    return actions[:, 0] if isinstance(space, Discrete) else actions
