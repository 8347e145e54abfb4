"""Figure of a learned update rule: its targets as functions of the return.

The rule is applied to episodes of a synthetic student with a constant policy and a uniform
prediction, and with random rewards. Its targets then depend on the rewards that follow an action.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from podracer.agents.rules.figures import figures_over_returns, synthetic_episodes
from podracer.agents.rules.lpg.rule import Outputs, UpdateRule
from podracer.types import Params


def targets_over_returns(
    rule: UpdateRule, params: Params, discount: float, probability: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Apply the rule to synthetic episodes in which actions have this probability.

    Returns the discounted return that follows each step and the policy target, `[T, B]`, and the
    prediction target `[T, B, m]`.
    """
    data, returns = synthetic_episodes(discount)
    logits = jnp.log(jnp.asarray([probability, 1.0 - probability]))
    policy = jnp.broadcast_to(logits, (*data.first.shape, 2))
    outputs = Outputs(policy, jnp.zeros((*data.first.shape, rule.predictions)))
    targets = rule.apply(params, data, outputs, discount)
    return returns, targets.policy, targets.prediction


def draw_targets(rule: UpdateRule, params: Params, discount: float) -> list[dict[str, Any]]:
    """Draw the rule's targets over the return: median, middle 80 %, and means."""
    return figures_over_returns(
        partial(targets_over_returns, rule, params, discount),
        "Policy target: how much likelier the action should become",
    )
