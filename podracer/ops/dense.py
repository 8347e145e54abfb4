"""A matrix product whose weight gradient is fast on a CPU.

XLA's CPU backend folds the transpose of the activations into the gradient's product, and then takes
a slow path for it. Behind a barrier the transpose is computed first and the product is a plain one.
`benchmarks/dense.py` measures it.
"""

# Types of JAX itself are partly unknown to pyright.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownLambdaType=false

from __future__ import annotations

import jax
import numpy as np
from jaxtyping import Array, Float


@jax.custom_vjp
def dense(x: Float[Array, "*b n"], w: Float[Array, "n m"]) -> Float[Array, "*b m"]:
    """Compute `x @ w`."""
    return x @ w


def affine(
    x: Float[Array, "*b n"],
    w: Float[Array | np.ndarray, "n m"],
    bias: Float[Array | np.ndarray, " m"],
) -> Float[Array, "*b m"]:
    """Compute `x @ w + bias`."""
    return dense(x, w) + bias.reshape((1,) * (x.ndim - 1) + bias.shape)


def _gradients(saved: tuple[jax.Array, jax.Array], g: jax.Array):
    x, w = saved
    return g @ w.T, transposed_product(x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1]))


def transposed_product(x: Float[Array, "N n"], g: Float[Array, "N m"]) -> Float[Array, "n m"]:
    """Compute `xᵀ g`, the gradient of a weight from inputs `x` and gradients of outputs `g`."""
    return jax.lax.platform_dependent(x, g, cpu=_transposed_first, default=lambda x, g: x.T @ g)


def _transposed_first(x: jax.Array, g: jax.Array) -> jax.Array:
    """Compute `xᵀ g` by transposing the smaller of the two."""
    barrier = jax.lax.optimization_barrier
    if x.shape[-1] <= g.shape[-1]:
        return barrier(x.T) @ g
    return barrier(barrier(g.T) @ x).T


dense.defvjp(lambda x, w: (x @ w, (x, w)), _gradients)
