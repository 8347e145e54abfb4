"""Figure of a learned update rule: its targets as functions of the return.

The rule is applied to episodes of a synthetic student with a constant policy and a uniform
prediction, and with random rewards. Its targets then depend on the rewards that follow an action.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from podracer.agents.common.lifetimes import Experience
from podracer.agents.common.rule_figures import draw_over_returns
from podracer.agents.lpg.rule import Outputs, UpdateRule
from podracer.ops.returns import generalized_advantages
from podracer.types import Params

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_EPISODES, _STEPS = 2000, 20


def targets_over_returns(
    rule: UpdateRule, params: Params, discount: float, probability: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Apply the rule to synthetic episodes in which actions have this probability.

    Returns, for each of n steps, the discounted return that follows `[n]`, the policy target
    `[n]` and the prediction target `[n, m]`.
    """
    keys = jax.random.split(jax.random.key(0), 3)
    shape = (_STEPS, _EPISODES)
    is_rewarded = jax.random.bernoulli(keys[0], 0.15, shape)
    reward = jnp.where(is_rewarded, jax.random.normal(keys[1], shape), 0.0)
    continues = (~jax.random.bernoulli(keys[2], 0.05, shape)).astype(jnp.float32)
    valid = jnp.ones(shape, bool)
    data = Experience(
        observation=(),
        first=jnp.zeros((_STEPS + 1, _EPISODES), bool),
        action=jnp.zeros(shape, jnp.int32),
        reward=reward,
        discount=continues,
        valid=valid,
        carry=(),
    )
    logits = jnp.log(jnp.asarray([probability, 1.0 - probability]))
    policy = jnp.broadcast_to(logits, (_STEPS + 1, _EPISODES, 2))
    outputs = Outputs(policy, jnp.zeros((_STEPS + 1, _EPISODES, rule.predictions)))
    targets = rule.apply(params, data, outputs, discount)
    zeros = jnp.zeros(shape)
    returns = generalized_advantages(zeros, zeros, reward, discount * continues, valid, 1.0)
    flat = (returns, targets.policy, targets.prediction)
    return tuple(np.asarray(x).reshape(-1, *x.shape[2:]) for x in flat)  # type: ignore[return-value]


def draw_targets(figure: Figure, rule: UpdateRule, params: Params, discount: float) -> None:
    """Draw the rule's targets over the return: median, middle 80 %, and means."""
    draw_over_returns(
        figure,
        partial(targets_over_returns, rule, params, discount),
        "Policy target: how much likelier the action should become",
    )
