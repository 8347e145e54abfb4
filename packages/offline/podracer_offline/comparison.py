"""How often a policy acts as a data set has it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from podracer.policy import Policy, add_start
from podracer.types import Continuous
from podracer_offline.dataset import LOG, Dataset
from podracer_offline.records import with_recorded_action


def agreement(policy: Policy, data: Dataset, tolerance: float = 0.05) -> float:
    """Return the share, in [0, 1], of the actions of a data set that a policy chooses, too.

    It observes the data set's episodes from their beginnings, also their last actions if it
    observes any. Continuous actions are equal if no coordinate differs by more than the
    `tolerance`, in halves of the action range. Raises `ConfigError` where the data set cannot be of
    the policy's environment.
    """
    # The bounds of a log are its extremes, and another part of it has its own.
    space, data = policy.spec.action, data.check(policy.spec, bounds=policy.spec.name != LOG)
    policy, ends = policy.copy(), data.ends
    starts = np.concatenate([[0], ends[:-1] + 1])
    lengths, count = ends - starts + 1, 0
    for t in range(int(lengths.max())):
        rows = np.minimum(starts + t, ends)  # an episode that is over repeats its end
        observation = jax.tree.map(
            lambda spec, x, rows=rows: x[rows] + spec.start if spec.start else x[rows],
            policy.spec.observation,
            data.observation,
        )
        action = np.asarray(policy(observation, data.reward[rows - 1] if t else 0.0))
        policy._memory = with_recorded_action(policy._memory, jnp.asarray(data.action[rows]))
        recorded = add_start(space, data.action[rows])
        if isinstance(space, Continuous):
            half = (np.asarray(space.high) - np.asarray(space.low)) / 2
            is_equal = np.abs(action - recorded) <= tolerance * half
        else:
            is_equal = action == recorded
        is_equal = is_equal.reshape(len(rows), -1).all(axis=1)
        count += int(is_equal[t < lengths].sum())
    return count / len(data.reward)
