"""New rules of DiscoRL's structure, from which discovery begins."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from podracer.agents.rules.disco.rule import LSTM, Linear, RuleParams
from podracer.agents.rules.disco.rule_file import from_layers, layer_shapes
from podracer.fields import static, struct


@struct
class RuleSize:
    """Size of a rule's network; that of Disco103 has 256, 128 and 600."""

    units: int = static(default=32, low=1)
    """Units of the rule's backward LSTM."""
    lifetime_units: int = static(default=16, low=1)
    """Units of the LSTM that remembers a student's lifetime."""
    predictions: int = static(default=8, low=1)
    """Categories of a student's predictions y and z."""

    def init(self, key: jax.Array) -> RuleParams:
        """Return random parameters.

        Weights are as haiku has them by default. The memory's factors are 1 at first: with haiku's
        biases of 0 the first update of each lifetime would have no target.
        """
        shapes = layer_shapes(self.predictions, self.units, self.lifetime_units)
        ends = np.cumsum([n * m for n, m in shapes.values()])
        # One draw: each one of its own would be a program of its own to compile.
        normal = jnp.split(jax.random.truncated_normal(key, -2.0, 2.0, (ends[-1],)), ends[:-1])
        layers = {
            name: Linear(x.reshape(n, m) / n**0.5, jnp.zeros(m))
            for (name, (n, m)), x in zip(shapes.items(), normal, strict=True)
        }
        params = from_layers(layers, _new_lstm)
        ones = jnp.ones_like(jnp.asarray(params.modulation.bias))
        modulation = dataclasses.replace(params.modulation, bias=ones)
        return dataclasses.replace(params, modulation=modulation)


def _new_lstm(layer: Linear) -> LSTM:
    weight, bias = jnp.asarray(layer.weight), jnp.asarray(layer.bias)
    units = bias.size // 4
    return LSTM(weight[:-units], weight[-units:], bias.at[units : 2 * units].set(1.0))
