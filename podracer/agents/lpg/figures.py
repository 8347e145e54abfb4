"""Figure of a learned update rule: its targets as functions of the return.

The rule is applied to episodes of a synthetic student with a constant policy and a uniform
prediction, and with random rewards. Its targets then depend on the rewards that follow an action.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np

from podracer.agents.common.lifetimes import Experience
from podracer.agents.common.rule_figures import draw_over_returns, synthetic_episodes
from podracer.agents.lpg.rule import Outputs, UpdateRule
from podracer.types import Params

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def targets_over_returns(
    rule: UpdateRule, params: Params, discount: float, probability: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Apply the rule to synthetic episodes in which actions have this probability.

    Returns, for each of n steps, the discounted return that follows `[n]`, the policy target
    `[n]` and the prediction target `[n, m]`.
    """
    episodes = synthetic_episodes(discount)
    num_steps, num_envs = episodes.reward.shape
    data = Experience(
        observation=(),
        first=jnp.zeros((num_steps + 1, num_envs), bool),
        action=jnp.zeros((num_steps, num_envs), jnp.int32),
        reward=episodes.reward,
        discount=episodes.discount,
        valid=episodes.valid,
        carry=(),
    )
    logits = jnp.log(jnp.asarray([probability, 1.0 - probability]))
    policy = jnp.broadcast_to(logits, (num_steps + 1, num_envs, 2))
    outputs = Outputs(policy, jnp.zeros((num_steps + 1, num_envs, rule.predictions)))
    targets = rule.apply(params, data, outputs, discount)
    flat = (episodes.returns, targets.policy, targets.prediction)
    return tuple(np.asarray(x).reshape(-1, *x.shape[2:]) for x in flat)  # type: ignore[return-value]


def draw_targets(figure: Figure, rule: UpdateRule, params: Params, discount: float) -> None:
    """Draw the rule's targets over the return: median, middle 80 %, and means."""
    draw_over_returns(
        figure,
        partial(targets_over_returns, rule, params, discount),
        "Policy target: how much likelier the action should become",
    )
