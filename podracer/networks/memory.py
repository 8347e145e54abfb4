"""Recurrent layers behind a torso, and an LSTM over a sequence with a fast gradient."""

from __future__ import annotations

from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from podracer.devices.fused import scan
from podracer.networks.layers import affine, transposed_product


class GRU(eqx.nn.GRUCell):
    """Gated recurrent unit, `x [T, B, n] -> [T, B, H]`."""

    def carry(self, num_envs: int) -> jax.Array:
        """Return the initial state `[B, H]`."""
        return jnp.zeros((num_envs, self.hidden_size))

    def unroll(
        self, carry: jax.Array, features: jax.Array, first: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return the state after the last step, and outputs; it is reset where `first` is set."""

        def step(memory: jax.Array, x: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            features, first = x
            memory = jax.vmap(self)(features, jnp.where(first[:, None], 0.0, memory))
            return memory, memory

        return scan(step, carry, (features, first))


class LSTM(eqx.nn.LSTMCell):
    """Long short-term memory, `x [T, B, n] -> [T, B, H]`.

    It begins by remembering: biases of forget gates are 1, as in haiku. Source: Jozefowicz et al.
    2015, "An Empirical Exploration of Recurrent Network Architectures".
    """

    def __init__(self, inputs: int, units: int, *, key: jax.Array):
        super().__init__(inputs, units, key=key)
        assert self.bias is not None
        forget = slice(units, 2 * units)  # after the biases of the input gate
        self.bias = self.bias.at[forget].set(1.0)

    def carry(self, num_envs: int) -> tuple[jax.Array, jax.Array]:
        """Return the initial state, twice `[B, H]`."""
        zeros = jnp.zeros((num_envs, self.hidden_size))
        return zeros, zeros

    def unroll(
        self, carry: tuple[jax.Array, jax.Array], features: jax.Array, first: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        """Return the state after the last step, and outputs; it is reset where `first` is set."""
        # Behind a barrier, or the gradients of the transposes become slow products on a CPU.
        weights = jax.lax.optimization_barrier((self.weight_ih.T, self.weight_hh.T))
        assert self.bias is not None
        gate_inputs = affine(features, weights[0], self.bias)
        unrolled: Any = lstm(gate_inputs, weights[1], first, carry, False)
        return unrolled[1], unrolled[0]


Gates = Float[Array, "T B G"]  # G = 4 H: input, forget, cell and output gate


State = tuple[Float[Array, "B H"], Float[Array, "B H"]]  # hidden and cell


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def lstm(
    gate_inputs: Gates,
    weight: Float[Array, "H G"],
    resets: Bool[Array, "T B"],
    state: State,
    reverse: bool,
) -> tuple[Float[Array, "T B H"], State]:
    """Compute hidden states `[T, B, H]` from a first state on, and the last state.

        i, f, g, o = gate_inputs_t + h_{t-1} weight
        c_t = sigmoid(f) c_{t-1} + sigmoid(i) tanh(g)        h_t = sigmoid(o) tanh(c_t)

    Where `resets` is set the state before the step is 0. With `reverse` the first state is that
    after the last step, and t - 1 is t + 1. Source: Hochreiter and Schmidhuber 1997, with the
    forget gate of Gers et al. 2000.

    The gradient of a scan accumulates the weights' gradient step by step, in small products, and
    the compiler computes gates anew for each of their uses. Here the backward pass stores the
    gradients of the gates, and the weights' gradient is one product over all steps.
    `benchmarks/lpg.py` measures it.
    """
    return _keep(gate_inputs, weight, resets, state, reverse)[0]


def _keep(
    gate_inputs: jax.Array, weight: jax.Array, resets: jax.Array, state: State, reverse: bool
):
    """Return hidden states and the last state, and what their gradients need."""
    H = weight.shape[0]
    # A sigmoid is a tanh of half its argument: all gates are one call, behind a barrier, or the
    # compiler recomputes them wherever they are used.
    half = np.repeat(np.asarray([0.5, 0.5, 1.0, 0.5], np.float32), H)[None]

    def step(carry: tuple[jax.Array, jax.Array], x: tuple[jax.Array, jax.Array]):
        gates, reset = x
        hidden, cell = (jnp.where(reset[:, None], 0.0, c) for c in carry)
        tanh = jnp.tanh(half * (gates + hidden @ weight))
        i, f, g, o = jnp.split(jax.lax.optimization_barrier(tanh), 4, axis=-1)
        i, f, o = (0.5 + 0.5 * x for x in (i, f, o))
        next_cell = f * cell + i * g
        squashed = jax.lax.optimization_barrier(jnp.tanh(next_cell))
        return (o * squashed, next_cell), (o * squashed, (hidden, cell, squashed, tanh))

    state, (hidden, inner) = jax.lax.scan(step, state, (gate_inputs, resets), reverse=reverse)
    return (hidden, state), (weight, resets, inner)


def _gradients(
    reverse: bool, saved: tuple[jax.Array, jax.Array, Any], d_outputs: tuple[jax.Array, State]
):
    (weight, resets, inner), (d_hidden, d_state) = saved, d_outputs
    weight_transposed = jax.lax.optimization_barrier(weight.T)

    def step(carry: tuple[jax.Array, jax.Array], x: tuple[Any, ...]):
        reset, (_, cell, squashed, tanh), d_out = x
        i, f, g, o = jnp.split(tanh, 4, axis=-1)
        i, f, o = (0.5 + 0.5 * x for x in (i, f, o))
        d_hidden, d_cell = d_out + carry[0], carry[1]
        d_cell = d_cell + d_hidden * o * (1.0 - squashed**2)
        d_gates = jnp.concatenate(
            [
                d_cell * g * i * (1.0 - i),
                d_cell * cell * f * (1.0 - f),
                d_cell * i * (1.0 - g**2),
                d_hidden * squashed * o * (1.0 - o),
            ],
            axis=-1,
        )
        d_gates = jax.lax.optimization_barrier(d_gates)
        d_previous = jnp.where(reset[:, None], 0.0, d_gates @ weight_transposed)
        return (d_previous, jnp.where(reset[:, None], 0.0, d_cell * f)), d_gates

    d_state, d_gates = jax.lax.scan(step, d_state, (resets, inner, d_hidden), reverse=not reverse)
    hidden = inner[0].reshape(-1, weight.shape[0])
    d_weight = transposed_product(hidden, d_gates.reshape(-1, weight.shape[1]))
    return d_gates, d_weight, None, d_state


lstm.defvjp(_keep, _gradients)
