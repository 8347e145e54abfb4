"""The published file of a DiscoRL rule: 42 arrays of an `.npz` archive, by haiku's names of layers.

`disco_103.npz` comes with github.com/google-deepmind/disco_rl. Rules of other sizes, such as those
that are discovered anew, have other numbers of units and of predictions; the narrow layers between
have the published widths.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable, Mapping

import numpy as np

from podracer.agents.rules.disco.rule import Affine, Array, EmbeddingParams, LSTMGates, RuleParams
from podracer.errors import ConfigError
from podracer.io.npz import DAMAGE, read_array

CORE, LIFETIME = "lstm", "lstm/~/meta_lstm/~unroll"
_WIDTH, _ACTION_WIDTH = 16, 2  # widths of embeddings, and of their features of an action
_FEATURES, _CHANNELS = 27, 9  # numbers for a transition and for an action, see `rule.py`


def layer_shapes(predictions: int, units: int, lifetime_units: int) -> dict[str, tuple[int, int]]:
    """Return the shape of the weights of each layer, `(inputs, outputs)`, by its name in the file.

    A rule has `units` in its backward LSTM and `lifetime_units` in the lifetime's; its
    student's predictions have as many categories as `predictions` says.
    """
    shapes = {
        f"{CORE}/lstm/linear": (_FEATURES + units, 4 * units),
        f"{CORE}/linear": (lifetime_units, units),
        f"{CORE}/linear_1": (units, 1),
        f"{CORE}/linear_2": (units, predictions),
        f"{CORE}/linear_3": (units, predictions),
        f"{CORE}/sequential_1/conv1_d": (2 * (units + _ACTION_WIDTH), _WIDTH),
        f"{CORE}/linear_4": (_WIDTH, 1),
        f"{LIFETIME}/lstm/linear": (_WIDTH + lifetime_units, 4 * lifetime_units),
        f"{LIFETIME}/mlp_2/~/linear_0": (_FEATURES + 2, _WIDTH),
    }
    for part in (CORE, LIFETIME):
        shapes |= {
            f"{part}/mlp/~/linear_0": (predictions, _WIDTH),
            f"{part}/mlp/~/linear_1": (_WIDTH, 1),
            f"{part}/mlp_1/~/linear_0": (predictions, _WIDTH),
            f"{part}/mlp_1/~/linear_1": (_WIDTH, 1),
            f"{part}/sequential/conv1_d": (2 * _CHANNELS, _WIDTH),
            f"{part}/sequential/conv1_d_1": (2 * _WIDTH, _ACTION_WIDTH),
        }
    return shapes


def stored_shape(layer: str, shape: tuple[int, int]) -> tuple[int, ...]:
    """Return the shape in which the file has the weights of a layer: convolutions have an axis."""
    return (1, *shape) if "conv1_d" in layer else shape


def is_disco_rule(content: bytes) -> bool:
    """Return whether the content of a file has the names of a DiscoRL rule, complete or not."""
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            return f"{CORE}/lstm/linear/w.npy" in archive.namelist()
    except DAMAGE:
        return False


def decode_rule(content: bytes, name: str) -> RuleParams:
    """Return the parameters of the rule in the content of a file, float32.

    Raises `ConfigError`, which calls the file `name`, if it is damaged or not such a rule.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            layers = _read_layers(archive)
    except DAMAGE as error:
        raise ConfigError(f"{name} is not a rule of DiscoRL: {error}.") from error
    return from_layers(layers, _lstm)


def from_layers(layers: Mapping[str, Affine], lstm: Callable[[Affine], LSTMGates]) -> RuleParams:
    """Return the parameters of a rule from its layers by name, of which `lstm` makes LSTMs."""
    core, lifetime = CORE, LIFETIME
    return RuleParams(
        embedding=_embedding(layers, core),
        core=lstm(layers[f"{core}/lstm/linear"]),
        modulation=layers[f"{core}/linear"],
        prediction=layers[f"{core}/linear_2"],
        action_prediction=layers[f"{core}/linear_3"],
        policy=(layers[f"{core}/sequential_1/conv1_d"], layers[f"{core}/linear_4"]),
        summary=layers[f"{core}/linear_1"],
        lifetime_embedding=_embedding(layers, lifetime),
        lifetime_input=layers[f"{lifetime}/mlp_2/~/linear_0"],
        lifetime=lstm(layers[f"{lifetime}/lstm/linear"]),
    )


def _read_layers(archive: zipfile.ZipFile) -> dict[str, Affine]:
    """Return all layers; raises one of `DAMAGE` unless they fit each other."""
    predictions = read_array(archive, f"{CORE}/linear_2/b", np.float32).size
    units = read_array(archive, f"{CORE}/linear/b", np.float32).size
    lifetime_units = read_array(archive, f"{LIFETIME}/lstm/linear/b", np.float32).size // 4
    shapes = layer_shapes(predictions, units, lifetime_units)
    names = {f"{layer}/{part}.npy" for layer in shapes for part in "wb"}
    if unknown := sorted(set(archive.namelist()) - names):
        raise ValueError(f"{unknown[0]} is none of its arrays")
    layers = {}
    for layer, shape in shapes.items():
        weight = read_array(archive, f"{layer}/w", np.float32, stored_shape(layer, shape))
        bias = read_array(archive, f"{layer}/b", np.float32, shape[1:])
        if not (np.isfinite(weight).all() and np.isfinite(bias).all()):
            raise ValueError(f"{layer} has values that are not finite")
        layers[layer] = Affine(weight.reshape(shape), bias)
    return layers


def _embedding(layers: Mapping[str, Affine], part: str) -> EmbeddingParams:
    return EmbeddingParams(
        prediction=(layers[f"{part}/mlp/~/linear_0"], layers[f"{part}/mlp/~/linear_1"]),
        action_prediction=(layers[f"{part}/mlp_1/~/linear_0"], layers[f"{part}/mlp_1/~/linear_1"]),
        actions=(layers[f"{part}/sequential/conv1_d"], layers[f"{part}/sequential/conv1_d_1"]),
    )


def _lstm(layer: Affine) -> LSTMGates:
    """Return a haiku LSTM, whose gates i, g, f, o have a forget bias of 1 besides, as ours."""
    units = layer.bias.size // 4
    weight, bias = swap_gates(layer.weight), swap_gates(layer.bias)
    return LSTMGates(weight[:-units], weight[-units:], bias + forget_bias(units))


def swap_gates(x: Array) -> np.ndarray:
    """Swap the two gates in the middle: ours are i, f, g, o, haiku's i, g, f, o."""
    first, second, third, fourth = np.split(np.asarray(x), 4, axis=-1)
    return np.concatenate([first, third, second, fourth], axis=-1)


def forget_bias(units: int) -> np.ndarray:
    """Return the bias `[4 H]` that haiku adds to the gates, in our order."""
    return np.repeat(np.asarray([0, 1, 0, 0], np.float32), units)
