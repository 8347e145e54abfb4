"""Layers whose features and weights have bounded norms: SimBaV2, and FlashSAC.

Source: Lee et al. 2025, "Hyperspherical Normalization for Scalable Deep Reinforcement Learning"
(arXiv 2502.15280); Kim et al. 2026, "FlashSAC: Fast and Stable Off-Policy Reinforcement Learning
for High-Dimensional Robot Control" (arXiv 2604.04539). The constants are those of their codes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from podracer.networks.layers import cast, dense, orthogonal
from podracer.networks.network import Head
from podracer.types import PyTree
from podracer_agents.batch_norm import BatchNorm

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
    """Return parameters in which the weights of `UnitLinear` layers have unit norm again.

    The n scales of `RMSNorm` layers, and scales and shifts of plain `BatchNorm` layers together,
    return to the norm sqrt(n).
    """

    def project(layer: Any) -> Any:
        if isinstance(layer, UnitLinear):
            return eqx.tree_at(lambda m: m.weight, layer, unit_norm(layer.weight, axis=0))
        if isinstance(layer, RMSNorm):
            return RMSNorm(math.sqrt(layer.scale.size) * unit_norm(layer.scale))
        if isinstance(layer, BatchNorm) and layer.is_plain:
            vectors = jnp.concatenate([layer.scale, layer.shift])
            vectors = jnp.split(math.sqrt(layer.scale.size) * unit_norm(vectors), 2)
            return eqx.tree_at(lambda m: (m.scale, m.shift), layer, tuple(vectors))
        return layer

    layers = (UnitLinear, RMSNorm, BatchNorm)
    return jax.tree.map(project, params, is_leaf=lambda x: isinstance(x, layers))


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


class RMSNorm(eqx.Module):
    """Division of features `x [*b, n]` by their root mean square, then a scale."""

    scale: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        square = jnp.mean(cast(x) ** 2, axis=-1, keepdims=True)
        return _scaled(cast(x) * jax.lax.rsqrt(square + 1e-6), self.scale).astype(x.dtype)


class InvertedBlock(eqx.Module):
    """Residual block of FlashSAC, `x [N, m] -> [N, m]`; its inner layer has 4 m outputs.

    `learn` returns the block with new running moments, too; see `BatchNorm`.
    """

    inner: UnitLinear
    inner_norm: BatchNorm
    outer: UnitLinear
    outer_norm: BatchNorm

    def __init__(self, size: int, *, key: jax.Array):
        inner_key, outer_key = jax.random.split(key)
        self.inner = UnitLinear(size, 4 * size, key=inner_key)
        self.inner_norm = BatchNorm(4 * size, is_plain=True)
        self.outer = UnitLinear(4 * size, size, key=outer_key)
        self.outer_norm = BatchNorm(size, is_plain=True)

    def __call__(self, x: jax.Array, activation: Callable[[jax.Array], jax.Array]) -> jax.Array:
        hidden = activation(self.inner_norm(self.inner(x)))
        return x + activation(self.outer_norm(self.outer(hidden)))

    def learn(
        self,
        x: jax.Array,
        activation: Callable[[jax.Array], jax.Array],
        weights: jax.Array,
        axis: str | None,
    ) -> tuple[jax.Array, InvertedBlock]:
        hidden, inner_norm = self.inner_norm.learn(self.inner(x), weights, axis)
        y, outer_norm = self.outer_norm.learn(self.outer(activation(hidden)), weights, axis)
        norms = (inner_norm, outer_norm)
        block = eqx.tree_at(lambda m: (m.inner_norm, m.outer_norm), self, norms)
        return x + activation(y), block


def inverted_layers(inputs: int, outputs: int, blocks: int, key: jax.Array) -> tuple[Any, ...]:
    """Return the layers of FlashSAC between inputs and heads."""
    embedding_key, *keys = jax.random.split(key, 1 + blocks)
    embedding = UnitLinear(inputs, outputs, key=embedding_key)
    inverted = [InvertedBlock(outputs, key=k) for k in keys]
    return (BatchNorm(inputs, is_plain=True), embedding, *inverted, RMSNorm(jnp.ones(outputs)))


class SphericalHead(eqx.Module):
    """Head behind spherical layers: each of its parts has a hidden layer, without an activation.

    Without a hidden layer the parts have an output layer alone, as in FlashSAC.
    """

    parts: tuple[tuple[Any, ...], ...]  # (hidden layer, its scale, output), or (output,)
    bias: jax.Array

    def __init__(self, inputs: int, head: Head, parts: int, *, hidden: bool, key: jax.Array):
        size = head.size // parts
        self.parts = tuple(
            (UnitLinear(inputs, inputs, key=k), jnp.ones(inputs), UnitLinear(inputs, size, key=q))
            for k, q in jax.random.split(key, (parts, 2))
        )
        if not hidden:
            self.parts = tuple(part[-1:] for part in self.parts)
        self.bias = jnp.zeros(head.size)

    def __call__(self, x: jax.Array, noise: jax.Array | None, dtype: str) -> jax.Array:
        """Return outputs, float32; hidden layers compute in `dtype`."""
        x = cast(x, dtype)
        outputs = [
            output(cast(_scaled(hidden[0](x), hidden[1]) if hidden else x))
            for *hidden, output in self.parts
        ]
        return jnp.concatenate(outputs, axis=-1) + self.bias[None]


def _scaled(x: jax.Array, scale: jax.Array) -> jax.Array:
    return (x * scale.reshape((1,) * (x.ndim - 1) + scale.shape)).astype(x.dtype)
