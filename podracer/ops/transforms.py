"""Transformations of values that are learned: squashing, and distributions on a fixed support."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float


def squash(x: Float[Array, "*b"], epsilon: float = 1e-3) -> Float[Array, "*b"]:
    """Compute `h(x) = sign(x) (sqrt(|x| + 1) - 1) + ε x`: large values on a smaller scale.

    Source: Pohlen et al. 2018, proposition A.2 (arXiv 1805.11593).
    """
    return jnp.sign(x) * (jnp.sqrt(jnp.abs(x) + 1.0) - 1.0) + epsilon * x


def unsquash(x: Float[Array, "*b"], epsilon: float = 1e-3) -> Float[Array, "*b"]:
    """Compute the inverse of `squash`."""
    shifted = jnp.abs(x) + 1.0 + epsilon
    # The paper's (root - 1) / (2 ε), without the difference of numbers that are nearly equal.
    quotient = 2.0 * shifted / (jnp.sqrt(1.0 + 4.0 * epsilon * shifted) + 1.0)
    return jnp.sign(x) * (quotient**2 - 1.0)


def two_hot(x: Float[Array, "*b"], support: Float[Array, "Z"]) -> Float[Array, "*b Z"]:
    """Return weights of an evenly spaced support, on the two atoms next to x, with mean x.

    x is clipped to the support. Source: Schrittwieser et al. 2020, appendix F (arXiv 1911.08265).
    """
    gap = support[1] - support[0]
    x = jnp.clip(x, support[0], support[-1])
    support = support.reshape((1,) * x.ndim + support.shape)
    return jnp.clip(1.0 - jnp.abs(x[..., None] - support) / gap, 0.0, 1.0)
