"""Likelihood of recorded actions that were clipped to their bounds."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from podracer.ops.distributions import ActionDistribution, Normal


def clipped_log_prob(distribution: ActionDistribution, action: jax.Array) -> Float[Array, "*b"]:
    """Return log-probabilities of actions that are clipped to [-1, 1], as `to_bounds` does.

    A coordinate at a bound has the probability of all samples beyond it (Tobin 1958). Its density
    alone would draw the mean inside.
    """
    if not isinstance(distribution, Normal):
        return distribution.log_prob(action)
    z = (action - distribution.mean) * jnp.exp(-distribution.log_scale)
    density, tail = distribution.log_density(z), _log_tail(z * jnp.sign(action))
    return jnp.sum(jnp.where(jnp.abs(action) < 1, density, tail), axis=-1)


def _log_tail(z: jax.Array) -> jax.Array:
    """Return the logarithm of the probability that a standard normal number exceeds `z`.

    Far out the gradient of `log_ndtr` is a difference of large numbers: an expansion takes over.
    """
    is_far = z > 20.0
    far = jnp.where(is_far, z, 20.0)
    expansion = -0.5 * far**2 - jnp.log(far * math.sqrt(2 * math.pi)) - far**-2
    return jnp.where(is_far, expansion, jax.scipy.special.log_ndtr(-jnp.where(is_far, 0.0, z)))
