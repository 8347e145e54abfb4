"""LSTM that runs from the last step to the first, with a fast gradient.

The gradient of a scan accumulates the weights' gradient step by step, in small products. Here the
backward pass stores the gradients of the gates, and the weights' gradient is one product over all
steps. `benchmarks/lpg.py` measures it.
"""

# Types of JAX itself are partly unknown to pyright.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import Any

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
    """Compute hidden states `[T, B, H]` from the last step on; `ends` resets the state.

        i, f, g, o = pushed_t + h_{t+1} weight
        c_t = sigmoid(f) c_{t+1} + sigmoid(i) tanh(g)        h_t = sigmoid(o) tanh(c_t)

    Source: Hochreiter and Schmidhuber 1997, with the forget gate of Gers et al. 2000.
    """
    return _run(pushed, weight, ends)[0]


def _run(pushed: jax.Array, weight: jax.Array, ends: jax.Array):
    H = weight.shape[0]
    # A sigmoid is a tanh of half its argument: all gates are one call, behind a barrier, or the
    # compiler recomputes them wherever they are used.
    half = np.repeat(np.asarray([0.5, 0.5, 1.0, 0.5], np.float32), H)[None]

    def step(carry: tuple[jax.Array, jax.Array], x: tuple[jax.Array, jax.Array]):
        gates, end = x
        hidden, cell = (jnp.where(end[:, None], 0.0, c) for c in carry)
        tanh = jnp.tanh(half * (gates + hidden @ weight))
        i, f, g, o = jnp.split(jax.lax.optimization_barrier(tanh), 4, axis=-1)
        i, f, o = (0.5 + 0.5 * x for x in (i, f, o))
        next_cell = f * cell + i * g
        squashed = jax.lax.optimization_barrier(jnp.tanh(next_cell))
        return (o * squashed, next_cell), (o * squashed, (hidden, cell, squashed, tanh))

    zeros = jnp.zeros((pushed.shape[1], H))
    return jax.lax.scan(step, (zeros, zeros), (pushed, ends), reverse=True)[1]


def _keep(pushed: jax.Array, weight: jax.Array, ends: jax.Array):
    hidden, inner = _run(pushed, weight, ends)
    return hidden, (weight, ends, inner)


def _gradients(saved: tuple[jax.Array, jax.Array, Any], d_hidden: jax.Array):
    weight, ends, inner = saved
    weight_transposed = jax.lax.optimization_barrier(weight.T)

    def step(carry: tuple[jax.Array, jax.Array], x: tuple[Any, ...]):
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
        d_previous = jnp.where(end[:, None], 0.0, d_gates @ weight_transposed)
        return (d_previous, jnp.where(end[:, None], 0.0, d_cell * f)), d_gates

    zeros = jnp.zeros_like(d_hidden[0])
    _, d_gates = jax.lax.scan(step, (zeros, zeros), (ends, inner, d_hidden))
    hidden = inner[0].reshape(-1, weight.shape[0])
    d_weight = transposed_product(hidden, d_gates.reshape(-1, weight.shape[1]))
    return d_gates, d_weight, None


backward_lstm.defvjp(_keep, _gradients)
