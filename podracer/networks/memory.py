"""Recurrent layers behind a torso; each has a `carry`, and unrolls over a rollout."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from podracer.devices.kernels import scan
from podracer.ops.dense import affine
from podracer.ops.lstm import lstm


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
        gate_inputs = affine(features, weights[0], self.bias)
        unrolled: Any = lstm(gate_inputs, weights[1], first, carry, False)
        return unrolled[1], unrolled[0]
