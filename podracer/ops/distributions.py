"""Policies as distributions: what the network gives, to samples, log-probabilities and entropies.

A policy's parameters are one array whose last axis is what `num_outputs` says: logits for discrete
actions; for continuous ones a mean and the logarithm of a scale for each coordinate.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from podracer.ops.random import random_uniform
from podracer.types import Continuous, Discrete, struct

LOG_SCALE_BOUNDS = (-5.0, 2.0)


@struct
class Categorical:
    """Discrete actions, int32 `[*b]`, from logits `[*b, A]`."""

    logits: jax.Array

    def sample(self, keys: jax.Array) -> jax.Array:
        """One action for each key `[B]`, by inverting the distribution function: one uniform
        number a sample, where the Gumbel trick needs one for each action."""
        uniform = random_uniform(keys)
        below = jnp.cumsum(jax.nn.softmax(self.logits), axis=-1)
        # Scaled by the actual total, so that rounding can never choose an impossible action.
        threshold = uniform[..., None] * below[..., -1:]
        return jnp.sum(below[..., :-1] <= threshold, axis=-1, dtype=jnp.int32)

    def mode(self) -> jax.Array:
        return jnp.argmax(self.logits, axis=-1).astype(jnp.int32)

    def log_prob(self, action: jax.Array) -> Float[Array, "*b"]:
        log_probs = jax.nn.log_softmax(self.logits)
        # A one-hot product: its gradient is a product too, where a gather's is a slow scatter.
        chosen = jax.nn.one_hot(action, self.logits.shape[-1], dtype=log_probs.dtype)
        return jnp.sum(jnp.where(chosen > 0, log_probs, 0.0), axis=-1)

    def entropy(self) -> Float[Array, "*b"]:
        log_probs = jax.nn.log_softmax(self.logits)
        return -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)

    def divergence(self, other: Categorical) -> Float[Array, "*b"]:
        """Kullback-Leibler divergence of the other from this one."""
        log_probs, others = jax.nn.log_softmax(self.logits), jax.nn.log_softmax(other.logits)
        return jnp.sum(jnp.exp(log_probs) * (log_probs - others), axis=-1)


@struct
class Normal:
    """Independent Gaussian coordinates, actions f32 `[*b, size]`."""

    mean: jax.Array
    log_scale: jax.Array

    def sample(self, keys: jax.Array) -> jax.Array:
        size = self.mean.shape[-1]
        noise = jax.vmap(lambda key: jax.random.normal(key, (size,)))(keys)
        return self.mean + jnp.exp(self.log_scale) * noise

    def mode(self) -> jax.Array:
        return self.mean

    def log_prob(self, action: jax.Array) -> Float[Array, "*b"]:
        z = (action - self.mean) * jnp.exp(-self.log_scale)
        return jnp.sum(-0.5 * z**2 - self.log_scale - 0.5 * math.log(2 * math.pi), axis=-1)

    def entropy(self) -> Float[Array, "*b"]:
        return jnp.sum(self.log_scale + 0.5 * math.log(2 * math.pi * math.e), axis=-1)

    def divergence(self, other: Normal) -> Float[Array, "*b"]:
        """Kullback-Leibler divergence of the other from this one."""
        change = self.log_scale - other.log_scale
        z = (self.mean - other.mean) * jnp.exp(-other.log_scale)
        return jnp.sum(0.5 * (jnp.exp(2 * change) + z**2 - 1) - change, axis=-1)


@struct
class SquashedNormal:
    """A Gaussian through tanh: coordinates in (-1, 1), f32 `[*b, size]`.

    Source: Haarnoja et al. 2018, appendix C (arXiv 1812.05905).
    """

    mean: jax.Array
    log_scale: jax.Array

    def mode(self) -> jax.Array:
        """The most likely one before tanh, after it."""
        return jnp.tanh(self.mean)

    def sample(self, keys: jax.Array) -> tuple[jax.Array, Float[Array, "*b"]]:
        """An action for each key `[B]`, differentiable, and its log-probability. Together, because
        that of an action near a bound cannot be told from the action alone."""
        normal = Normal(self.mean, self.log_scale)
        raw = normal.sample(keys)
        # log(1 - tanh(x)^2), without losing it to rounding where |x| is large.
        slope = 2.0 * (math.log(2.0) - raw - jax.nn.softplus(-2.0 * raw))
        return jnp.tanh(raw), normal.log_prob(raw) - jnp.sum(slope, axis=-1)


Policy = Categorical | Normal


def num_outputs(space: Discrete | Continuous) -> int:
    """How many numbers a network must give to describe a policy over this space."""
    return space.num_actions if isinstance(space, Discrete) else 2 * space.size


def policy(space: Discrete | Continuous, outputs: Float[Array, "*b O"]) -> Policy:
    """The distribution that a network's outputs describe.

    Continuous policies live in [-1, 1] a coordinate, the environment's bounds scaled to it; see
    `to_bounds`.
    """
    if isinstance(space, Discrete):
        return Categorical(outputs)
    mean, log_scale = jnp.split(outputs, 2, axis=-1)
    return Normal(mean, jnp.clip(log_scale, *LOG_SCALE_BOUNDS))


def to_bounds(space: Discrete | Continuous, action: jax.Array) -> jax.Array:
    """The agent's action in the environment's units: [-1, 1] clipped and scaled to the bounds."""
    if isinstance(space, Discrete):
        return action
    low, high = _bounds(space, action)
    return low + (jnp.clip(action, -1.0, 1.0) + 1.0) * 0.5 * (high - low)


def from_bounds(space: Continuous, action: jax.Array) -> jax.Array:
    """The inverse of `to_bounds` for continuous actions within the bounds."""
    low, high = _bounds(space, action)
    return (action - low) / (high - low) * 2.0 - 1.0


def _bounds(space: Continuous, action: jax.Array) -> tuple[jax.Array, jax.Array]:
    shape = (1,) * (action.ndim - 1) + (space.size,)
    return jnp.asarray(space.low).reshape(shape), jnp.asarray(space.high).reshape(shape)
