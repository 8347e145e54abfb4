"""Distributions over actions: samples, log-probabilities, entropies.

The parameters of a policy are one array, whose last axis has `num_outputs` elements: logits of
discrete actions, those of several at once one after another, or the mean and the logarithm of the
scale of each coordinate.
"""

from __future__ import annotations

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from podracer.fields import static, struct
from podracer.ops.random import random_uniform, random_words, unit
from podracer.types import ActionSpace, Continuous, Discrete, MultiDiscrete

LOG_SCALE_BOUNDS = (-5.0, 2.0)
"""Bounds that the logarithm of a Gaussian's scale is clipped to."""

_BELOW_ONE = np.nextafter(np.float32(1), np.float32(0))


@struct
class Categorical:
    """Distribution over discrete actions, int32 `[*b]`.

    A logit of -inf makes an action impossible for samples and log-probabilities; entropies and
    divergences need finite ones, as masked actions have.
    """

    logits: Float[Array, "*b A"]

    def sample(self, keys: jax.Array) -> jax.Array:
        """Sample an action for each key `[B]` by inverting the cumulative distribution.

        It takes one uniform number for a sample, where the Gumbel trick takes one for each action.
        """
        return self.at(random_uniform(keys))

    def at(self, uniform: Float[Array, "*b"]) -> jax.Array:
        """Return the actions at these places, in [0, 1), of the cumulative distribution."""
        probs = jax.nn.softmax(self.logits)
        # Where sums of many terms round, only possible actions may be chosen, and one always is.
        cumulative = jnp.where(probs > 0, jnp.cumsum(probs, axis=-1), 0.0)
        threshold = uniform * jnp.max(cumulative, axis=-1)
        actions = jnp.arange(probs.shape[-1], dtype=jnp.int32)
        candidates = jnp.where(cumulative > threshold[..., None], actions, probs.shape[-1])
        return jnp.min(candidates, axis=-1)

    def mode(self) -> jax.Array:
        return jnp.argmax(self.logits, axis=-1).astype(jnp.int32)

    def log_prob(self, action: jax.Array) -> Float[Array, "*b"]:
        log_probs = jax.nn.log_softmax(self.logits)
        # A one-hot product: its gradient is a product too, where a gather's is a slow scatter.
        one_hot = jax.nn.one_hot(action, self.logits.shape[-1], dtype=log_probs.dtype)
        return jnp.sum(jnp.where(one_hot > 0, log_probs, 0.0), axis=-1)

    def entropy(self) -> Float[Array, "*b"]:
        log_probs = jax.nn.log_softmax(self.logits)
        return -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)

    def divergence(self, reference: Categorical) -> Float[Array, "*b"]:
        """Compute the Kullback-Leibler divergence KL(self || reference)."""
        logits = (self.logits, reference.logits)
        log_probs, other_log_probs = map(jax.nn.log_softmax, logits)
        return jnp.sum(jnp.exp(log_probs) * (log_probs - other_log_probs), axis=-1)


@struct
class MultiCategorical:
    """Distribution over several discrete actions at once, int32 `[*b, n]`, which are independent.

    Logits are concatenated, one component after another.
    """

    logits: Float[Array, "*b A"]
    num_actions: tuple[int, ...] = static()

    def sample(self, keys: jax.Array) -> jax.Array:
        uniform = unit(random_words(keys, len(self.num_actions)))
        actions = [part.at(uniform[..., i]) for i, part in enumerate(self.components())]
        return jnp.concatenate([action[..., None] for action in actions], axis=-1)

    def mode(self) -> jax.Array:
        return jnp.concatenate([part.mode()[..., None] for part in self.components()], axis=-1)

    def log_prob(self, action: jax.Array) -> Float[Array, "*b"]:
        log_probs = [part.log_prob(action[..., i]) for i, part in enumerate(self.components())]
        return sum(log_probs[1:], log_probs[0])

    def entropy(self) -> Float[Array, "*b"]:
        entropies = [part.entropy() for part in self.components()]
        return sum(entropies[1:], entropies[0])

    def divergence(self, reference: MultiCategorical) -> Float[Array, "*b"]:
        """Compute the Kullback-Leibler divergence KL(self || reference)."""
        pairs = zip(self.components(), reference.components(), strict=True)
        divergences = [part.divergence(other_part) for part, other_part in pairs]
        return sum(divergences[1:], divergences[0])

    def components(self) -> list[Categorical]:
        """Return the distribution of each component."""
        ends = list(itertools.accumulate(self.num_actions))
        return [Categorical(logits) for logits in jnp.split(self.logits, ends[:-1], axis=-1)]


@struct
class Normal:
    """Diagonal Gaussian distribution, actions f32 `[*b, size]`."""

    mean: Float[Array, "*b size"]
    log_scale: Float[Array, "*b size"]

    def sample(self, keys: jax.Array) -> jax.Array:
        size = self.mean.shape[-1]
        noise = jax.vmap(lambda key: jax.random.normal(key, (size,)))(keys)
        return self.mean + jnp.exp(self.log_scale) * noise

    def mode(self) -> jax.Array:
        return self.mean

    def log_prob(self, action: jax.Array) -> Float[Array, "*b"]:
        z = (action - self.mean) * jnp.exp(-self.log_scale)
        return jnp.sum(self.log_density(z), axis=-1)

    def log_density(self, z: jax.Array) -> jax.Array:
        """Return the logarithm of the density of each coordinate, `z` scales from its mean."""
        return -0.5 * z**2 - self.log_scale - 0.5 * math.log(2 * math.pi)

    def entropy(self) -> Float[Array, "*b"]:
        return jnp.sum(self.log_scale + 0.5 * math.log(2 * math.pi * math.e), axis=-1)

    def divergence(self, reference: Normal) -> Float[Array, "*b"]:
        """Compute the Kullback-Leibler divergence KL(self || reference)."""
        log_ratio = self.log_scale - reference.log_scale
        z = (self.mean - reference.mean) * jnp.exp(-reference.log_scale)
        return jnp.sum(0.5 * (jnp.expm1(2 * log_ratio) + z**2) - log_ratio, axis=-1)


@struct
class SquashedNormal:
    """Diagonal Gaussian distribution squashed by tanh: coordinates in (-1, 1), f32 `[*b, size]`.

    Source: Haarnoja et al. 2018, appendix C (arXiv 1812.05905).
    """

    mean: Float[Array, "*b size"]
    log_scale: Float[Array, "*b size"]

    def mode(self) -> jax.Array:
        return jnp.tanh(self.mean)

    def sample(self, keys: jax.Array) -> tuple[jax.Array, Float[Array, "*b"]]:
        """Return an action for each key `[B]`, differentiable, and its log-probability.

        They come together because near a bound the action alone does not determine its
        log-probability in float32.
        """
        normal = Normal(self.mean, self.log_scale)
        raw = normal.sample(keys)
        # log(1 - tanh(x)^2), without losing it to rounding where |x| is large.
        slope = 2.0 * (math.log(2.0) - raw - jax.nn.softplus(-2.0 * raw))
        return jnp.tanh(raw), normal.log_prob(raw) - jnp.sum(slope, axis=-1)

    def log_prob(self, action: jax.Array) -> Float[Array, "*b"]:
        """Return the log-probability of actions inside of (-1, 1)."""
        normal, slope = Normal(self.mean, self.log_scale), jnp.log1p(-(action**2))
        return normal.log_prob(jnp.arctanh(action)) - jnp.sum(slope, axis=-1)


ActionDistribution = Categorical | MultiCategorical | Normal


def num_outputs(space: ActionSpace) -> int:
    """Return the number of network outputs that describe a policy over a space of actions."""
    if isinstance(space, Discrete):
        return space.num_actions
    return sum(space.num_actions) if isinstance(space, MultiDiscrete) else 2 * space.size


def policy(space: ActionSpace, outputs: Float[Array, "*b O"]) -> ActionDistribution:
    """Return the distribution that a network's outputs describe.

    Continuous actions are in units in which the environment's bounds are -1 and 1, see `to_bounds`.
    Their scales are clipped to exp of `LOG_SCALE_BOUNDS`.
    """
    if isinstance(space, Discrete):
        return Categorical(outputs)
    if isinstance(space, MultiDiscrete):
        return MultiCategorical(outputs, space.num_actions)
    mean, log_scale = jnp.split(outputs, 2, axis=-1)
    return Normal(mean, jnp.clip(log_scale, *LOG_SCALE_BOUNDS))


def parameters(distribution: ActionDistribution) -> jax.Array:
    """Compute the inverse of `policy`, f32 `[*b, num_outputs]`."""
    if isinstance(distribution, Normal):
        return jnp.concatenate([distribution.mean, distribution.log_scale], axis=-1)
    return distribution.logits


def to_bounds(space: ActionSpace, action: jax.Array) -> jax.Array:
    """Return an action in the environment's units: clipped to [-1, 1], scaled to the bounds."""
    if not isinstance(space, Continuous):
        return action
    low, high = _bounds(space, action)
    scaled = low + (jnp.clip(action, -1.0, 1.0) + 1.0) * 0.5 * (high - low)
    # Rounding may miss the upper bound by a step; so what is to be there is put beyond it. The clip
    # comes last, or two programs would round the sum otherwise.
    return jnp.clip(jnp.where(action >= 1.0, jnp.inf, scaled), low, high)


def from_bounds(space: ActionSpace, action: jax.Array) -> jax.Array:
    """Compute the inverse of `to_bounds`: -1 and 1 at the bounds or beyond, and only there."""
    if not isinstance(space, Continuous):
        return action
    low, high = _bounds(space, action)
    scaled = (action - low) / (high - low) * 2.0 - 1.0
    # Decided before scaling: a compiled program multiplies by a rounded reciprocal of the width.
    clipped = jnp.clip(scaled, -_BELOW_ONE, _BELOW_ONE)
    return jnp.where(action >= high, 1.0, jnp.where(action <= low, -1.0, clipped))


def _bounds(space: Continuous, action: jax.Array) -> tuple[jax.Array, jax.Array]:
    shape = (1,) * (action.ndim - 1) + (space.size,)
    return jnp.asarray(space.low).reshape(shape), jnp.asarray(space.high).reshape(shape)
