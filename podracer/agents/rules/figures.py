"""Figure of a learned rule: its targets as functions of the return that followed an action."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.agents.rules.lifetimes import Experience
from podracer.ops.returns import generalized_advantages

_BINS = 15
_PROBABILITIES = (0.1, 0.5, 0.9)  # policies give to the action taken
_EPISODES, _STEPS = 2000, 20


Targets = Callable[[float], tuple[jax.Array, jax.Array, jax.Array]]
"""Function of the probability of actions, which applies a rule to synthetic episodes.

It returns the discounted return that follows each step and the policy target, f32 `[T, B]`, and the
prediction target `[T, B, m]`."""


def synthetic_episodes(discount: float) -> tuple[Experience, jax.Array]:
    """Return 2000 environments of 20 steps with random rewards and ends, and discounted returns.

    One step in seven has a reward. The actions are all 0. Returns `[T, B]` follow each step.
    """
    keys = jax.random.split(jax.random.key(0), 3)
    shape = (_STEPS, _EPISODES)
    is_rewarded = jax.random.bernoulli(keys[0], 0.15, shape)
    reward = jnp.where(is_rewarded, jax.random.normal(keys[1], shape), 0.0)
    continues = (~jax.random.bernoulli(keys[2], 0.05, shape)).astype(jnp.float32)
    valid, zeros = jnp.ones(shape, bool), jnp.zeros(shape)
    returns = generalized_advantages(zeros, zeros, reward, discount * continues, valid, 1.0)
    data = Experience(
        observation=(),
        first=jnp.zeros((_STEPS + 1, _EPISODES), bool),
        action=jnp.zeros(shape, jnp.int32),
        reward=reward,
        discount=continues,
        valid=valid,
        carry=(),
    )
    return data, returns


def figures_over_returns(targets: Targets, title: str) -> list[dict[str, Any]]:
    """Return plotly figures of a rule's targets over the return: median, middle 80 %, and means.

    The title describes the policy target, `[T, B]` as the returns are; the prediction target is
    `[T, B, m]`.
    """

    def flat_targets(probability: float) -> tuple[np.ndarray, ...]:
        arrays = [np.asarray(x) for x in targets(probability)]
        return tuple(x.reshape(arrays[0].size, *x.shape[2:]) for x in arrays)

    policy_traces = []
    for probability in _PROBABILITIES:
        returns, policy_targets, _ = flat_targets(probability)
        centers, members = _bins(returns)
        percentiles = [np.percentile(policy_targets[steps], [10, 50, 90]) for steps in members]
        low, middle, high = np.array(percentiles).T
        text = f"probability {probability:.0%}"
        spread = {"type": "data", "symmetric": False, "array": high - middle, "thickness": 0.8}
        errors = {**spread, "arrayminus": middle - low, "width": 2}
        trace = {"x": centers, "y": middle, "name": text, "text": text, "error_y": errors}
        policy_traces.append(trace)
    returns, _, prediction_targets = flat_targets(0.5)
    centers, members = _bins(returns)
    shares = np.array([prediction_targets[steps].mean(0) for steps in members])
    categories = [
        {"x": centers, "y": share, "text": f"category {index}", "stackgroup": "all"}
        for index, share in enumerate(shares.T)
    ]
    axis = {"xaxis": {"title": {"text": "return"}}}
    legend = {"showlegend": True, "legend": {"orientation": "h", "y": -0.25}}
    predicted = {"text": "Prediction target: probability of each category"}
    return [
        {"data": policy_traces, "layout": {"title": {"text": title}, **axis, **legend}},
        {"data": categories, "layout": {"title": predicted, **axis}},
    ]


def _bins(returns: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return centers and members (indices) of the bins with more than 20 members.

    Bins are equally wide and cover the middle 98 % of the returns.
    """
    low, high = np.percentile(returns, [1, 99])
    edges = np.linspace(low, high, _BINS + 1)
    bin_index = np.digitize(returns, edges) - 1
    members = [np.flatnonzero(bin_index == i) for i in range(_BINS)]
    full = [i for i, indices in enumerate(members) if len(indices) > 20]
    return (edges[:-1] + edges[1:])[full] / 2, [members[i] for i in full]
