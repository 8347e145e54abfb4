"""Clipped objectives of PPO, item by item.

Source: Schulman et al. 2017 (arXiv 1707.06347).
"""

# Types of JAX itself are partly unknown to pyright.
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float


def clipped_surrogate(
    ratio: Float[Array, "*b"], advantage: Float[Array, "*b"], epsilon: float | Float[Array, ""]
) -> Float[Array, "*b"]:
    """Return the clipped objective `min(r A, clip(r, 1 - ε, 1 + ε) A)`, equation 7.

    `ratio` r is that of the probabilities of the action under the new and the old policy.
    """
    clipped_ratio = jnp.clip(ratio, 1.0 - epsilon, 1.0 + epsilon)
    return jnp.minimum(ratio * advantage, clipped_ratio * advantage)


def clipped_value_error(
    value: Float[Array, "*b"],
    old_value: Float[Array, "*b"],
    target: Float[Array, "*b"],
    epsilon: float | Float[Array, ""],
) -> Float[Array, "*b"]:
    """Return the squared error of a value, or of one at most ε from the old, whichever is larger.

    It is not in the paper, but in its code; Engstrom et al. 2020, section 3 (arXiv 2005.12729).
    """
    clipped_value = old_value + jnp.clip(value - old_value, -epsilon, epsilon)
    return jnp.maximum((value - target) ** 2, (clipped_value - target) ** 2)


def kl_estimate(log_ratio: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """Return `r - 1 - log r`, whose mean over samples of the old policy estimates KL(old, new).

    `log_ratio` is the logarithm of the ratio r of `clipped_surrogate`. Near 0, where the difference
    would be rounding errors alone, the result is the first terms of its series.
    Source: Schulman 2020, "Approximating KL divergence".
    """
    x = log_ratio
    series = x * x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120))))
    return jnp.where(jnp.abs(x) < 0.2, series, jnp.exp(x) - 1.0 - x)
