"""Torsos: configurations of the layers between an observation and the features that heads use.

Images, leaves `[H, W, C]`, go through the convolutions of `CNN` and `ResNet`; all other leaves are
flattened and join the features of the images before the fully connected layers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from podracer.arguments import typed
from podracer.devices.reductions import map_blocks
from podracer.errors import ConfigError
from podracer.fields import bounded
from podracer.networks.layers import (
    ACTIVATIONS,
    Activation,
    Convolution,
    Linear,
    Normalized,
    Residual,
    cast,
    relu,
)
from podracer.ops.pooling import max_pool
from podracer.types import ArraySpec, PyTree

SCANNED_BLOCKS = 3
"""Number of residual blocks in a stage from which on they are one loop, which compiles once."""


PIXELS_IN_CACHE = 2**21
"""Number of pixels, times their channels, whose convolutions a CPU computes at once: 74 images of
84x84x4, the patches of which take 30 MB in the Nature network."""


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


@typed
@dataclasses.dataclass(frozen=True)
class CNN:
    """Convolutions without padding, then fully connected layers.

    The defaults are the network of Mnih et al. 2015 ("Nature") for 84x84x4 input.
    """

    channels: tuple[int, ...] = bounded((32, 64, 64), low=1)
    """Numbers of channels of the convolutions."""
    kernels: tuple[int, ...] = bounded((8, 4, 3), low=1)
    """Sizes of the square kernels, in pixels."""
    strides: tuple[int, ...] = bounded((4, 2, 1), low=1)
    """Strides of the convolutions, in pixels."""
    hidden: tuple[int, ...] = bounded((512,), low=1)
    """Sizes of the fully connected layers."""
    activation: Activation = "relu"
    """Activation function after each layer."""
    layer_norm: bool = False
    """Normalize the outputs of each layer before its activation."""


@typed
@dataclasses.dataclass(frozen=True)
class ResNet:
    """Deep residual network of Espeholt et al. 2018 (figure 3).

    Each stage has a convolution, a max-pool of stride 2 and residual blocks; one fully connected
    layer follows.
    """

    channels: tuple[int, ...] = bounded((16, 32, 32), low=1)
    """Numbers of channels of the stages."""
    blocks: int = bounded(2, low=1)
    """Number of residual blocks in each stage."""
    hidden: int = bounded(256)
    """Size of the fully connected layer; 0 for none."""
    layer_norm: bool = False
    """Normalize the outputs of each layer before its activation or sum."""
    pool: bool = True
    """Halve height and width in each stage; otherwise they stay as they are."""


Torso = MLP | CNN | ResNet


def make_torso(config: Torso, observation: PyTree, key: jax.Array) -> tuple[tuple[Any, ...], int]:
    """Return the layers of a torso for an observation (specs), and the number of its features."""
    leaves = jax.tree.leaves(observation)
    images, vectors = _split(config, leaves, [x.shape for x in leaves])
    size = sum(math.prod(x.shape) for x in vectors)
    layers: list[Any] = []
    conv_key, dense_key = jax.random.split(key)
    if images:
        if len({x.shape[:2] for x in images}) > 1:
            raise ConfigError("image observations must have the same height and width.")
        height, width = images[0].shape[:2]
        channels = sum(x.shape[2] for x in images)
        convolutions, shape = make_convolutions(config, (height, width, channels), conv_key)
        layers.append(convolutions)
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
            dense.append(_layer(config, Linear(size, width, math.sqrt(2), key=k)))
        size = width
    layers.append(tuple(dense))
    return tuple(layers), size


def apply_torso(
    config: Torso, layers: tuple[Any, ...], observation: PyTree, dtype: str
) -> jax.Array:
    """Return features `[N, size]` of observation leaves `[N, ...]`, computed in a dtype."""
    leaves = jax.tree.leaves(observation)
    images, vectors = _split(config, leaves, [x.shape[1:] for x in leaves])
    parts = [cast(as_float(x), dtype).reshape(x.shape[0], -1) for x in vectors]

    def features(images: list[jax.Array]) -> jax.Array:
        image = jnp.concatenate([cast(as_float(x), dtype) for x in images], axis=-1)
        image = apply_convolutions(config, layers[0], image)
        image = relu(image) if isinstance(config, ResNet) else image
        return image.reshape(image.shape[0], -1)

    if images:
        pixels = sum(math.prod(x.shape[1:]) for x in images)
        parts.append(map_blocks(features, images, rows_in_cache=PIXELS_IN_CACHE // pixels))
    x = jnp.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]
    activation = relu if isinstance(config, ResNet) else ACTIVATIONS[config.activation]
    for layer in layers[-1]:
        x = layer(x, activation) if isinstance(layer, Residual) else activation(layer(x))
    return x


def _split(config: Torso, leaves: list[Any], shapes: list[tuple[int, ...]]) -> tuple[list, list]:
    """Return the leaves for the convolutions, and those to flatten, by their unbatched shapes."""
    is_image = [len(shape) == 3 and not isinstance(config, MLP) for shape in shapes]
    images = [x for x, image in zip(leaves, is_image, strict=True) if image]
    return images, [x for x, image in zip(leaves, is_image, strict=True) if not image]


def _layer(config: Torso, layer: Linear | Convolution) -> Linear | Convolution | Normalized:
    """Return a layer as a torso has it."""
    return Normalized(layer) if config.layer_norm else layer


def make_convolutions(
    config: Torso, shape: tuple[int, int, int], key: jax.Array
) -> tuple[tuple[Any, ...], tuple[int, int, int]]:
    """Return convolution layers, and the shape `[H, W, C]` of their output."""
    height, width, channels = shape
    if height <= 4 and min(width, channels) > 16:
        raise ConfigError(
            f"an image of {shape} has its channels first, it seems: move that axis to the end, "
            "[H, W, C]."
        )
    layers = []
    if isinstance(config, CNN):
        counts = [len(x) for x in (config.channels, config.kernels, config.strides)]
        if len(set(counts)) > 1:
            raise ConfigError(
                "channels, kernels and strides must be equally many, but are "
                f"{counts[0]}, {counts[1]} and {counts[2]}."
            )
        keys = jax.random.split(key, len(config.channels))
        for outputs, size, stride, k in zip(
            config.channels, config.kernels, config.strides, keys, strict=True
        ):
            layers.append(
                _layer(config, Convolution(channels, outputs, size, stride, False, key=k))
            )
            height, width = (height - size) // stride + 1, (width - size) // stride + 1
            channels = outputs
        if height < 1 or width < 1:
            raise ConfigError(f"{config} leaves nothing of a {shape} image, [H, W, C].")
    elif isinstance(config, ResNet):
        for outputs, stage in zip(
            config.channels, jax.random.split(key, len(config.channels)), strict=True
        ):
            key, *keys = jax.random.split(stage, 1 + 2 * config.blocks)

            def make(key: jax.Array, outputs: int = outputs) -> Convolution:
                return Convolution(outputs, outputs, 3, 1, True, key=key)

            convs = [Convolution(channels, outputs, 3, 1, True, key=key)]
            if config.blocks < SCANNED_BLOCKS:
                convs += [make(k) for k in keys]
            else:
                convs += [eqx.filter_vmap(make)(jnp.stack(keys[i::2])) for i in (0, 1)]
            layers.append(tuple(_layer(config, conv) for conv in convs))
            if config.pool:
                height, width = (height + 1) // 2, (width + 1) // 2
            channels = outputs
    return tuple(layers), (height, width, channels)


def unscaled(spec: ArraySpec, x: jax.Array) -> jax.Array:
    """Return bytes that are not to be scaled as float32, and everything else as it is."""
    return x.astype(jnp.float32) if x.dtype == jnp.uint8 and not spec.scaled else x


def as_float(x: jax.Array) -> jax.Array:
    """Scale uint8 to [0, 1]; cast everything else to float32 (float64 stays)."""
    return cast(x) / 255.0 if x.dtype == jnp.uint8 else cast(x)


def apply_convolutions(config: Torso, layers: tuple[Any, ...], x: jax.Array) -> jax.Array:
    """Return what convolution layers make of images; a `ResNet`'s last ReLU is left out."""
    if isinstance(config, CNN):
        for layer in layers:
            x = ACTIVATIONS[config.activation](layer(x))
        return x
    assert isinstance(config, ResNet)  # an MLP has no images
    for first, *blocks in layers:
        x = first(x)
        x = max_pool(x) if config.pool else x
        if config.blocks < SCANNED_BLOCKS:
            for block in zip(blocks[::2], blocks[1::2], strict=True):
                x = _residual_block(x, block)
        else:
            x, _ = jax.lax.scan(lambda x, block: (_residual_block(x, block), None), x, blocks)
    return x


def _residual_block(x: jax.Array, block: Sequence[Any]) -> jax.Array:
    inner, outer = block
    return x + outer(relu(inner(relu(x))))
