"""The published file of a DiscoRL rule: 42 arrays of an `.npz` archive, by haiku's names of layers.

`disco_103.npz` comes with github.com/google-deepmind/disco_rl. Rules of other sizes may have other
numbers of units and of predictions; the narrow layers between have the published widths.
"""

from __future__ import annotations

import io
import zipfile

import numpy as np

from podracer.agents.disco.rule import LSTM, EmbeddingParams, Linear, RuleParams
from podracer.io.npz import DAMAGE, read_array
from podracer.types import ConfigError

_CORE, _LIFETIME = "lstm", "lstm/~/meta_lstm/~unroll"
_WIDTH, _ACTION_WIDTH = 16, 2  # of embeddings, and of what they say of an action
_FEATURES, _CHANNELS = 27, 9  # of a transition and of an action, see `rule.py`


def layer_shapes(predictions: int, units: int, lifetime_units: int) -> dict[str, tuple[int, int]]:
    """Return the shape of the weights of each layer, `(inputs, outputs)`, by its name in the file.

    A rule has `units` in its backward LSTM and `lifetime_units` in that of the lifetime; its
    student's predictions have as many categories as `predictions` says.
    """
    shapes = {
        f"{_CORE}/lstm/linear": (_FEATURES + units, 4 * units),
        f"{_CORE}/linear": (lifetime_units, units),
        f"{_CORE}/linear_1": (units, 1),
        f"{_CORE}/linear_2": (units, predictions),
        f"{_CORE}/linear_3": (units, predictions),
        f"{_CORE}/sequential_1/conv1_d": (2 * (units + _ACTION_WIDTH), _WIDTH),
        f"{_CORE}/linear_4": (_WIDTH, 1),
        f"{_LIFETIME}/lstm/linear": (_WIDTH + lifetime_units, 4 * lifetime_units),
        f"{_LIFETIME}/mlp_2/~/linear_0": (_FEATURES + 2, _WIDTH),
    }
    for part in (_CORE, _LIFETIME):
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
            return f"{_CORE}/lstm/linear/w.npy" in archive.namelist()
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
    core, lifetime = _CORE, _LIFETIME
    return RuleParams(
        embedding=_embedding(layers, core),
        core=_lstm(layers[f"{core}/lstm/linear"]),
        modulation=layers[f"{core}/linear"],
        prediction=layers[f"{core}/linear_2"],
        action_prediction=layers[f"{core}/linear_3"],
        policy=(layers[f"{core}/sequential_1/conv1_d"], layers[f"{core}/linear_4"]),
        summary=layers[f"{core}/linear_1"],
        lifetime_embedding=_embedding(layers, lifetime),
        lifetime_input=layers[f"{lifetime}/mlp_2/~/linear_0"],
        lifetime=_lstm(layers[f"{lifetime}/lstm/linear"]),
    )


def _read_layers(archive: zipfile.ZipFile) -> dict[str, Linear]:
    """Return all layers; raises one of `DAMAGE` unless they fit each other."""
    predictions = read_array(archive, f"{_CORE}/linear_2/b", np.float32).size
    units = read_array(archive, f"{_CORE}/linear/b", np.float32).size
    lifetime_units = read_array(archive, f"{_LIFETIME}/lstm/linear/b", np.float32).size // 4
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
        layers[layer] = Linear(weight.reshape(shape), bias)
    return layers


def _embedding(layers: dict[str, Linear], part: str) -> EmbeddingParams:
    return EmbeddingParams(
        prediction=(layers[f"{part}/mlp/~/linear_0"], layers[f"{part}/mlp/~/linear_1"]),
        action_prediction=(layers[f"{part}/mlp_1/~/linear_0"], layers[f"{part}/mlp_1/~/linear_1"]),
        actions=(layers[f"{part}/sequential/conv1_d"], layers[f"{part}/sequential/conv1_d_1"]),
    )


def _lstm(layer: Linear) -> LSTM:
    """Return a haiku LSTM, whose gates i, g, f, o have a forget bias of 1 besides, as ours."""

    def reorder(x: np.ndarray) -> np.ndarray:
        i, g, f, o = np.split(x, 4, axis=-1)
        return np.concatenate([i, f, g, o], axis=-1)

    units = layer.bias.size // 4
    weight, bias = reorder(np.asarray(layer.weight)), reorder(np.asarray(layer.bias))
    forget = np.repeat(np.asarray([0, 1, 0, 0], np.float32), units)
    return LSTM(weight[:-units], weight[-units:], bias + forget)
