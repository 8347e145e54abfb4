"""Built-in networks: a torso, optionally a recurrent layer, and linear heads.

They are Equinox modules, partitioned once, so that a learner's state holds arrays only.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from podracer.arguments import typed
from podracer.devices.kernels import scan
from podracer.errors import ConfigError
from podracer.fields import bounded
from podracer.networks.layers import HeadLayers, cast
from podracer.networks.network import LAST_STEP, Head, Network
from podracer.networks.torsos import MLP, Torso, apply_torso, make_torso, unscaled
from podracer.networks.transformer import Transformer
from podracer.ops.dense import affine
from podracer.ops.lstm import lstm
from podracer.ops.random import random_normals
from podracer.types import ArraySpec, Carry, Params, PyTree

TRANSFORMERS = ("gtrxl", "transformer")
MAX_ONE_HOT = 4096  # values of an index that a torso takes; each has a row of weights


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

        def make(key: jax.Array) -> dict[str, _Trunk]:
            groups = {"shared": heads} if self.shared else {n: {n: h} for n, h in heads.items()}
            keys = jax.random.split(key, len(groups))
            return {
                name: _Trunk(self, torso_inputs, group, key=k)
                for (name, group), k in zip(groups.items(), keys, strict=True)
            }

        skeleton = jax.eval_shape(make, jax.eval_shape(lambda: jax.random.key(0)))
        _, trunks = eqx.partition(skeleton, lambda x: isinstance(x, jax.ShapeDtypeStruct))

        def init(key: jax.Array) -> Params:
            return eqx.filter(make(key), eqx.is_array)

        def carry(num_envs: int) -> Carry:
            if self.memory == "none":
                return ()
            return {name: trunk.carry(num_envs) for name, trunk in trunks.items()}

        def apply(
            params: Params,
            carry: Carry,
            observations: PyTree,
            first: jax.Array,
            noise: jax.Array | None = None,
        ) -> tuple[dict[str, jax.Array], Carry]:
            outputs: dict[str, jax.Array] = {}
            carries = {}
            observations = jax.tree.map(_as_input, observation, observations)
            combined = eqx.combine(params, trunks)
            noises = _noises(noise, [trunk.heads for trunk in combined.values()])
            for name, trunk in combined.items():
                memory = carry[name] if carry else ()
                head_outputs, carries[name] = trunk(memory, observations, first, noises)
                outputs |= head_outputs
            return outputs, (carries if carry else ())

        rows_in_cache = 512 if isinstance(self.torso, MLP) else 256
        return Network(init, carry, apply, rows_in_cache)


def _noises(
    keys: jax.Array | None, groups: Sequence[dict[str, Any]]
) -> dict[str, jax.Array | None]:
    """Return the noise `[N, n]` of each head: parts of one draw from each of N keys."""
    heads = {name: head for group in groups for name, head in group.items()}
    if keys is None:
        return dict.fromkeys(heads)
    ends = np.cumsum([head.noise_size for head in heads.values()])
    e = random_normals(keys.reshape(-1), int(ends[-1]))
    parts = jnp.split(jnp.sign(e) * jnp.sqrt(jnp.abs(e)), ends[:-1], axis=-1)
    return dict(zip(heads, parts, strict=True))


def _torso_input(spec: ArraySpec) -> ArraySpec:
    """Return the spec of a torso's input for one leaf of an observation; see `_as_input`."""
    if spec.num_values is None:
        return spec
    if spec.num_values > MAX_ONE_HOT:
        raise ConfigError(
            f"{spec.num_values} states are too many for a torso, which takes at most "
            f"{MAX_ONE_HOT}: use a Table."
        )
    return ArraySpec((*spec.shape, spec.num_values))


def _as_input(spec: ArraySpec, x: jax.Array) -> jax.Array:
    return jax.nn.one_hot(x, spec.num_values) if spec.num_values else unscaled(spec, x)


def _split_last_step(observation: PyTree) -> tuple[PyTree, PyTree]:
    """Return the parts of an observation, or of its spec, that the torso sees and does not see."""
    if not (isinstance(observation, dict) and observation.keys() == {"observation", LAST_STEP}):
        return observation, ()  # an environment's own may have an entry of this name
    torso_input = {name: part for name, part in observation.items() if name != LAST_STEP}
    return torso_input, observation[LAST_STEP]


def _lstm_cell(inputs: int, units: int, *, key: jax.Array) -> eqx.nn.LSTMCell:
    """Return an LSTM cell that begins by remembering: forget-gate biases of 1, as in haiku.

    Source: Jozefowicz et al. 2015, "An Empirical Exploration of Recurrent Network Architectures".
    """
    cell = eqx.nn.LSTMCell(inputs, units, key=key)
    assert cell.bias is not None
    forget = slice(units, 2 * units)  # after those of the input gate
    return eqx.tree_at(lambda c: c.bias, cell, cell.bias.at[forget].set(1.0))


def _make_cell(config: TorsoNetwork, inputs: int, key: jax.Array) -> Any:
    if config.memory in TRANSFORMERS:
        return Transformer(
            inputs,
            config.memory_size,
            layers=config.memory_layers,
            heads=config.memory_heads,
            window=config.memory_window,
            gated=config.memory == "gtrxl",
            key=key,
        )
    cell = _lstm_cell if config.memory == "lstm" else eqx.nn.GRUCell
    return cell(inputs, config.memory_size, key=key)


class _Trunk(eqx.Module):
    """Torso, recurrent layer and heads over `[T, B, ...]`."""

    layers: tuple[Any, ...]
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
        self.layers, size = make_torso(config.torso, observation, torso_key)
        size += sum(math.prod(x.shape) for x in jax.tree.leaves(last_step))
        self.cell = None
        if config.memory != "none":
            self.cell = _make_cell(config, size, cell_key)
            size = config.memory_size
        keys = jax.random.split(head_key, len(heads))
        self.heads = {
            name: HeadLayers(size, head, key=k)
            for (name, head), k in zip(heads.items(), keys, strict=True)
        }

    def carry(self, num_envs: int) -> Carry:
        if isinstance(self.cell, Transformer):
            return self.cell.carry(num_envs)
        zeros = jnp.zeros((num_envs, self.config.memory_size))
        return zeros if self.config.memory == "gru" else (zeros, zeros)

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
        features = apply_torso(self.config.torso, self.layers, flat, dtype)
        if last_step:
            parts = [x.reshape(T * B, -1) for x in jax.tree.leaves(last_step)]
            features = jnp.concatenate([features, *parts], axis=-1)
        if self.cell is not None:
            features = cast(features.reshape(T, B, -1))
            carry, features = self._remember(carry, features, first)
            features = features.reshape(T * B, -1)
        outputs = {name: head(features, noises[name], dtype) for name, head in self.heads.items()}
        return {name: x.reshape(T, B, -1) for name, x in outputs.items()}, carry

    def _remember(
        self, carry: Carry, features: jax.Array, first: jax.Array
    ) -> tuple[Carry, jax.Array]:
        """Return the recurrent layer's state after the last step, and its outputs `[T, B, H]`."""
        if isinstance(self.cell, Transformer):
            return self.cell(carry, features, first)
        if self.config.memory == "lstm":
            # Behind a barrier, or the gradients of the transposes become slow products on a CPU.
            weights = (self.cell.weight_ih.T, self.cell.weight_hh.T)
            weight_ih, weight_hh = jax.lax.optimization_barrier(weights)
            gate_inputs = affine(features, weight_ih, self.cell.bias)
            unrolled: Any = lstm(gate_inputs, weight_hh, first, carry, False)
            return unrolled[1], unrolled[0]

        def step(memory: jax.Array, x: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            features, first = x
            memory = jax.vmap(self.cell)(features, jnp.where(first[:, None], 0.0, memory))
            return memory, memory

        return scan(step, carry, (features, first))
