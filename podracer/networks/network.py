"""Interface between agents and networks.

Agents use a `Network`, pure functions over a tree of parameters, and nothing else. A network of any
library fits in as an object with a method `build(observation, heads)` that returns a `Network`; see
`examples/own_network.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp

from podracer.types import Carry, Params, PyTree

Layers = TypeVar("Layers", bound=eqx.Module)

LAST_STEP = "last_step"
"""Key, in an observation that is a dictionary, of what an agent adds about the step before."""


@dataclasses.dataclass(frozen=True)
class Network:
    """Pure functions of a network.

    - `init(key) -> params`;
    - `carry(num_envs) -> carry`: the initial recurrent state `[B, ...]`, `()` if there is none;
    - `apply(params, carry, observation [T, B, ...], first [T, B]) -> (outputs, carry)`: the
      outputs of each head, `{head: f32 [T, B, n]}`, and the recurrent state after the last step. It
      is reset where `first` is set.

    With noisy heads `apply` also takes `noise`: a key for each item `[T, B]`, one key for all
    `[1, 1]`, or None for no noise.
    """

    init: Callable[[jax.Array], Params]
    carry: Callable[[int], Carry]
    apply: Callable[..., tuple[dict[str, jax.Array], Carry]]
    rows_in_cache: int = 256
    """Number of observations of which a CPU takes the gradient at once."""


@dataclasses.dataclass(frozen=True)
class Head:
    """Linear output layer of a network, optionally with hidden layers of its own before it."""

    size: int
    """Number of outputs."""
    scale: float = 1.0
    """Scale of the initial weights of the output layer; noisy layers have their paper's."""
    noisy: bool = False
    """Whether weights and biases have learned noise (Fortunato et al. 2018, arXiv 1706.10295)."""
    noise_scale: float = 0.5
    """Initial scale sigma_0 of the noise, over the square root of a layer's inputs."""
    hidden: tuple[int, ...] = ()
    """Sizes of fully connected layers between the network's features and the output layer, each
    with a ReLU behind it; they are noisy if the head is."""


@runtime_checkable
class NetworkBuilder(Protocol):
    """Hashable configuration of a network, built for an environment's observation."""

    def build(self, observation: PyTree, heads: Mapping[str, Head]) -> Network:
        """Return a network with these heads for observations of a tree of `types.ArraySpec`.

        Raises `ConfigError` for what it cannot build, such as noisy heads.
        """
        ...


def as_params(make: Callable[..., Layers]) -> tuple[Callable[[jax.Array], Params], Layers]:
    """Return `(key) -> params`, the arrays of Equinox layers, and the layers with their shapes.

    `make(key=key)` makes the layers; `eqx.combine(params, layers)` puts parameters into them.
    """
    layers = jax.eval_shape(make, key=jax.eval_shape(lambda: jax.random.key(0)))
    return lambda key: eqx.filter(make(key=key), eqx.is_array), layers


def outputs(network: Network, params: Params, observation: PyTree) -> dict[str, jax.Array]:
    """Return each head's outputs `[N, n]` of a feed-forward network for observations `[N, ...]`."""
    observation = jax.tree.map(lambda x: x[None], observation)
    first = jnp.zeros(jax.tree.leaves(observation)[0].shape[:2], bool)
    head_outputs, _ = network.apply(params, (), observation, first)
    return {name: x[0] for name, x in head_outputs.items()}
