"""What update rules share: the environments that they learn in, and layers that read rollouts."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from podracer.agents.common.value_based import require_discrete
from podracer.errors import ConfigError
from podracer.networks.layers import affine
from podracer.networks.memory import lstm
from podracer.types import Discrete, EnvironmentSpec


def require_for_rule(spec: EnvironmentSpec) -> Discrete:
    """Return the actions of an environment that an update rule can learn in.

    Raises `ConfigError` for actions that are not discrete, for observations with a state or a task,
    and where two players take turns: a rule sees whether an episode goes on, but not whose turn it
    is.
    """
    actions = require_discrete(spec)
    if spec.extension is not None:
        raise ConfigError(
            f"an update rule needs plain observations, but those of {spec.name} include its "
            "state or its task."
        )
    if spec.takes_turns:
        raise ConfigError(
            f"an update rule cannot learn by self-play, as in {spec.name}: take an opponent, such "
            "as opponent=random, or an agent without a rule."
        )
    return actions


def backward_lstm(core: Any, inputs: jax.Array, valid: jax.Array, discount: jax.Array) -> jax.Array:
    """Return the hidden states `[T, B, H]` of an `eqx.nn.LSTMCell` from the last step to the first.

    It reads `inputs [T, B, n]`, and begins anew where `backward_resets` says so.
    """
    resets = backward_resets(valid, discount)
    gates = affine(inputs, core.weight_ih.T, core.bias)
    zeros = jnp.zeros((gates.shape[1], core.hidden_size))
    outputs: Any = lstm(gates, core.weight_hh.T, resets, (zeros, zeros), True)
    return outputs[0]


def backward_resets(valid: jax.Array, discount: jax.Array) -> jax.Array:
    """Return where nothing of the next step may reach the one before, bool `[T, B]`.

    It is where an episode ends, terminal or cut. `valid` and `discount` are `[T, B]`.
    """
    is_cut = jnp.concatenate([~valid[1:], jnp.zeros_like(valid[:1])])
    return is_cut | (discount == 0)


def apply_linear(layer: Any, x: jax.Array) -> jax.Array:
    """Return the outputs `[*b, m]` of an `eqx.nn.Linear` for inputs `[*b, n]`."""
    return affine(x, layer.weight.T, layer.bias)
