"""What an update rule has discovered, as a picture: what it asks for against the return.

The rule reads episodes of a made-up learner that prefers nothing and predicts nothing yet, with
random rewards. What it then asks for is what it makes of the rewards that follow an action.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from matplotlib.figure import Figure

from podracer.agents.lpg.rule import Experience, Outputs, UpdateRule
from podracer.ops.returns import generalized_advantages
from podracer.reports.curves import COLORS, render, style_axes
from podracer.types import Params

_EPISODES, _STEPS, _BINS = 2000, 20, 15
_CHANCES = (0.1, 0.5, 0.9)  # of the action that was taken


def targets(
    rule: UpdateRule, params: Params, discount: float, chance: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For actions taken with this chance: the discounted return from each on `[n]`, by how much
    the rule would have it more likely `[n]`, and what should have been predicted there `[n, m]`."""
    keys = jax.random.split(jax.random.key(0), 3)
    shape = (_STEPS, _EPISODES)
    some = jax.random.bernoulli(keys[0], 0.15, shape)
    reward = jnp.where(some, jax.random.normal(keys[1], shape), 0.0)
    going = (~jax.random.bernoulli(keys[2], 0.05, shape)).astype(jnp.float32)
    always = jnp.ones(shape, bool)
    data = Experience(
        (), jnp.zeros((_STEPS + 1, _EPISODES), bool), jnp.zeros(shape, jnp.int32), reward, going,
        always, (),
    )  # fmt: skip
    logits = jnp.log(jnp.asarray([chance, 1.0 - chance]))
    policy = jnp.broadcast_to(logits, (_STEPS + 1, _EPISODES, 2))
    blank = Outputs(policy, jnp.zeros((_STEPS + 1, _EPISODES, rule.predictions)))
    asked = rule.apply(params, data, blank, discount)
    nothing = jnp.zeros(shape)
    returns = generalized_advantages(nothing, nothing, reward, discount * going, always, 1.0)
    made = (returns, asked.policy, asked.prediction)
    return tuple(np.asarray(x).reshape(-1, *x.shape[2:]) for x in made)  # type: ignore[return-value]


def discovered(rule: UpdateRule, params: Params, discount: float) -> str:
    """Means over actions that led to about the same return, and the middle 80 % around them."""
    read = {chance: targets(rule, params, discount, chance) for chance in _CHANCES}

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot(1, 2, 1)
        for color, (chance, (returns, wanted, _)) in zip(COLORS, read.items(), strict=False):
            at, inside = _bins(returns)
            low, middle, high = np.array([np.percentile(wanted[i], [10, 50, 90]) for i in inside]).T
            axes.fill_between(at, low, high, color=color, alpha=0.2, lw=0)
            axes.plot(at, middle, color=color, lw=1.6, label=f"taken with {chance:.0%}")
        axes.legend(frameon=False, labelcolor=matplotlib.rcParams["text.color"])
        style_axes(axes, "How much more likely the action should become", "return that followed")
        axes = figure.add_subplot(1, 2, 2)
        returns, _, predicted = read[0.5]
        at, inside = _bins(returns)
        shares = np.array([predicted[i].mean(0) for i in inside])
        axes.stackplot(at, shares.T, colors=COLORS, alpha=0.8)
        axes.set_ylim(0, 1)
        style_axes(
            axes, "What should have been predicted: shares of its values", "return that followed"
        )

    return render("Targets of the learned rule over the return", 3.2, draw)


def _bins(returns: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """Equally wide bins over the middle 98 % of the returns: their centers, and what lies in each
    of those that are not nearly empty."""
    low, high = np.percentile(returns, [1, 99])
    edges = np.linspace(low, high, _BINS + 1)
    which = np.digitize(returns, edges) - 1
    inside = [np.flatnonzero(which == i) for i in range(_BINS)]
    full = [i for i, found in enumerate(inside) if len(found) > 20]
    return (edges[:-1] + edges[1:])[full] / 2, [inside[i] for i in full]
