"""Figure of a learned update rule: its targets as functions of the return.

The rule is applied to episodes of a synthetic student with a constant policy and a uniform
prediction, and with random rewards. Its targets then depend on the rewards that follow an action.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from podracer.agents.lpg.rule import Experience, Outputs, UpdateRule
from podracer.ops.returns import generalized_advantages
from podracer.types import Params

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_EPISODES, _STEPS, _BINS = 2000, 20, 15
_PROBABILITIES = (0.1, 0.5, 0.9)  # of the action that was taken


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
    axes = figure.add_subplot(1, 2, 1)
    for index, probability in enumerate(_PROBABILITIES):
        returns, policy_targets, _ = targets_over_returns(rule, params, discount, probability)
        centers, members = _bins(returns)
        percentiles = [np.percentile(policy_targets[steps], [10, 50, 90]) for steps in members]
        low, middle, high = np.array(percentiles).T
        axes.fill_between(centers, low, high, color=f"C{index}", alpha=0.2, lw=0)
        label = f"probability {probability:.0%}"
        axes.plot(centers, middle, color=f"C{index}", lw=1.6, label=label)
    axes.legend(frameon=False)
    axes.set(title="Policy target: how much likelier the action should become", xlabel="return")
    axes = figure.add_subplot(1, 2, 2)
    returns, _, prediction_targets = targets_over_returns(rule, params, discount, 0.5)
    centers, members = _bins(returns)
    shares = np.array([prediction_targets[steps].mean(0) for steps in members])
    axes.stackplot(
        centers, shares.T, colors=[f"C{i % 8}" for i in range(shares.shape[1])], alpha=0.8
    )
    axes.set(title="Prediction target: probability of each category", xlabel="return", ylim=(0, 1))


def _bins(returns: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """Equally wide bins over the middle 98 % of the returns.

    Returns the centers of those with more than 20 members, and the indices of the members.
    """
    low, high = np.percentile(returns, [1, 99])
    edges = np.linspace(low, high, _BINS + 1)
    bin_index = np.digitize(returns, edges) - 1
    members = [np.flatnonzero(bin_index == i) for i in range(_BINS)]
    full = [i for i, indices in enumerate(members) if len(indices) > 20]
    return (edges[:-1] + edges[1:])[full] / 2, [members[i] for i in full]
