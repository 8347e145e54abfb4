"""A long short-term memory read from the last step to the first, with a fast gradient.

Differentiating a scan adds up the weights' gradient step by step, in small products. Here the way
back keeps what reaches the gates, and the weights' gradient is one product over all steps.
`benchmarks/lpg.py` measures it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from podracer.ops.dense import transposed_product

Gates = Float[Array, "T B G"]  # G = 4 H: input, forget, cell and output gate


@jax.custom_vjp
def backward_lstm(
    pushed: Gates, weight: Float[Array, "H G"], ends: Bool[Array, "T B"]
) -> Float[Array, "T B H"]:
    """Hidden states `[T, B, H]`, the last step's first; memory is empty where `ends` is set.

        i, f, g, o = pushed_t + h_{t+1} weight
        c_t = sigmoid(f) c_{t+1} + sigmoid(i) tanh(g)        h_t = sigmoid(o) tanh(c_t)

    Source: Hochreiter and Schmidhuber 1997, with the forget gate of Gers et al. 2000.
    """
    return _run(pushed, weight, ends)[0]


def _run(pushed: jax.Array, weight: jax.Array, ends: jax.Array):
    H = weight.shape[0]
    # A sigmoid is a tanh of half its argument: all gates are one call, behind a barrier, or the
    # compiler computes them anew wherever they are used.
    half = np.repeat(np.asarray([0.5, 0.5, 1.0, 0.5], np.float32), H)[None]

    def step(carry: tuple[jax.Array, jax.Array], x: tuple[jax.Array, jax.Array]):
        gates, end = x
        before, cell = (jnp.where(end[:, None], 0.0, c) for c in carry)
        tanh = jnp.tanh(half * (gates + before @ weight))
        i, f, g, o = jnp.split(jax.lax.optimization_barrier(tanh), 4, axis=-1)
        i, f, o = (0.5 + 0.5 * x for x in (i, f, o))
        new = f * cell + i * g
        squashed = jax.lax.optimization_barrier(jnp.tanh(new))
        return (o * squashed, new), (o * squashed, (before, cell, squashed, tanh))

    zeros = jnp.zeros((pushed.shape[1], H))
    return jax.lax.scan(step, (zeros, zeros), (pushed, ends), reverse=True)[1]


def _keep(pushed: jax.Array, weight: jax.Array, ends: jax.Array):
    hidden, inner = _run(pushed, weight, ends)
    return hidden, (weight, ends, inner)


def _gradients(saved: tuple, d_hidden: jax.Array):
    weight, ends, inner = saved
    across = jax.lax.optimization_barrier(weight.T)

    def step(carry: tuple[jax.Array, jax.Array], x: tuple):
        end, (_, cell, squashed, tanh), d_out = x
        i, f, g, o = jnp.split(tanh, 4, axis=-1)
        i, f, o = (0.5 + 0.5 * x for x in (i, f, o))
        d_hidden, d_cell = d_out + carry[0], carry[1]
        d_cell = d_cell + d_hidden * o * (1.0 - squashed**2)
        d_gates = jnp.concatenate([
            d_cell * g * i * (1.0 - i),
            d_cell * cell * f * (1.0 - f),
            d_cell * i * (1.0 - g**2),
            d_hidden * squashed * o * (1.0 - o),
        ], axis=-1)  # fmt: skip
        d_gates = jax.lax.optimization_barrier(d_gates)
        d_before = jnp.where(end[:, None], 0.0, d_gates @ across)
        return (d_before, jnp.where(end[:, None], 0.0, d_cell * f)), d_gates

    zeros = jnp.zeros_like(d_hidden[0])
    _, d_gates = jax.lax.scan(step, (zeros, zeros), (ends, inner, d_hidden))
    before = inner[0].reshape(-1, weight.shape[0])
    d_weight = transposed_product(before, d_gates.reshape(-1, weight.shape[1]))
    return d_gates, d_weight, None


backward_lstm.defvjp(_keep, _gradients)
