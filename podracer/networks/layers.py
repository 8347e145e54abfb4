"""Layers of the built-in networks: Equinox modules that hold arrays only.

Parameters are float32. A layer multiplies in the dtype of its input, adds biases in float32 and
returns the dtype of its input.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from podracer.networks.network import Head


def cast(x: jax.Array, dtype: str = "float32") -> jax.Array:
    """Cast x to a dtype; float32 means at least that, so that float64 stays float64 in tests."""
    return x.astype(jnp.promote_types(x.dtype, dtype) if dtype == "float32" else dtype)


def as_float(x: jax.Array) -> jax.Array:
    """Scale uint8 to [0, 1]; cast everything else to float32 (float64 stays)."""
    return cast(x) / 255.0 if x.dtype == jnp.uint8 else cast(x)


@jax.custom_vjp
def relu(x: jax.Array) -> jax.Array:
    """Return the larger of x and 0.

    The gradient uses the result, which the next layer stores anyway; `jax.nn.relu`'s also
    stores the sign of x.
    """
    return jnp.maximum(x, 0.0)


def _keep_result(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    y = jnp.maximum(x, 0.0)
    return y, y


relu.defvjp(_keep_result, lambda y, g: (jnp.where(y > 0, g, 0.0),))


Activation = Literal["relu", "tanh", "silu"]
ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": relu,
    "tanh": jnp.tanh,
    "silu": jax.nn.silu,
}


def orthogonal(key: jax.Array, shape: tuple[int, ...], scale: float) -> jax.Array:
    """Return orthogonal weights `shape`, the last axis for the outputs.

    Under `vmap` on a CPU they are made one after another: two batched QR decompositions at once
    deadlock in jaxlib 0.10.2, each waiting in the thread pool for work that waits for a thread.
    """
    make = partial(jax.nn.initializers.orthogonal(scale), shape=shape)
    make_alone = jax.custom_batching.custom_vmap(make)

    @make_alone.def_vmap
    def make_batch(axis_size: int, is_batched: list[bool], keys: jax.Array) -> tuple[Any, bool]:
        one_by_one, at_once = partial(jax.lax.map, make_alone), jax.vmap(make)
        return jax.lax.platform_dependent(keys, cpu=one_by_one, default=at_once), True

    weights: jax.Array = make_alone(key)
    return weights


@jax.custom_vjp
def dense(x: Float[Array, "*b n"], w: Float[Array, "n m"]) -> Float[Array, "*b m"]:
    """Compute `x @ w`; the gradient of w is fast on a CPU, too.

    XLA's CPU backend folds the transpose of the activations into the gradient's product, and then
    takes a slow path for it. Behind a barrier the transpose is computed first and the product is a
    plain one. `benchmarks/dense.py` measures it.
    """
    return x @ w


def affine(
    x: Float[Array, "*b n"],
    w: Float[Array | np.ndarray, "n m"],
    bias: Float[Array | np.ndarray, " m"],
) -> Float[Array, "*b m"]:
    """Compute `x @ w + bias`."""
    return dense(x, w) + bias.reshape((1,) * (x.ndim - 1) + bias.shape)


def _gradients(saved: tuple[jax.Array, jax.Array], g: jax.Array):
    x, w = saved
    return g @ w.T, transposed_product(x.reshape(-1, x.shape[-1]), g.reshape(-1, g.shape[-1]))


def transposed_product(x: Float[Array, "N n"], g: Float[Array, "N m"]) -> Float[Array, "n m"]:
    """Compute `xᵀ g`, the gradient of a weight from inputs `x` and gradients of outputs `g`."""
    return jax.lax.platform_dependent(x, g, cpu=_transposed_first, default=lambda x, g: x.T @ g)


def _transposed_first(x: jax.Array, g: jax.Array) -> jax.Array:
    """Compute `xᵀ g` by transposing the smaller of the two."""
    barrier = jax.lax.optimization_barrier
    if x.shape[-1] <= g.shape[-1]:
        return barrier(x.T) @ g
    return barrier(barrier(g.T) @ x).T


dense.defvjp(lambda x, w: (x @ w, (x, w)), _gradients)


class Linear(eqx.Module):
    """Linear layer `x [*b, n] -> [*b, m]` with orthogonal initial weights and zero bias."""

    weight: jax.Array
    bias: jax.Array

    def __init__(self, inputs: int, outputs: int, scale: float, *, key: jax.Array):
        self.weight = orthogonal(key, (inputs, outputs), scale)
        self.bias = jnp.zeros(outputs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return affine(x, self.weight.astype(x.dtype), self.bias).astype(x.dtype)


class NoisyLinear(eqx.Module):
    """Linear layer `x [N, n] -> [N, m]` with learned noise on weights and biases.

    The noise is `f(e) = sign(e) sqrt |e|` of a normal number e for each input and output, a row
    for each of x, `[N, n + m]`, or one for all, `[1, n + m]`. The noise of the weight from i to j
    is `f(e_i) f(e_j)`, so rows need no matrices of their own. Initial weights and biases are
    uniform within `1 / sqrt(n)`, the scales of their noise are `noise_scale / sqrt(n)`. Source:
    Fortunato et al. 2018, section 3 (arXiv 1706.10295).
    """

    weight: jax.Array
    bias: jax.Array
    weight_scale: jax.Array
    bias_scale: jax.Array

    def __init__(self, inputs: int, outputs: int, noise_scale: float = 0.5, *, key: jax.Array):
        weight_key, bias_key = jax.random.split(key)
        limit, shape = 1.0 / math.sqrt(inputs), (inputs, outputs)
        self.weight = jax.random.uniform(weight_key, shape, minval=-limit, maxval=limit)
        self.bias = jax.random.uniform(bias_key, (outputs,), minval=-limit, maxval=limit)
        self.weight_scale = jnp.full(shape, noise_scale * limit)
        self.bias_scale = jnp.full(outputs, noise_scale * limit)

    def __call__(self, x: jax.Array, noise: jax.Array | None) -> jax.Array:
        dtype = x.dtype
        if noise is None:
            return affine(x, self.weight.astype(dtype), self.bias).astype(dtype)
        inputs = self.weight_scale.shape[0]
        e_in, e_out = noise[:, :inputs], noise[:, inputs:]
        if noise.shape[0] == 1:  # noisy weights for all rows, which spare a second product
            weight = self.weight + self.weight_scale * (e_in.T * e_out)
            bias = self.bias[None] + self.bias_scale[None] * e_out
            return (dense(x, weight.astype(dtype)) + bias).astype(dtype)
        mean: jax.Array = affine(x, self.weight.astype(dtype), self.bias)
        scaled = (x * e_in).astype(dtype)
        deviation: jax.Array = dense(scaled, self.weight_scale.astype(dtype))
        return (mean + (deviation + self.bias_scale[None]) * e_out).astype(dtype)


class HeadLayers(eqx.Module):
    """Fully connected layers of a head, `x [N, n] -> [N, m]`."""

    layers: tuple[Linear | NoisyLinear, ...]

    def __init__(self, inputs: int, head: Head, *, key: jax.Array):
        sizes = (inputs, *head.hidden, head.size)
        scales = (*[math.sqrt(2)] * len(head.hidden), head.scale)
        keys = jax.random.split(key, len(scales)) if head.hidden else [key]
        self.layers = tuple(
            NoisyLinear(n, m, head.noise_scale, key=k) if head.noisy else Linear(n, m, scale, key=k)
            for n, m, scale, k in zip(sizes, sizes[1:], scales, keys, strict=False)
        )

    @property
    def noise_size(self) -> int:
        """Numbers of noise for a row: one for each input and output of each noisy layer."""
        noisy = [layer for layer in self.layers if isinstance(layer, NoisyLinear)]
        return sum(sum(layer.weight.shape) for layer in noisy)

    def __call__(self, x: jax.Array, noise: jax.Array | None, dtype: str) -> jax.Array:
        """Return outputs, float32; hidden layers compute in `dtype`."""
        last = len(self.layers) - 1
        for i, layer in enumerate(self.layers):
            x = relu(x) if i else x
            x = cast(x, dtype if i < last else "float32")
            if isinstance(layer, Linear):
                x = layer(x)
            elif noise is None:
                x = layer(x, None)
            else:
                size = sum(layer.weight.shape)
                x, noise = layer(x, noise[:, :size]), noise[:, size:]
        return x


class Normalized(eqx.Module):
    """Layer whose outputs `[*b, n]` are normalized over the last axis, then scaled and shifted.

    They have zero mean and unit variance before; scales are initially 1, shifts 0. The epsilon is
    that of Flax. Source: Ba et al. 2016, "Layer Normalization" (arXiv 1607.06450).
    """

    layer: Any  # with a `bias [n]`
    scale: jax.Array
    shift: jax.Array

    def __init__(self, layer: Any):
        self.layer = layer
        self.scale = jnp.ones_like(layer.bias)
        self.shift = jnp.zeros_like(layer.bias)

    def __call__(self, x: jax.Array) -> jax.Array:
        return normalize(self.layer(x), self.scale, self.shift)


class Residual(eqx.Module):
    """Linear layer, residual blocks and layer normalization, `x [*b, n] -> [*b, m]`: SimBa.

    A block adds to its input x what two linear layers with an activation between them make of the
    normalized x; the inner one has 4 m outputs. Source: Lee et al. 2025 (arXiv 2410.09754), whose
    weights are initially He normal, here orthogonal.
    """

    embedding: Linear
    blocks: tuple[ResidualBlock, ...]
    scale: jax.Array
    shift: jax.Array

    def __init__(self, inputs: int, outputs: int, blocks: int, *, key: jax.Array):
        embedding_key, *keys = jax.random.split(key, 1 + blocks)
        self.embedding = Linear(inputs, outputs, 1.0, key=embedding_key)
        self.blocks = tuple(ResidualBlock(outputs, key=k) for k in keys)
        self.scale, self.shift = jnp.ones(outputs), jnp.zeros(outputs)

    def __call__(self, x: jax.Array, activation: Callable[[jax.Array], jax.Array]) -> jax.Array:
        x = self.embedding(x)
        for block in self.blocks:
            x = x + block(x, activation)
        return normalize(x, self.scale, self.shift)


class ResidualBlock(eqx.Module):
    """Residual branch of a block of `Residual`, `x [*b, m] -> [*b, m]`."""

    scale: jax.Array
    shift: jax.Array
    inner: Linear
    outer: Linear

    def __init__(self, size: int, *, key: jax.Array):
        inner_key, outer_key = jax.random.split(key)
        self.scale, self.shift = jnp.ones(size), jnp.zeros(size)
        self.inner = Linear(size, 4 * size, math.sqrt(2), key=inner_key)
        self.outer = Linear(4 * size, size, math.sqrt(2), key=outer_key)

    def __call__(self, x: jax.Array, activation: Callable[[jax.Array], jax.Array]) -> jax.Array:
        return self.outer(activation(self.inner(normalize(x, self.scale, self.shift))))


def normalize(x: jax.Array, scale: jax.Array, shift: jax.Array) -> jax.Array:
    """Normalize `[*b, n]` over the last axis in float32, then scale and shift it."""
    dtype, shape = x.dtype, (1,) * (x.ndim - 1) + scale.shape
    x = cast(x)
    x -= jnp.mean(x, axis=-1, keepdims=True)
    x *= jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)
    return (x * scale.reshape(shape) + shift.reshape(shape)).astype(dtype)
