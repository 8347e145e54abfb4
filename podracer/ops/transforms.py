"""Transformations of values that are learned: squashing, and distributions on a fixed support."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

_EPSILON = 1e-3  # ε of the squashing function


def squash(x: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """Compute `h(x) = sign(x) (sqrt(|x| + 1) - 1) + ε x`: large values on a smaller scale.

    Written as a quotient: near 0 the difference would lose all digits. Source: Pohlen et al. 2018,
    proposition A.2 (arXiv 1805.11593).
    """
    return x * (1.0 / (jnp.sqrt(jnp.abs(x) + 1.0) + 1.0) + _EPSILON)


def unsquash(x: Float[Array, "*b"]) -> Float[Array, "*b"]:
    """Compute the inverse of `squash`.

    The result y solves `ε d² + (1 + 2 ε) d = |x|` for `d = sqrt(|y| + 1) - 1`. Differences of
    numbers that are nearly equal would lose digits. XLA fuses a product and a sum or not, depending
    on the loop around them, so there is none, and every program gives the same bits.
    """
    slope = 1.0 + 2.0 * _EPSILON
    root = jnp.sqrt(4.0 * _EPSILON * (jnp.abs(x) + slope**2 / (4.0 * _EPSILON)))
    d = 2.0 * jnp.abs(x) / (slope + root)
    return jnp.sign(x) * d * (d + 2.0)


def evenly_spaced(low: float, high: float, num: int) -> Float[Array, "Z"]:
    """Return `num` evenly spaced numbers from `low` to `high`, as a constant.

    Computed in a program, their last bits would depend on the loop around them.
    """
    return jnp.asarray(np.linspace(low, high, num), jnp.float32)


def unsquashed_mean(logits: Float[Array, "*b Z"], support: Float[Array, "Z"]) -> Float[Array, "*b"]:
    """Compute `unsquash` of the means of categorical distributions over squashed numbers."""
    # At full precision: TF32 or bfloat16 would round values to three or two digits.
    mean = jnp.matmul(jax.nn.softmax(logits), support, precision=jax.lax.Precision.HIGHEST)
    return unsquash(mean)


def two_hot(x: Float[Array, "*b"], support: Float[Array, "Z"]) -> Float[Array, "*b Z"]:
    """Return weights of an evenly spaced support, on the two atoms next to x, with mean x.

    x is clipped to the support. Source: Schrittwieser et al. 2020, appendix F (arXiv 1911.08265).
    """
    gap = support[1] - support[0]
    x = jnp.clip(x, support[0], support[-1])
    support = support.reshape((1,) * x.ndim + support.shape)
    # From the neighbors of each atom: one less the distance to it would round small weights away.
    from_lower, to_upper = x[..., None] - (support - gap), (support + gap) - x[..., None]
    return jnp.clip(jnp.minimum(from_lower, to_upper) / gap, 0.0, 1.0)
