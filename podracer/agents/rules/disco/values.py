"""Action values of a DiscoRL student: categorical, learned by Retrace, compared as advantages."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from podracer.agents.common.value_based import at_action
from podracer.agents.rules.disco.network import Outputs
from podracer.agents.rules.lifetimes import Experience
from podracer.fields import struct
from podracer.ops.distributions import Categorical
from podracer.ops.returns import retrace
from podracer.ops.transforms import unsquashed_mean

_DECAY = 0.99  # for moving averages, as when the rule was discovered


@struct
class AdvantageMoments:
    """Exponential moving averages of advantages and of their squares, which begin at 0."""

    mean: jax.Array  # f32 []
    mean_square: jax.Array  # f32 []
    decay_product: jax.Array  # f32 [], 1 at first: corrects for that beginning, as in Adam

    def update(self, means: Sequence[jax.Array]) -> tuple[AdvantageMoments, jax.Array]:
        """Return the moments after another batch, and the share of its valid transitions.

        `means` over all transitions are those of `masked_powers`.
        """
        share, mean, mean_square = means
        share = jnp.maximum(share, 1e-8)
        moments = AdvantageMoments(
            _DECAY * self.mean + (1.0 - _DECAY) * (mean / share),
            _DECAY * self.mean_square + (1.0 - _DECAY) * (mean_square / share),
            _DECAY * self.decay_product,
        )
        return moments, share

    def normalize(self, x: jax.Array) -> jax.Array:
        """Return values with the mean subtracted and divided by the standard deviation."""
        weight = 1.0 - self.decay_product
        mean = self.mean / weight
        variance = jnp.maximum(0.0, self.mean_square / weight - mean**2)
        return (x - mean) / (jnp.sqrt(variance + 1e-12) + 1e-6)


def init_moments() -> AdvantageMoments:
    """Return the moments before the first batch."""
    return AdvantageMoments(jnp.float32(0), jnp.float32(0), jnp.float32(1))


def masked_powers(advantages: jax.Array, mask: jax.Array) -> tuple[jax.Array, ...]:
    """Return what moments are updated with means of: the mask, masked advantages, their squares."""
    advantages = mask * advantages
    return mask, advantages, advantages**2


@struct
class Values:
    """Values and advantages of T transitions between T+1 timesteps."""

    v: jax.Array  # state values under the policy, f32 [T+1, B]
    q: jax.Array  # action values by the target parameters, f32 [T+1, B, A]
    q_advantages: jax.Array  # for all actions by the target parameters, f32 [T+1, B, A]
    targets: jax.Array  # Retrace targets of the actions taken, f32 [T, B]
    advantages: jax.Array  # these targets minus the target parameters' value, f32 [T, B]
    normalized_advantages: jax.Array  # f32 [T, B]
    normalized_q_advantages: jax.Array  # f32 [T+1, B, A]

    def normalized(self, moments: AdvantageMoments) -> Values:
        return dataclasses.replace(
            self,
            normalized_advantages=moments.normalize(self.advantages),
            normalized_q_advantages=moments.normalize(self.q_advantages),
        )


def estimate_values(
    outputs: Outputs,
    target_outputs: Outputs,
    data: Experience,
    support: jax.Array,
    discount: float | jax.Array,
    trace_lambda: float | jax.Array,
) -> Values:
    """Return the values of T transitions, from outputs `[T+1, B, ...]`, advantages as they are."""
    q = unsquashed_mean(outputs.action_value, support)
    target_q = unsquashed_mean(target_outputs.action_value, support)
    probabilities = jax.nn.softmax(outputs.policy)
    target_v = jnp.sum(probabilities * target_q, axis=-1)
    log_ratio = Categorical(outputs.policy[:-1]).log_prob(data.action)
    log_ratio = log_ratio - Categorical(data.behavior).log_prob(data.action)
    targets = retrace(
        at_action(target_q[:-1], data.action),
        target_v[1:],
        data.reward,
        discount * data.discount,
        data.valid,
        jnp.exp(log_ratio),
        trace_lambda,
    )
    advantages, q_advantages = targets - target_v[:-1], target_q - target_v[..., None]
    return Values(
        v=jnp.sum(probabilities * q, axis=-1),
        q=target_q,
        q_advantages=q_advantages,
        targets=targets,
        advantages=advantages,
        normalized_advantages=advantages,
        normalized_q_advantages=q_advantages,
    )
