"""Figure of a DiscoRL rule: its targets as functions of the return.

The rule is applied, with the memory of a new lifetime, to episodes of a synthetic student with a
constant policy, uniform predictions and values of 0, and with random rewards.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from podracer.agents.rules.disco.network import Outputs
from podracer.agents.rules.disco.rule import RuleParams, apply_rule, init_memory
from podracer.agents.rules.disco.values import estimate_values, init_moments
from podracer.agents.rules.figures import figures_over_returns, synthetic_episodes


def targets_over_returns(
    params: RuleParams, discount: float, trace_lambda: float, probability: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Apply the rule to synthetic episodes in which the actions taken have this probability.

    Returns the discounted return that follows each step and the probability that the policy's
    target gives to the action taken, `[T, B]`, and the target of y `[T, B, m]`.
    """
    data, returns = synthetic_episodes(discount)
    logits = jnp.log(jnp.asarray([probability, 1.0 - probability]))
    timesteps, predictions = data.first.shape, jnp.asarray(params.prediction.bias).size
    outputs = Outputs(
        policy=jnp.broadcast_to(logits, (*timesteps, 2)),
        prediction=jnp.zeros((*timesteps, predictions)),
        action_prediction=jnp.zeros((*timesteps, 2, predictions)),
        action_value=jnp.zeros((*timesteps, 2, 3)),
        next_policy=jnp.zeros((*timesteps, 2, 2)),
    )
    data = dataclasses.replace(data, behavior=outputs.policy[:-1])
    support = jnp.asarray([-1.0, 0.0, 1.0])
    values = estimate_values(outputs, outputs, data, support, discount, trace_lambda)
    advantages = values.advantages
    moments, _ = init_moments().update(
        [jnp.ones(()), jnp.mean(advantages), jnp.mean(advantages**2)]
    )
    memory = init_memory(jnp.asarray(params.lifetime.hidden).shape[0])
    values = values.normalized(moments)
    targets, _ = apply_rule(params, memory, data, outputs, outputs, values)
    policy_target = jax.nn.softmax(targets.policy)[..., 0]
    return returns, policy_target, jax.nn.softmax(targets.prediction)


def draw_targets(params: RuleParams, discount: float, trace_lambda: float) -> list[dict[str, Any]]:
    """Draw the rule's targets over the return: median, middle 80 %, and means."""
    return figures_over_returns(
        partial(targets_over_returns, params, discount, trace_lambda),
        "Policy target: probability of the action taken",
    )
