"""Spectral normalization: a network whose residual blocks' convolutions have a spectral norm of 1.

Source: Miyato et al. 2018 (arXiv 1802.05957); in residual blocks of Q-networks: Clark et al. 2024,
"Beyond The Rainbow" (arXiv 2411.03820).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from podracer.errors import ConfigError
from podracer.networks import Head, Network, ResNet, TorsoNetwork
from podracer.networks.convolutions import Convolution
from podracer.types import Params, PyTree

SQUARINGS = 6  # equal to 2^6 = 64 steps of power iteration


@dataclasses.dataclass(frozen=True)
class Spectral:
    """A network that divides the weights of each residual block's convolutions by their norm."""

    network: TorsoNetwork = dataclasses.field(default=TorsoNetwork(ResNet()))
    """Network with residual blocks, without the normalization."""

    def build(self, observation: PyTree, heads: Mapping[str, Head]) -> Network:
        """Return the network for an observation. Raises `ConfigError` without residual blocks."""
        if not isinstance(self.network.torso, ResNet):
            raise ConfigError(
                "Spectral normalizes residual blocks, which a "
                f"{type(self.network.torso).__name__} has not: take TorsoNetwork(ResNet())."
            )
        network = self.network.build(observation, heads)

        def apply(params: Params, *args: Any, **kwargs: Any) -> Any:
            return network.apply(normalize(params), *args, **kwargs)

        return dataclasses.replace(network, apply=apply)


def normalize(params: Params) -> Params:
    """Return parameters whose convolutions in residual blocks have a norm of 1.

    The first convolution of a stage is in none of its blocks. Those of many blocks are stacked
    along a first axis.
    """

    def divide(layer: Any) -> Any:
        if not _is_convolution(layer):
            return layer
        is_stacked = layer.weight.ndim > 4
        weight = (jax.vmap(_to_norm_one) if is_stacked else _to_norm_one)(layer.weight)
        return eqx.tree_at(lambda x: x.weight, layer, weight)

    def divide_blocks(stage: Any) -> Any:
        if not _is_stage(stage):
            return stage
        first, *blocks = stage
        return (first, *jax.tree.map(divide, blocks, is_leaf=_is_convolution))

    return jax.tree.map(divide_blocks, params, is_leaf=_is_stage)


def _is_convolution(part: Any) -> bool:
    return isinstance(part, Convolution)


def _is_stage(part: Any) -> bool:
    """Return whether a part of the parameters holds the layers of a stage of a `ResNet`."""
    layer = part[0] if isinstance(part, tuple) and part else None
    return _is_convolution(getattr(layer, "layer", layer))


def _to_norm_one(weight: jax.Array) -> jax.Array:
    return weight / spectral_norm(weight)


def spectral_norm(weight: Float[Array, "*n m"]) -> Float[Array, ""]:
    """Return the largest singular value of weights `[..., m]`, taken as a matrix `[n, m]`.

    The matrix `W^T W` is squared repeatedly, which is power iteration with twice as many steps each
    time; the result is up to half a percent too small where the largest values are close. As in
    Miyato et al. the singular vectors are constants of the gradient; there they are a state that
    each pass moves by one step.
    """
    matrix = weight.reshape(-1, weight.shape[-1])
    fixed = jax.lax.stop_gradient(matrix)
    gram = _multiply(fixed.T, fixed)
    for _ in range(SQUARINGS):
        gram = gram / jnp.maximum(jnp.trace(gram), 1e-30)
        gram = _multiply(gram, gram)
    # Nearly of rank 1: each column is the singular vector, the one of the largest entry is not 0.
    right = gram[:, jnp.argmax(jnp.diagonal(gram))]
    left = _multiply(fixed, right)
    left = left / jnp.maximum(jnp.linalg.norm(left), 1e-30)
    right = right / jnp.maximum(jnp.linalg.norm(right), 1e-30)
    return _multiply(_multiply(left, matrix), right)


def _multiply(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.matmul(x, y, precision="highest")
