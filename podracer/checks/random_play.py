"""Random actions of host environments."""

from __future__ import annotations

from typing import Any

import numpy as np

from podracer.ops.action_masks import action_mask
from podracer.types import Continuous, Discrete, EnvironmentSpec


def random_actions(
    generator: np.random.Generator, spec: EnvironmentSpec, observation: Any, num_envs: int
) -> np.ndarray:
    """Return an action for each environment `[num_envs, ...]`, only those that its mask allows."""
    space = spec.action
    if isinstance(space, Continuous):
        uniform = generator.uniform(space.low, space.high, (num_envs, space.size))
        return np.clip(uniform, space.low, space.high).astype(np.float32)
    number = sum(space.components)
    mask = action_mask(observation)
    allowed = np.ones((num_envs, number), bool) if mask is None else np.asarray(mask)
    scores = np.where(allowed, generator.random((num_envs, number)), -1.0)
    parts = np.split(scores, np.cumsum(space.components)[:-1], axis=1)
    actions = np.stack([part.argmax(axis=1) for part in parts], axis=1).astype(np.int32)
    return actions[:, 0] if isinstance(space, Discrete) else actions
