"""Layers whose features and weights have unit norm: SimBaV2.

Source: Lee et al. 2025, "Hyperspherical Normalization for Scalable Deep Reinforcement Learning"
(arXiv 2502.15280); the constants are those of their code.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from podracer.networks.layers import cast, orthogonal
from podracer.networks.network import Head
from podracer.ops.dense import dense
from podracer.types import PyTree

UNIT_EPSILON = 1e-8  # smallest norm by which a vector is divided
INPUT_CONSTANT = 3.0  # c_shift of SimBaV2


class UnitLinear(eqx.Module):
    """Linear layer `x [*b, n] -> [*b, m]` without bias; weights to each output have unit norm.

    They have it initially and after each step of an optimizer, see `to_unit_norm`.
    """

    weight: jax.Array

    def __init__(self, inputs: int, outputs: int, *, key: jax.Array):
        self.weight = unit_norm(orthogonal(key, (inputs, outputs), 1.0), axis=0)

    def __call__(self, x: jax.Array) -> jax.Array:
        return dense(x, self.weight.astype(x.dtype))


def unit_norm(x: jax.Array, axis: int = -1) -> jax.Array:
    """Return vectors along an axis, divided by their Euclidean norms; zeros stay zeros."""
    square = jnp.sum(cast(x) ** 2, axis=axis, keepdims=True)
    return (cast(x) * jax.lax.rsqrt(jnp.maximum(square, UNIT_EPSILON**2))).astype(x.dtype)


def to_unit_norm(params: PyTree) -> PyTree:
    """Return parameters in which the weights of `UnitLinear` layers have unit norm again."""

    def project(layer: Any) -> Any:
        if not isinstance(layer, UnitLinear):
            return layer
        return eqx.tree_at(lambda m: m.weight, layer, unit_norm(layer.weight, axis=0))

    return jax.tree.map(project, params, is_leaf=lambda x: isinstance(x, UnitLinear))


class Spherical(eqx.Module):
    """Layers whose features and weights have unit norm, `x [*b, n] -> [*b, m]`: SimBaV2.

    A constant joins the inputs, so that their length is not lost. A block moves its input x, along
    each coordinate by a learned share, to what two layers with an activation between them make of
    x; the inner one has 4 m outputs.
    """

    embedding: UnitLinear
    scale: jax.Array
    blocks: tuple[SphericalBlock, ...]

    def __init__(self, inputs: int, outputs: int, blocks: int, *, key: jax.Array):
        embedding_key, *keys = jax.random.split(key, 1 + blocks)
        self.embedding = UnitLinear(inputs + 1, outputs, key=embedding_key)
        self.scale = jnp.full(outputs, math.sqrt(2 / outputs))
        self.blocks = tuple(SphericalBlock(outputs, key=k) for k in keys)

    def __call__(self, x: jax.Array, activation: Callable[[jax.Array], jax.Array]) -> jax.Array:
        constant = jnp.full((*x.shape[:-1], 1), INPUT_CONSTANT, x.dtype)
        x = self.embedding(unit_norm(jnp.concatenate([x, constant], axis=-1)))
        x = unit_norm(_scaled(x, self.scale))
        share = math.sqrt(x.shape[-1]) / (1 + len(self.blocks))  # initial share, divided by alpha
        for block in self.blocks:
            x = unit_norm(x + _scaled(block(x, activation) - x, share * block.share))
        return x


class SphericalBlock(eqx.Module):
    """Place to which a block of `Spherical` moves its input, `x [*b, m] -> [*b, m]`."""

    inner: UnitLinear
    scale: jax.Array
    outer: UnitLinear
    share: jax.Array  # alpha, in units of `1 / sqrt(m)`

    def __init__(self, size: int, *, key: jax.Array):
        inner_key, outer_key = jax.random.split(key)
        self.inner = UnitLinear(size, 4 * size, key=inner_key)
        self.scale = jnp.full(4 * size, math.sqrt(2 / size) / 2)
        self.outer = UnitLinear(4 * size, size, key=outer_key)
        self.share = jnp.full(size, 1 / math.sqrt(size))

    def __call__(self, x: jax.Array, activation: Callable[[jax.Array], jax.Array]) -> jax.Array:
        hidden = activation(_scaled(self.inner(x), self.scale)) + UNIT_EPSILON
        return unit_norm(self.outer(hidden))


class SphericalHead(eqx.Module):
    """Head behind `Spherical`: each of its parts has a hidden layer, without an activation."""

    parts: tuple[tuple[UnitLinear, jax.Array, UnitLinear], ...]  # hidden layer, its scale, output
    bias: jax.Array

    def __init__(self, inputs: int, head: Head, *, key: jax.Array):
        size = head.size // head.parts
        self.parts = tuple(
            (UnitLinear(inputs, inputs, key=k), jnp.ones(inputs), UnitLinear(inputs, size, key=q))
            for k, q in jax.random.split(key, (head.parts, 2))
        )
        self.bias = jnp.zeros(head.size)

    def __call__(self, x: jax.Array, noise: jax.Array | None, dtype: str) -> jax.Array:
        """Return outputs, float32; hidden layers compute in `dtype`."""
        x = cast(x, dtype)
        outputs = [output(cast(_scaled(hidden(x), scale))) for hidden, scale, output in self.parts]
        return jnp.concatenate(outputs, axis=-1) + self.bias[None]


def _scaled(x: jax.Array, scale: jax.Array) -> jax.Array:
    return (x * scale.reshape((1,) * (x.ndim - 1) + scale.shape)).astype(x.dtype)
