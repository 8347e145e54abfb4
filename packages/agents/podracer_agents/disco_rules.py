"""New rules of DiscoRL's structure, from which discovery begins, and their files."""

from __future__ import annotations

import dataclasses
import io

import jax
import jax.numpy as jnp
import numpy as np

from podracer.agents.rules.disco import rule_file
from podracer.agents.rules.disco.rule import Affine, LSTMGates, RuleParams
from podracer.agents.rules.disco.rule_file import CORE, LIFETIME
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
        shapes = rule_file.layer_shapes(self.predictions, self.units, self.lifetime_units)
        ends = np.cumsum([n * m for n, m in shapes.values()])
        # One draw: each one of its own would be a program of its own to compile.
        normal = jnp.split(jax.random.truncated_normal(key, -2.0, 2.0, (ends[-1],)), ends[:-1])
        layers = {
            name: Affine(x.reshape(n, m) / n**0.5, jnp.zeros(m))
            for (name, (n, m)), x in zip(shapes.items(), normal, strict=True)
        }
        params = rule_file.from_layers(layers, _new_lstm)
        ones = jnp.ones_like(jnp.asarray(params.modulation.bias))
        modulation = dataclasses.replace(params.modulation, bias=ones)
        return dataclasses.replace(params, modulation=modulation)


def _new_lstm(layer: Affine) -> LSTMGates:
    weight, bias = jnp.asarray(layer.weight), jnp.asarray(layer.bias)
    units = bias.size // 4
    return LSTMGates(weight[:-units], weight[-units:], bias.at[units : 2 * units].set(1.0))


def encode_rule(params: RuleParams) -> bytes:
    """Return the content of a file with these parameters, f32, see `rule_file.decode_rule`."""
    arrays = {}
    for name, layer in _to_layers(params).items():
        weight, bias = (np.asarray(x, np.float32) for x in (layer.weight, layer.bias))
        arrays[f"{name}/w"] = weight.reshape(rule_file.stored_shape(name, weight.shape))
        arrays[f"{name}/b"] = bias
    content = io.BytesIO()
    np.savez(content, **arrays)  # type: ignore[arg-type]
    return content.getvalue()


def _to_layers(params: RuleParams) -> dict[str, Affine]:
    """Return the layers of a rule by their names in the file, see `rule_file.from_layers`."""
    core, lifetime = CORE, LIFETIME
    layers = {
        f"{core}/lstm/linear": _linear(params.core),
        f"{core}/linear": params.modulation,
        f"{core}/linear_1": params.summary,
        f"{core}/linear_2": params.prediction,
        f"{core}/linear_3": params.action_prediction,
        f"{core}/sequential_1/conv1_d": params.policy[0],
        f"{core}/linear_4": params.policy[1],
        f"{lifetime}/lstm/linear": _linear(params.lifetime),
        f"{lifetime}/mlp_2/~/linear_0": params.lifetime_input,
    }
    for part, embedding in ((core, params.embedding), (lifetime, params.lifetime_embedding)):
        for number in (0, 1):
            layers[f"{part}/mlp/~/linear_{number}"] = embedding.prediction[number]
            layers[f"{part}/mlp_1/~/linear_{number}"] = embedding.action_prediction[number]
        layers[f"{part}/sequential/conv1_d"] = embedding.actions[0]
        layers[f"{part}/sequential/conv1_d_1"] = embedding.actions[1]
    return layers


def _linear(lstm: LSTMGates) -> Affine:
    """Return the layer of an LSTM of ours as haiku's file has it, see `rule_file`."""
    weight = np.concatenate([np.asarray(lstm.input), np.asarray(lstm.hidden)])
    bias = np.asarray(lstm.bias) - rule_file.forget_bias(lstm.bias.size // 4)
    return Affine(rule_file.swap_gates(weight), rule_file.swap_gates(bias))
