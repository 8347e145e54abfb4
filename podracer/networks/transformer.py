"""Causal transformer as the memory of the built-in networks; its recurrent state is a cache.

Each layer attends to the current timestep and the `window` timesteps before it in the same episode.
The cache holds the inputs of every layer at those timesteps, so acting step by step computes what
learning computes for all timesteps of a rollout at once. Source: Parisotto et al. 2019,
"Stabilizing Transformers for Reinforcement Learning" (arXiv 1910.06764), section 3: GTrXL, and
TrXL-I, which adds where GTrXL has gates. Attention is Transformer-XL's, by distances (Dai et al.
2019, arXiv 1901.02860, section 3.3). Weights are initially orthogonal.
"""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from podracer.fields import struct
from podracer.networks.layers import Linear, ResidualBlock, dense, normalize, orthogonal, relu
from podracer.types import Carry

GATE_BIAS = 2.0  # lets little of a branch through at first, so blocks begin near the identity


@struct
class Cache:
    """Inputs of a transformer's L layers at the W timesteps before, 0 if not of this episode."""

    inputs: jax.Array  # f32 [B, L, W, D]
    is_valid: jax.Array  # bool [B, W], whether a timestep is of this episode


class Transformer(eqx.Module):
    """Linear layer and blocks of attention, `x [T, B, n] -> [T, B, D]`."""

    embedding: Linear
    blocks: tuple[_Block, ...]
    size: int = eqx.field(static=True)
    window: int = eqx.field(static=True)

    def __init__(
        self,
        inputs: int,
        size: int,
        *,
        layers: int,
        heads: int,
        window: int,
        gated: bool,
        key: jax.Array,
    ):
        embedding_key, *keys = jax.random.split(key, 1 + layers)
        self.embedding = Linear(inputs, size, 1.0, key=embedding_key)
        self.blocks = tuple(_Block(size, heads, gated, key=k) for k in keys)
        self.size, self.window = size, window

    def carry(self, num_envs: int) -> Carry:
        """Return the initial state, in which nothing is valid."""
        shape = (num_envs, len(self.blocks), self.window, self.size)
        return Cache(jnp.zeros(shape), jnp.zeros(shape[::2], bool))

    def unroll(
        self, cache: Cache, features: jax.Array, first: jax.Array
    ) -> tuple[Cache, jax.Array]:
        """Return the cache after the last step, and outputs `[T, B, D]`."""
        T, W = first.shape[0], self.window
        x = self.embedding(features).swapaxes(0, 1)
        episode = jnp.cumsum(first.T, axis=1, dtype=jnp.int32)  # 0 goes on from the cache
        key_episode = jnp.concatenate([jnp.where(cache.is_valid, 0, -1), episode], axis=1)
        lead = np.arange(W + T) - np.arange(T)[:, None]  # W at the query itself
        in_window = (lead >= 0) & (lead <= W)
        reach = (key_episode[:, None] == episode[:, :, None]) & in_window[None]
        is_valid = key_episode[:, T:] == episode[:, -1:]
        layer_inputs: list[jax.Array] = []
        for i, block in enumerate(self.blocks):
            x = jnp.concatenate([cache.inputs[:, i], x], axis=1)
            layer_inputs.append(x[:, T:])
            x = block(x, reach)
        inputs = jnp.where(is_valid[:, None, :, None], jnp.stack(layer_inputs, axis=1), 0.0)
        return Cache(inputs, is_valid), x.swapaxes(0, 1)


class _Block(eqx.Module):
    """Attention and a perceptron, each behind a ReLU and a gate, or added."""

    attention: _Attention
    perceptron: ResidualBlock
    gates: tuple[_Gate, ...]

    def __init__(self, size: int, heads: int, gated: bool, *, key: jax.Array):
        attention_key, perceptron_key, *gate_keys = jax.random.split(key, 4)
        self.attention = _Attention(size, heads, key=attention_key)
        self.perceptron = ResidualBlock(size, key=perceptron_key)
        self.gates = tuple(_Gate(size, key=k) for k in gate_keys if gated)

    def __call__(self, inputs: jax.Array, reach: jax.Array) -> jax.Array:
        """Return outputs `[B, T, D]` for inputs `[B, W + T, D]`; see `_Attention`."""
        x = inputs[:, -reach.shape[1] :]
        y = relu(self.attention(inputs, reach))
        x = self.gates[0](x, y) if self.gates else x + y
        y = relu(self.perceptron(x, relu))
        return self.gates[1](x, y) if self.gates else x + y


class _Attention(eqx.Module):
    """Normalization, then attention by content and distance."""

    scale: jax.Array
    shift: jax.Array
    weights: jax.Array  # [4, D, D] of queries, keys, distances and values
    content_bias: jax.Array  # u of Transformer-XL, [H, D / H]
    distance_bias: jax.Array  # its v
    output: Linear

    def __init__(self, size: int, heads: int, *, key: jax.Array):
        output_key, *keys = jax.random.split(key, 5)
        self.scale, self.shift = jnp.ones(size), jnp.zeros(size)
        self.weights = jnp.stack([orthogonal(k, (size, size), 1.0) for k in keys])
        self.content_bias = self.distance_bias = jnp.zeros((heads, size // heads))
        self.output = Linear(size, size, 1.0, key=output_key)

    def __call__(self, inputs: jax.Array, reach: jax.Array) -> jax.Array:
        """Return outputs `[B, T, D]` for inputs `[B, W + T, D]`, keys of T queries.

        `reach`, bool `[B, T, W + T]`, has the keys of each query, which are among the W + 1 up to
        its own.
        """
        (B, S, D), T = inputs.shape, reach.shape[1]
        H, d = self.content_bias.shape
        keys = normalize(inputs, self.scale, self.shift)
        query = dense(keys[:, -T:], self.weights[0]).reshape(B, T, H, d)
        key_weight, distance_weight, value_weight = self.weights[1:].reshape(3, D, H, d)
        # Products of three in the cheapest order: acting multiplies no key by the weight of keys.
        content_query = query + self.content_bias[None, None]
        distance_query = query + self.distance_bias[None, None]
        sinusoids = _sinusoids(np.arange(S - T, -1, -1), D)
        content = jnp.einsum("bthd,mhd,bsm->bhts", content_query, key_weight, keys)
        distance = jnp.einsum("bthd,mhd,km->bhtk", distance_query, distance_weight, sinusoids)
        scores = (content + _shift_rows(distance)) / np.sqrt(np.float32(d))
        weights = jax.nn.softmax(jnp.where(reach[:, None], scores, -1e9), axis=-1)
        mixed = jnp.einsum("bhts,bsm,mhd->bthd", weights, keys, value_weight)
        return self.output(mixed.reshape(B, T, D))


def _sinusoids(distance: np.ndarray, size: int) -> np.ndarray:
    """Return f32 `[K, size]`: sines and cosines of K distances at falling frequencies."""
    angles = distance[:, None] / 10_000 ** (np.arange(0, size, 2) / size)
    return np.concatenate([np.sin(angles), np.cos(angles)], -1)[:, :size].astype(np.float32)


def _shift_rows(x: jax.Array) -> jax.Array:
    """Return `[B, H, T, W + T]` with row t of x, `[B, H, T, W + 1]`, moved t to the right."""
    B, H, T, K = x.shape
    x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, T))).reshape(B, H, T * (K + T))
    return x[:, :, : T * (K + T - 1)].reshape(B, H, T, K + T - 1)


class _Gate(eqx.Module):
    """Gate of a GRU between x and a branch y, both `[*b, D]`: section 3.2 of GTrXL's paper."""

    branch: Linear  # to reset, update and candidate, side by side
    skip: jax.Array  # [D, 2 D], from x to reset and update
    candidate: jax.Array  # [D, D]

    def __init__(self, size: int, *, key: jax.Array):
        branch_key, skip_key, candidate_key = jax.random.split(key, 3)
        branch = Linear(size, 3 * size, 1.0, key=branch_key)
        update = slice(size, 2 * size)
        bias = branch.bias.at[update].set(-GATE_BIAS)
        self.branch = eqx.tree_at(lambda layer: layer.bias, branch, bias)
        self.skip = orthogonal(skip_key, (size, 2 * size), 1.0)
        self.candidate = orthogonal(candidate_key, (size, size), 1.0)

    def __call__(self, x: jax.Array, y: jax.Array) -> jax.Array:
        reset, update, candidate = jnp.split(self.branch(y), 3, axis=-1)
        skip_reset, skip_update = jnp.split(dense(x, self.skip), 2, axis=-1)
        update = jax.nn.sigmoid(update + skip_update)
        reset = jax.nn.sigmoid(reset + skip_reset)
        candidate = jnp.tanh(candidate + dense(reset * x, self.candidate))
        return (1 - update) * x + update * candidate
