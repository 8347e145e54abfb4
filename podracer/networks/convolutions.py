"""Convolutional torsos: their configurations, layers, and what these make of images."""

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
    Normalized,
    as_float,
    cast,
    orthogonal,
    relu,
)
from podracer.ops.convolution import convolution
from podracer.ops.pooling import max_pool

SCANNED_BLOCKS = 3
"""Number of residual blocks in a stage from which on they are one loop, which compiles once."""

PIXELS_IN_CACHE = 2**21
"""Number of pixels, times their channels, whose convolutions a CPU computes at once: 74 images of
84x84x4, the patches of which take 30 MB in the Nature network."""


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


class Convolution(eqx.Module):
    """Convolution `x [B, H, W, C] -> [B, H', W', C']`, square kernels.

    Initial weights are orthogonal, scaled by sqrt 2 as in CleanRL (DQN and IMPALA had their
    framework's), biases 0; padding is "same" or none.
    """

    weight: jax.Array
    bias: jax.Array
    stride: int = eqx.field(static=True)
    same: bool = eqx.field(static=True)

    def __init__(
        self, inputs: int, outputs: int, size: int, stride: int, same: bool, *, key: jax.Array
    ):
        self.weight = orthogonal(key, (size, size, inputs, outputs), math.sqrt(2))
        self.bias = jnp.zeros(outputs)
        self.stride, self.same = stride, same

    def __call__(self, x: jax.Array) -> jax.Array:
        padding = self.weight.shape[0] // 2 if self.same else 0
        y: jax.Array = convolution(x, self.weight.astype(x.dtype), self.stride, padding)
        return (y + self.bias.reshape(1, 1, 1, -1)).astype(x.dtype)


def make_convolutions(
    config: CNN | ResNet, shape: tuple[int, int, int], key: jax.Array
) -> tuple[tuple[Any, ...], tuple[int, int, int]]:
    """Return convolution layers, and the shape `[H, W, C]` of their output."""
    height, width, channels = shape
    if height <= 4 and min(width, channels) > 16:
        raise ConfigError(
            f"an image of {shape} has its channels first, it seems: move that axis to the end, "
            "[H, W, C]."
        )
    layers, finish = [], Normalized if config.layer_norm else lambda layer: layer
    keys = jax.random.split(key, len(config.channels))
    if isinstance(config, CNN):
        counts = [len(x) for x in (config.channels, config.kernels, config.strides)]
        if len(set(counts)) > 1:
            raise ConfigError(
                "channels, kernels and strides must be equally many, but are "
                f"{counts[0]}, {counts[1]} and {counts[2]}."
            )
        for outputs, size, stride, k in zip(
            config.channels, config.kernels, config.strides, keys, strict=True
        ):
            layers.append(finish(Convolution(channels, outputs, size, stride, False, key=k)))
            height, width = (height - size) // stride + 1, (width - size) // stride + 1
            channels = outputs
        if height < 1 or width < 1:
            raise ConfigError(f"{config} leaves nothing of a {shape} image, [H, W, C].")
    else:
        for outputs, stage in zip(config.channels, keys, strict=True):
            key, *block_keys = jax.random.split(stage, 1 + 2 * config.blocks)

            def make(key: jax.Array, outputs: int = outputs) -> Convolution:
                return Convolution(outputs, outputs, 3, 1, True, key=key)

            convs = [Convolution(channels, outputs, 3, 1, True, key=key)]
            if config.blocks < SCANNED_BLOCKS:
                convs += [make(k) for k in block_keys]
            else:
                convs += [eqx.filter_vmap(make)(jnp.stack(block_keys[i::2])) for i in (0, 1)]
            layers.append(tuple(finish(conv) for conv in convs))
            if config.pool:
                height, width = (height + 1) // 2, (width + 1) // 2
            channels = outputs
    return tuple(layers), (height, width, channels)


def image_features(
    config: CNN | ResNet, layers: tuple[Any, ...], images: Sequence[jax.Array], dtype: str
) -> jax.Array:
    """Return features `[N, size]` of images `[N, H, W, C]`, whose channels are joined.

    `layers` come from `make_convolutions`; they compute in a dtype.
    """

    def features(images: Sequence[jax.Array]) -> jax.Array:
        image = jnp.concatenate([cast(as_float(x), dtype) for x in images], axis=-1)
        image = apply_convolutions(config, layers, image)
        image = relu(image) if isinstance(config, ResNet) else image
        return image.reshape(image.shape[0], -1)

    pixels = sum(math.prod(x.shape[1:]) for x in images)
    return map_blocks(features, images, rows_in_cache=PIXELS_IN_CACHE // pixels)


def apply_convolutions(config: CNN | ResNet, layers: tuple[Any, ...], x: jax.Array) -> jax.Array:
    """Return what convolution layers make of images; a `ResNet`'s last ReLU is left out."""
    if isinstance(config, CNN):
        for layer in layers:
            x = ACTIVATIONS[config.activation](layer(x))
        return x
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
