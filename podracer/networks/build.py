"""Networks as pairs of pure functions.

Agents see `Network(init, carry, apply)` and nothing else. The built-in ones are Equinox modules,
partitioned once, so that a state holds arrays only. Another library fits in by an object with a
`build(observation, heads)` method that returns a `Network`; see `examples/own_network.py`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

import equinox as eqx
import jax
import jax.numpy as jnp

from podracer.networks.layers import ACTIVATIONS, Activation, Convolution, Linear, NoisyLinear, relu
from podracer.types import ArraySpec, Carry, ConfigError, Params, PyTree


@dataclasses.dataclass(frozen=True)
class Network:
    """`init(key) -> params`, `carry(num_envs) -> memory [B, ...]` and
    `apply(params, carry, observation [T, B, ...], first [T, B]) -> ({head: [T, B, n]}, carry)`.

    Memory is cleared where `first` is set; networks without memory have the carry `()`. Only for
    noisy heads `apply` also takes `noise`: one key for each item `[T, B]` or one for all `[1, 1]`;
    None for no noise. `rows_in_cache` is the number of observations whose forward and backward
    pass fit the cache of a CPU.
    """

    init: Callable[[jax.Array], Params]
    carry: Callable[[int], Carry]
    apply: Callable[..., tuple[dict[str, jax.Array], Carry]]
    rows_in_cache: int = 256


@dataclasses.dataclass(frozen=True)
class Head:
    """A linear output of a network: how many numbers, the scale of its initial weights, and
    whether its weights are noisy (Fortunato et al. 2018)."""

    size: int
    scale: float = 1.0
    noisy: bool = False


def outputs(network: Network, params: Params, observation: PyTree) -> dict[str, jax.Array]:
    """Each head's numbers `[N, n]` for observations `[N, ...]`, of a network without memory."""
    observation = jax.tree.map(lambda x: x[None], observation)
    first = jnp.zeros(jax.tree.leaves(observation)[0].shape[:2], bool)
    made, _ = network.apply(params, (), observation, first)
    return {name: x[0] for name, x in made.items()}


class NetworkBuilder(Protocol):
    """Anything hashable that makes a `Network` for an observation (a tree of `types.ArraySpec`)."""

    def build(self, observation: PyTree, heads: Mapping[str, Head]) -> Network: ...


# --- what users set ------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class MLP:
    """Fully connected layers over the flattened observation."""

    hidden: tuple[int, ...] = (64, 64)
    activation: Activation = "relu"


@dataclasses.dataclass(frozen=True)
class CNN:
    """Convolutions without padding, then fully connected layers. The defaults are the network of
    Mnih et al. 2015 ("Nature") for 84x84x4 input."""

    channels: tuple[int, ...] = (32, 64, 64)
    kernels: tuple[int, ...] = (8, 4, 3)
    strides: tuple[int, ...] = (4, 2, 1)
    hidden: tuple[int, ...] = (512,)
    activation: Activation = "relu"


@dataclasses.dataclass(frozen=True)
class ResNet:
    """The deep network of Espeholt et al. 2018 (figure 3): for each stage a convolution, a max-pool
    of stride 2 and `blocks` residual blocks; then one fully connected layer."""

    channels: tuple[int, ...] = (16, 32, 32)
    blocks: int = 2
    hidden: int = 256


Torso = MLP | CNN | ResNet


@dataclasses.dataclass(frozen=True)
class Table:
    """A row of numbers for each state, of environments that show its index, all zero at first.

    Parameters are `{head: f32 [values, n]}`.
    """

    def build(self, observation: PyTree, heads: Mapping[str, Head]) -> Network:
        values = observation.num_values if isinstance(observation, ArraySpec) else None
        if values is None or observation.shape:
            raise ConfigError("Table needs the index of a state as its observation.")
        if any(head.noisy for head in heads.values()):
            raise ConfigError("Table has no noisy heads.")

        def init(key: jax.Array) -> Params:
            return {name: jnp.zeros((values, head.size)) for name, head in heads.items()}

        def apply(
            params: Params,
            carry: Carry,
            observation: PyTree,
            first: jax.Array,
            noise: jax.Array | None = None,
        ):
            return {name: table[observation] for name, table in params.items()}, carry

        return Network(init, lambda num_envs: (), apply)


@dataclasses.dataclass(frozen=True)
class TorsoNetwork:
    """A torso, optionally memory behind it, and linear heads. It sees the index of a state, such
    as a `Table` takes, as a one-hot vector.

    With `shared` all heads sit on one torso; otherwise each head has a torso (and memory) of its
    own, as is common for small actor-critics.
    """

    torso: Torso = MLP()
    shared: bool = True
    memory: Literal["none", "gru", "lstm"] = "none"
    memory_size: int = 128

    def build(self, observation: PyTree, heads: Mapping[str, Head]) -> Network:
        described = observation
        vectors = jax.tree.map(_as_vector, described)

        def make(key: jax.Array) -> dict[str, _Trunk]:
            groups = {"shared": heads} if self.shared else {n: {n: h} for n, h in heads.items()}
            keys = jax.random.split(key, len(groups))
            return {
                name: _Trunk(self, vectors, group, key=k)
                for (name, group), k in zip(groups.items(), keys, strict=True)
            }

        skeleton = jax.eval_shape(make, jax.eval_shape(lambda: jax.random.key(0)))
        _, structure = eqx.partition(skeleton, lambda x: isinstance(x, jax.ShapeDtypeStruct))

        def init(key: jax.Array) -> Params:
            return eqx.filter(make(key), eqx.is_array)

        def carry(num_envs: int) -> Carry:
            return (
                ()
                if self.memory == "none"
                else {n: t.carry(num_envs) for n, t in structure.items()}
            )

        def apply(
            params: Params,
            carry: Carry,
            observation: PyTree,
            first: jax.Array,
            noise: jax.Array | None = None,
        ):
            outputs: dict[str, jax.Array] = {}
            memories = {}
            observation = jax.tree.map(
                lambda leaf, x: jax.nn.one_hot(x, leaf.num_values) if leaf.num_values else x,
                described,
                observation,
            )
            for name, trunk in eqx.combine(params, structure).items():
                memory = carry[name] if carry else ()
                made, memories[name] = trunk(memory, observation, first, noise)
                outputs |= made
            return outputs, (memories if carry else ())

        return Network(init, carry, apply, 512 if isinstance(self.torso, MLP) else 256)


MOST_VALUES = 4096  # of an index that a torso sees: each has a row of weights, as a table does


def _as_vector(leaf: ArraySpec) -> ArraySpec:
    """What a torso sees of one leaf of an observation."""
    if leaf.num_values is None:
        return leaf
    if leaf.num_values > MOST_VALUES:
        raise ConfigError(
            f"{leaf.num_values} states are too many for a torso, which takes at most "
            f"{MOST_VALUES}: use a Table."
        )
    return ArraySpec((*leaf.shape, leaf.num_values))


class _Trunk(eqx.Module):
    """Torso, memory and heads over `[T, B, ...]`."""

    layers: tuple[Any, ...]
    cell: Any
    heads: dict[str, Linear | NoisyLinear]
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
        self.layers, size = _make_torso(config.torso, observation, torso_key)
        self.cell = None
        if config.memory != "none":
            kind = eqx.nn.GRUCell if config.memory == "gru" else eqx.nn.LSTMCell
            self.cell = kind(size, config.memory_size, key=cell_key)
            size = config.memory_size
        keys = jax.random.split(head_key, len(heads))
        self.heads = {
            name: (NoisyLinear if head.noisy else Linear)(size, head.size, head.scale, key=k)
            for (name, head), k in zip(heads.items(), keys, strict=True)
        }

    def carry(self, num_envs: int) -> Carry:
        zeros = jnp.zeros((num_envs, self.config.memory_size))
        return zeros if self.config.memory == "gru" else (zeros, zeros)

    def __call__(
        self, carry: Carry, observation: PyTree, first: jax.Array, noise: jax.Array | None
    ):
        T, B = first.shape
        flat = jax.tree.map(lambda x: x.reshape(T * B, *x.shape[2:]), observation)
        features = _apply_torso(self.config.torso, self.layers, flat)
        if self.cell is not None:
            features = features.reshape(T, B, -1)
            carry, features = jax.lax.scan(
                lambda c, x: self._remember(c, *x), carry, (features, first)
            )
            features = features.reshape(T * B, -1)
        noise = None if noise is None else noise.reshape(-1)
        outputs = {
            name: head(features, noise) if isinstance(head, NoisyLinear) else head(features)
            for name, head in self.heads.items()
        }
        return {name: x.reshape(T, B, -1) for name, x in outputs.items()}, carry

    def _remember(self, carry: Carry, features: jax.Array, first: jax.Array):
        carry = jax.tree.map(lambda c: jnp.where(first[:, None], 0.0, c), carry)
        carry = jax.vmap(self.cell)(features, carry)
        return carry, carry if self.config.memory == "gru" else carry[0]


# --- torsos --------------------------------------------------------------------------------------


def _split(config: Torso, leaves: list[Any], shapes: list[tuple[int, ...]]) -> tuple[list, list]:
    """Leaves for the convolutions, and leaves to flatten, by their unbatched shapes."""
    is_image = [len(shape) == 3 and not isinstance(config, MLP) for shape in shapes]
    images = [x for x, image in zip(leaves, is_image, strict=True) if image]
    return images, [x for x, image in zip(leaves, is_image, strict=True) if not image]


def _make_torso(config: Torso, observation: PyTree, key: jax.Array) -> tuple[tuple[Any, ...], int]:
    """The layers of a torso for one observation, and the number of features they give."""
    leaves = jax.tree.leaves(observation)
    images, vectors = _split(config, leaves, [x.shape for x in leaves])
    size = sum(math.prod(x.shape) for x in vectors)
    layers: list[Any] = []
    conv_key, dense_key = jax.random.split(key)
    if images:
        if len({x.shape[:2] for x in images}) > 1:
            raise ConfigError("image observations must have the same height and width")
        height, width = images[0].shape[:2]
        channels = sum(x.shape[2] for x in images)
        made = _convolutions(config, (height, width, channels), conv_key)
        layers.append(made[0])
        size += math.prod(made[1])
    elif not isinstance(config, MLP):
        raise ConfigError(f"{type(config).__name__} needs an image observation [H, W, C]")
    hidden = (config.hidden,) if isinstance(config, ResNet) else config.hidden
    dense = []
    for width, k in zip(hidden, jax.random.split(dense_key, max(1, len(hidden))), strict=False):
        dense.append(Linear(size, width, math.sqrt(2), key=k))
        size = width
    layers.append(tuple(dense))
    return tuple(layers), size


def _convolutions(
    config: Torso, shape: tuple[int, int, int], key: jax.Array
) -> tuple[tuple[Any, ...], tuple[int, int, int]]:
    """Convolution layers, and the shape `[H, W, C]` that they leave."""
    height, width, channels = shape
    layers = []
    if isinstance(config, CNN):
        keys = jax.random.split(key, len(config.channels))
        for outputs, size, stride, k in zip(
            config.channels, config.kernels, config.strides, keys, strict=True
        ):
            layers.append(Convolution(channels, outputs, size, stride, False, key=k))
            height, width = (height - size) // stride + 1, (width - size) // stride + 1
            channels = outputs
        if height < 1 or width < 1:
            raise ConfigError(f"{config} leaves nothing of a {shape} image")
    elif isinstance(config, ResNet):
        for outputs, stage in zip(
            config.channels, jax.random.split(key, len(config.channels)), strict=True
        ):
            keys = jax.random.split(stage, 1 + 2 * config.blocks)
            convs = [Convolution(channels, outputs, 3, 1, True, key=keys[0])]
            convs += [Convolution(outputs, outputs, 3, 1, True, key=k) for k in keys[1:]]
            layers.append(tuple(convs))
            height, width, channels = (height + 1) // 2, (width + 1) // 2, outputs
    return tuple(layers), (height, width, channels)


def _as_float(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32) / 255.0 if x.dtype == jnp.uint8 else x.astype(jnp.float32)


def _apply_torso(config: Torso, layers: tuple[Any, ...], observation: PyTree) -> jax.Array:
    """Features `[N, size]` from observation leaves `[N, ...]`."""
    leaves = [_as_float(x) for x in jax.tree.leaves(observation)]
    images, vectors = _split(config, leaves, [x.shape[1:] for x in leaves])
    parts = [x.reshape(x.shape[0], -1) for x in vectors]
    if images:
        image = _apply_convolutions(config, layers[0], jnp.concatenate(images, axis=-1))
        parts.append(image.reshape(image.shape[0], -1))
    x = jnp.concatenate(parts, axis=-1) if len(parts) > 1 else parts[0]
    activation = relu if isinstance(config, ResNet) else ACTIVATIONS[config.activation]
    for layer in layers[-1]:
        x = activation(layer(x))
    return x


def _apply_convolutions(config: Torso, layers: tuple[Any, ...], x: jax.Array) -> jax.Array:
    if isinstance(config, CNN):
        for layer in layers:
            x = ACTIVATIONS[config.activation](layer(x))
        return x
    for first, *blocks in layers:
        x = first(x)
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        for one, two in zip(blocks[::2], blocks[1::2], strict=True):
            x = x + two(relu(one(relu(x))))
    return relu(x)
