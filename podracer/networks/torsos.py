"""Built-in networks: a torso, optionally a recurrent layer, and linear heads.

They are Equinox modules, partitioned once, so that a learner's state holds arrays only. Images,
leaves `[H, W, C]`, go through the convolutions of `CNN` and `ResNet`; all other leaves are
flattened and join the features of the images before the fully connected layers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from podracer.arguments import typed
from podracer.errors import ConfigError
from podracer.fields import bounded
from podracer.networks.convolutions import CNN, ResNet, image_features, make_convolutions
from podracer.networks.layers import (
    ACTIVATIONS,
    Activation,
    HeadLayers,
    Linear,
    Normalized,
    Residual,
    as_float,
    cast,
    relu,
)
from podracer.networks.memory import GRU, LSTM
from podracer.networks.network import LAST_STEP, Head, Network, as_params
from podracer.networks.transformer import Transformer
from podracer.ops.random import random_normals
from podracer.types import ArraySpec, Carry, Params, PyTree

TRANSFORMERS = ("gtrxl", "transformer")
MAX_ONE_HOT = 4096  # values of an index that a torso takes; each has a row of weights


@typed
@dataclasses.dataclass(frozen=True)
class MLP:
    """Fully connected layers over the flattened observation."""

    hidden: tuple[int, ...] = bounded((64, 64), low=1)
    """Sizes of the hidden layers."""
    activation: Activation = "relu"
    """Activation function after each layer."""
    layer_norm: bool = False
    """Normalize the outputs of each layer before its activation."""
    residual_blocks: int = bounded(0)
    """Number of residual blocks behind the last hidden layer and of its size, as in SimBa; that
    layer has no activation then, and the last block's output is normalized."""

    def __post_init__(self) -> None:
        if self.residual_blocks and not self.hidden:
            raise ConfigError("residual_blocks need a hidden layer, whose size they have.")


Torso = MLP | CNN | ResNet


@typed
@dataclasses.dataclass(frozen=True)
class TorsoNetwork:
    """Torso, optionally a recurrent layer behind it, and linear heads.

    An observation that is the index of a state becomes a one-hot vector. Its part `LAST_STEP` goes
    past the torso.
    """

    torso: Torso = dataclasses.field(default=MLP())
    """Layers between the observation and the heads or the recurrent layer."""
    shared: bool = True
    """Whether all heads use one torso and recurrent layer; otherwise each head has its own."""
    memory: Literal["none", "gru", "lstm", "gtrxl", "transformer"] = "none"
    """Kind of the recurrent layer; the forget gates of an LSTM begin with biases of 1. A gtrxl is a
    causal transformer with gates, a transformer the same without."""
    memory_size: int = bounded(128, low=1)
    """Number of units of the recurrent layer, for a transformer of each of its layers."""
    memory_layers: int = bounded(2, low=1)
    """Layers of a transformer."""
    memory_heads: int = bounded(4, low=1)
    """Heads of a transformer's attention; they divide memory_size."""
    memory_window: int = bounded(64, low=1)
    """Timesteps before the current one that a layer of a transformer attends to; its recurrent
    state has memory_layers * memory_window * memory_size numbers for each environment."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which the torso and the hidden layers of the heads multiply. Parameters, the
    recurrent layer, the outputs and the losses are float32."""

    def __post_init__(self) -> None:
        if self.memory in TRANSFORMERS and self.memory_size % self.memory_heads:
            raise ConfigError(
                f"memory_size is {self.memory_size}, but a {self.memory} needs a multiple of its "
                f"memory_heads, {self.memory_heads}."
            )

    def build(self, observation: PyTree, heads: Mapping[str, Head]) -> Network:
        """Return the network for an observation, a tree of `ArraySpec`.

        Raises `ConfigError` where the torso cannot take it, or has not what the heads ask for.
        """
        torso_inputs = jax.tree.map(_torso_input, observation)
        groups = {"shared": heads} if self.shared else {n: {n: h} for n, h in heads.items()}
        parts = {n: as_params(partial(_Trunk, self, torso_inputs, x)) for n, x in groups.items()}
        network = join({name: _as_network(*part) for name, part in parts.items()})
        noise_sizes = {n: h.noise_size for _, x in parts.values() for n, h in x.heads.items()}

        def apply(
            params: Params,
            carry: Carry,
            observations: PyTree,
            first: jax.Array,
            noise: jax.Array | None = None,
        ) -> tuple[dict[str, jax.Array], Carry]:
            observations = jax.tree.map(_as_input, observation, observations)
            noises = _noises(noise, noise_sizes)
            return network.apply(params, carry, observations, first, noises)

        rows_in_cache = 512 if isinstance(self.torso, MLP) else 256
        return dataclasses.replace(network, apply=apply, rows_in_cache=rows_in_cache)


def join(networks: Mapping[str, Network]) -> Network:
    """Return a network with the heads of several, whose parameters and memories it has by name."""

    def init(key: jax.Array) -> Params:
        keys = jax.random.split(key, len(networks))
        return {name: x.init(k) for (name, x), k in zip(networks.items(), keys, strict=True)}

    def carry(num_envs: int) -> Carry:
        carries = {name: network.carry(num_envs) for name, network in networks.items()}
        return carries if jax.tree.leaves(carries) else ()

    def apply(params: Params, carry: Carry, *inputs: Any) -> tuple[dict[str, jax.Array], Carry]:
        outputs, carries = {}, {}
        for name, network in networks.items():
            memory = carry[name] if carry else ()
            heads, carries[name] = network.apply(params[name], memory, *inputs)
            outputs |= heads
        return outputs, (carries if carry else ())

    return Network(init, carry, apply, min(x.rows_in_cache for x in networks.values()))


def _as_network(init: Callable[[jax.Array], Params], trunk: _Trunk) -> Network:
    """Return the functions of a trunk, whose arrays are parameters."""
    return Network(
        init=init,
        carry=lambda num_envs: () if trunk.cell is None else trunk.cell.carry(num_envs),
        apply=lambda params, *args: eqx.combine(params, trunk)(*args),
    )


def _noises(keys: jax.Array | None, sizes: Mapping[str, int]) -> dict[str, jax.Array | None]:
    """Return the noise `[N, n]` of each head, n from `sizes`: parts of one draw from N keys."""
    if keys is None:
        return dict.fromkeys(sizes)
    ends = np.cumsum(list(sizes.values()))
    e = random_normals(keys.reshape(-1), int(ends[-1]))
    parts = jnp.split(jnp.sign(e) * jnp.sqrt(jnp.abs(e)), ends[:-1], axis=-1)
    return dict(zip(sizes, parts, strict=True))


def _torso_input(spec: ArraySpec) -> ArraySpec:
    """Return the spec of a torso's input for one leaf of an observation; see `_as_input`."""
    if not isinstance(spec, ArraySpec):
        kind = type(spec).__name__
        raise ConfigError(f"a network takes podracer.ArraySpec, or a tree of them, not {kind}.")
    if spec.num_values is None:
        return spec
    if spec.num_values > MAX_ONE_HOT:
        raise ConfigError(
            f"{spec.num_values} states are too many for a torso, which takes at most "
            f"{MAX_ONE_HOT}: use a Table."
        )
    return ArraySpec((*spec.shape, spec.num_values))


def _as_input(spec: ArraySpec, x: jax.Array) -> jax.Array:
    """Return a torso's input: one-hot vectors of indices, and float32 of unscaled bytes."""
    if spec.num_values:
        return jax.nn.one_hot(x, spec.num_values)
    return unscaled(spec, x)


def unscaled(spec: ArraySpec, x: jax.Array) -> jax.Array:
    """Return bytes that are not to be scaled as float32, and everything else as it is."""
    return x.astype(jnp.float32) if x.dtype == jnp.uint8 and not spec.scaled else x


def _split_last_step(observation: PyTree) -> tuple[PyTree, PyTree]:
    """Return the parts of an observation, or of its spec, that the torso sees and does not see."""
    if not (isinstance(observation, dict) and observation.keys() == {"observation", LAST_STEP}):
        return observation, ()  # an environment's own may have an entry of this name
    torso_input = {name: part for name, part in observation.items() if name != LAST_STEP}
    return torso_input, observation[LAST_STEP]


class _Trunk(eqx.Module):
    """Torso, recurrent layer and heads over `[T, B, ...]`."""

    layers: tuple[Any, ...]  # convolutions, if there are images, then the fully connected layers
    cell: Any
    heads: dict[str, HeadLayers]
    config: TorsoNetwork = eqx.field(static=True)

    def __init__(
        self,
        config: TorsoNetwork,
        observation: PyTree,
        heads: Mapping[str, Head],
        *,
        key: jax.Array,
    ):
        torso_key, cell_key, head_key = jax.random.split(key, 3)
        self.config = config
        observation, last_step = _split_last_step(observation)
        self.layers, size = _make_torso(config.torso, observation, torso_key)
        size += sum(math.prod(x.shape) for x in jax.tree.leaves(last_step))
        self.cell = None
        if config.memory != "none":
            self.cell = _make_memory(config, size, cell_key)
            size = config.memory_size
        keys = jax.random.split(head_key, len(heads))
        self.heads = {
            name: HeadLayers(size, head, key=k)
            for (name, head), k in zip(heads.items(), keys, strict=True)
        }

    def __call__(
        self,
        carry: Carry,
        observation: PyTree,
        first: jax.Array,
        noises: dict[str, jax.Array | None],
    ) -> tuple[dict[str, jax.Array], Carry]:
        T, B = first.shape
        flat = jax.tree.map(lambda x: x.reshape(T * B, *x.shape[2:]), observation)
        flat, last_step = _split_last_step(flat)
        dtype = self.config.compute_dtype
        features = _apply_torso(self.config.torso, self.layers, flat, dtype)
        if last_step:
            parts = [x.reshape(T * B, -1) for x in jax.tree.leaves(last_step)]
            features = jnp.concatenate([features, *parts], axis=-1)
        if self.cell is not None:
            features = cast(features.reshape(T, B, -1))
            carry, features = self.cell.unroll(carry, features, first)
            features = features.reshape(T * B, -1)
        outputs = {name: head(features, noises[name], dtype) for name, head in self.heads.items()}
        return {name: x.reshape(T, B, -1) for name, x in outputs.items()}, carry


def _make_memory(config: TorsoNetwork, inputs: int, key: jax.Array) -> GRU | LSTM | Transformer:
    if config.memory not in TRANSFORMERS:
        return {"gru": GRU, "lstm": LSTM}[config.memory](inputs, config.memory_size, key=key)
    return Transformer(
        inputs,
        config.memory_size,
        layers=config.memory_layers,
        heads=config.memory_heads,
        window=config.memory_window,
        gated=config.memory == "gtrxl",
        key=key,
    )


def _make_torso(config: Torso, observation: PyTree, key: jax.Array) -> tuple[tuple[Any, ...], int]:
    """Return the layers of a torso for an observation (specs), and the number of its features."""
    leaves = jax.tree.leaves(observation)
    images, vectors = _split(config, leaves, 3)
    size = sum(math.prod(x.shape) for x in vectors)
    layers: list[Any] = []
    conv_key, dense_key = jax.random.split(key)
    if images and not isinstance(config, MLP):
        if len({x.shape[:2] for x in images}) > 1:
            raise ConfigError("image observations must have the same height and width.")
        height, width = images[0].shape[:2]
        channels = sum(x.shape[2] for x in images)
        image_layers, shape = make_convolutions(config, (height, width, channels), conv_key)
        layers.append(image_layers)
        size += math.prod(shape)
    elif not isinstance(config, MLP):
        raise ConfigError(f"{type(config).__name__} needs an image observation [H, W, C].")
    hidden = config.hidden
    if isinstance(hidden, int):
        hidden = (hidden,) if hidden else ()
    residual_blocks = config.residual_blocks if isinstance(config, MLP) else 0
    dense: list[Any] = []
    for width, k in zip(hidden, jax.random.split(dense_key, max(1, len(hidden))), strict=False):
        if residual_blocks and len(dense) == len(hidden) - 1:
            dense.append(Residual(size, width, residual_blocks, key=k))
        else:
            layer = Linear(size, width, math.sqrt(2), key=k)
            dense.append(Normalized(layer) if config.layer_norm else layer)
        size = width
    layers.append(tuple(dense))
    return tuple(layers), size


def _apply_torso(
    config: Torso, layers: tuple[Any, ...], observation: PyTree, dtype: str
) -> jax.Array:
    """Return features `[N, size]` of observation leaves `[N, ...]`, computed in a dtype."""
    leaves = jax.tree.leaves(observation)
    images, vectors = _split(config, leaves, 4)
    parts = [cast(as_float(x), dtype).reshape(x.shape[0], -1) for x in vectors]
    if images and not isinstance(config, MLP):
        parts.append(image_features(config, layers[0], images, dtype))
    x = jnp.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]
    activation = relu if isinstance(config, ResNet) else ACTIVATIONS[config.activation]
    for layer in layers[-1]:
        x = layer(x, activation) if isinstance(layer, Residual) else activation(layer(x))
    return x


def _split(config: Torso, leaves: list[Any], image_axes: int) -> tuple[list, list]:
    """Return the leaves for the convolutions, which have so many axes, and those to flatten."""
    is_image = [len(x.shape) == image_axes and not isinstance(config, MLP) for x in leaves]
    images = [x for x, image in zip(leaves, is_image, strict=True) if image]
    return images, [x for x, image in zip(leaves, is_image, strict=True) if not image]
