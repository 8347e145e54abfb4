"""Networks with spherical layers and with batch normalization, as `NetworkBuilder`s."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from podracer.errors import ConfigError
from podracer.fields import bounded
from podracer.networks import Head, Network
from podracer.networks.layers import ACTIVATIONS, Activation, HeadLayers, Linear, as_float, cast
from podracer.networks.network import as_params
from podracer.networks.torsos import unscaled
from podracer.types import Params, PyTree
from podracer_agents.batch_norm import BatchNorm
from podracer_agents.spherical import (
    InvertedBlock,
    RMSNorm,
    Spherical,
    SphericalHead,
    UnitLinear,
    inverted_layers,
)


@dataclasses.dataclass(frozen=True)
class BatchNetwork(Network):
    """Network that also learns from a batch that is normalized by its own moments."""

    apply_batch: Callable[..., tuple[dict[str, jax.Array], Params]] | None = None
    """`apply_batch(params, observation [N, ...], weights [N], axis) -> (outputs, params)`: rows of
    weight 0 do not count; the parameters have new running moments."""


@dataclasses.dataclass(frozen=True)
class NormalizedMLP:
    """Fully connected layers, spherical (SimBaV2), over normalized batches (CrossQ), or both.

    They belong to `NormalizedSAC`: no other agent moves their running moments or returns their
    weights to unit norm.
    """

    hidden: tuple[int, ...] = bounded((256, 256), low=1)
    """Sizes of the hidden layers."""
    activation: Activation = "relu"
    """Activation function after each layer."""
    batch_norm: bool = False
    """Normalize inputs and features of each layer over batches."""
    spherical: bool = False
    """Whether features and weights have unit norm: one hidden layer, then residual blocks."""
    residual_blocks: int = bounded(0)
    """Number of residual blocks of a spherical network."""
    parts: int = bounded(1, low=1)
    """Equal parts of the outputs with a hidden layer each, where the network is spherical."""

    def __post_init__(self) -> None:
        if self.spherical and len(self.hidden) != 1:
            raise ConfigError("a spherical MLP needs one hidden layer.")
        if not (self.spherical or self.batch_norm):
            raise ConfigError("choose batch_norm, spherical or both, or take a TorsoNetwork.")

    def build(self, observation: PyTree, heads: Mapping[str, Head]) -> BatchNetwork:
        """Return the network for an observation, a tree of `ArraySpec`."""
        if any(head.noisy or head.hidden for head in heads.values()):
            raise ConfigError("a NormalizedMLP has no noisy heads or hidden layers in heads.")
        if self.spherical and any(head.size % self.parts for head in heads.values()):
            sizes = ", ".join(f"{head.size} of {name}" for name, head in heads.items())
            raise ConfigError(f"parts is {self.parts}, but must divide the outputs: {sizes}.")
        leaves = jax.tree.leaves(observation)
        if any(x.num_values is not None for x in leaves):
            raise ConfigError(
                "a NormalizedMLP has no one-hot vectors: take a TorsoNetwork for indices of states."
            )
        size = sum(math.prod(x.shape) for x in leaves)

        def make(key: jax.Array) -> _Layers:
            return _Layers(self, size, heads, key=jax.random.split(key, 1)[0])

        init, static = as_params(make)
        as_inputs = partial(jax.tree.map, unscaled, observation)

        def apply(params: Params, carry: Any, observation: PyTree, first: jax.Array) -> Any:
            T, B = first.shape
            flat = jax.tree.map(lambda x: x.reshape(T * B, *x.shape[2:]), as_inputs(observation))
            outputs = eqx.combine(params, static)(flat)
            return {name: x.reshape(T, B, -1) for name, x in outputs.items()}, ()

        def apply_batch(
            params: Params, observation: PyTree, weights: jax.Array, axis: str | None
        ) -> tuple[dict[str, jax.Array], Params]:
            layers = eqx.combine(params, static)
            outputs, layers = layers.learn(as_inputs(observation), weights, axis)
            return outputs, eqx.filter(layers, eqx.is_array)

        learn = apply_batch if self.batch_norm else None
        return BatchNetwork(init, lambda num_envs: (), apply, 512, learn)


class _Layers(eqx.Module):
    layers: tuple[Any, ...]
    heads: dict[str, Any]
    config: NormalizedMLP = eqx.field(static=True)

    def __init__(
        self, config: NormalizedMLP, size: int, heads: Mapping[str, Head], *, key: jax.Array
    ):
        self.config = config
        torso_key, _, head_key = jax.random.split(key, 3)
        dense_key = jax.random.split(torso_key)[1]
        keys = jax.random.split(dense_key, max(1, len(config.hidden)))
        if config.spherical and config.batch_norm:
            layers = inverted_layers(size, config.hidden[0], config.residual_blocks, dense_key)
        elif config.spherical:
            layers = (Spherical(size, config.hidden[0], config.residual_blocks, key=keys[0]),)
        else:
            layers, inputs = [BatchNorm(size)], size
            for width, k in zip(config.hidden, keys, strict=False):
                layers += [Linear(inputs, width, math.sqrt(2), key=k), BatchNorm(width)]
                inputs = width
        self.layers = tuple(layers)
        size = config.hidden[-1]
        self.heads = {}
        for (name, head), k in zip(
            heads.items(), jax.random.split(head_key, len(heads)), strict=True
        ):
            if config.spherical:
                self.heads[name] = SphericalHead(
                    size, head, config.parts, hidden=not config.batch_norm, key=k
                )
            else:
                self.heads[name] = HeadLayers(size, head, key=k)

    def _inputs(self, observation: PyTree) -> jax.Array:
        parts = [cast(as_float(x)).reshape(x.shape[0], -1) for x in jax.tree.leaves(observation)]
        return jnp.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]

    def _outputs(self, x: jax.Array) -> dict[str, jax.Array]:
        return {name: head(x, None, "float32") for name, head in self.heads.items()}

    def __call__(self, observation: PyTree) -> dict[str, jax.Array]:
        x, activation = self._inputs(observation), ACTIVATIONS[self.config.activation]
        for layer in self.layers:
            if isinstance(layer, BatchNorm | UnitLinear | RMSNorm):
                x = layer(x)
            elif isinstance(layer, Spherical | InvertedBlock):
                x = layer(x, activation)
            else:
                x = activation(layer(x))
        return self._outputs(x)

    def learn(
        self, observation: PyTree, weights: jax.Array, axis: str | None
    ) -> tuple[dict[str, jax.Array], _Layers]:
        x, activation, layers = self._inputs(observation), ACTIVATIONS[self.config.activation], []
        for layer in self.layers:
            if isinstance(layer, BatchNorm):
                x, layer = layer.learn(x, weights, axis)
            elif isinstance(layer, InvertedBlock):
                x, layer = layer.learn(x, activation, weights, axis)
            elif isinstance(layer, UnitLinear | RMSNorm):
                x = layer(x)
            else:
                x = activation(layer(x))
            layers.append(layer)
        return self._outputs(x), eqx.tree_at(lambda m: m.layers, self, tuple(layers))
