"""Networks that keep the planes of their convolutions, as those of AlphaZero and MuZero do.

Leaves of an observation that are not images `[H, W, C]` become planes, too: each of their numbers
is one constant plane.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp

from podracer.errors import ConfigError
from podracer.networks.convolutions import (
    CNN,
    Convolution,
    ResNet,
    apply_convolutions,
    make_convolutions,
)
from podracer.networks.layers import HeadLayers, Normalized, as_float, cast, relu
from podracer.networks.network import Head, Network, as_params
from podracer.networks.torsos import unscaled
from podracer.types import ArraySpec, Carry, Params, PyTree

HEAD_PLANES = 16  # most planes of a head, before its fully connected layers


@dataclasses.dataclass(frozen=True)
class Planes:
    """Head that returns the planes themselves, f32 `[T, B, H, W, C]`."""


@dataclasses.dataclass(frozen=True)
class PlaneNetwork:
    """Convolutions of a torso, without its fully connected layers, and heads on their planes.

    A head that is not `Planes` reduces them by a convolution of single pixels, and has fully
    connected layers behind it. Source: Schrittwieser et al. 2020, appendix F.
    """

    torso: CNN | ResNet
    """Convolutions; a `ResNet` of no stages leaves its input as it is."""
    hidden: tuple[int, ...] = ()
    """Sizes of the fully connected layers of each head, before its own."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype in which all but the output layers multiply."""

    def build(self, observation: PyTree, heads: Mapping[str, Head | Planes]) -> Network:
        """Return the network for an observation, a tree of `ArraySpec`.

        Raises `ConfigError` for heads with noise, and where the observation has no images, images
        of several sizes, or indices of states.
        """
        vectors = [head for head in heads.values() if isinstance(head, Head)]
        if any(head.noisy for head in vectors):
            raise ConfigError("a network of planes has no noisy heads.")
        init, layers = self._layers(observation, heads)

        def apply(
            params: Params, carry: Carry, observations: PyTree, first: jax.Array
        ) -> tuple[dict[str, jax.Array], Carry]:
            T, B = first.shape
            leaves = jax.tree.leaves(jax.tree.map(unscaled, observation, observations))
            flat = [x.reshape(T * B, *x.shape[2:]) for x in leaves]
            outputs = eqx.combine(params, layers)(_stack_planes(flat))
            return {name: x.reshape(T, B, *x.shape[1:]) for name, x in outputs.items()}, ()

        return Network(init, lambda num_envs: (), apply)

    def planes(self, observation: PyTree) -> ArraySpec:
        """Return the specification of the planes."""
        return ArraySpec(self._layers(observation, {})[1].shape)

    def _layers(
        self, observation: PyTree, heads: Mapping[str, Head | Planes]
    ) -> tuple[Callable[[jax.Array], Params], _PlaneLayers]:
        input_shape = _input_shape(jax.tree.leaves(observation))
        return as_params(partial(_PlaneLayers, self, input_shape, heads))


def _input_shape(specs: Sequence[ArraySpec]) -> tuple[int, int, int]:
    sizes = {spec.shape[:2] for spec in specs if len(spec.shape) == 3}
    if len(sizes) != 1 or any(spec.num_values for spec in specs):
        raise ConfigError(
            "a network of planes needs image observations [H, W, C] of one height and width, and "
            "no indices of states."
        )
    height, width = sizes.pop()
    channels = sum(math.prod(spec.shape[2 if len(spec.shape) == 3 else 0 :]) for spec in specs)
    return height, width, channels


def _stack_planes(leaves: list[jax.Array]) -> jax.Array:
    """Return planes `[N, H, W, C]` of leaves `[N, ...]`, images first."""
    images = [as_float(x) for x in leaves if x.ndim == 4]
    numbers = [as_float(x).reshape(len(x), 1, 1, -1) for x in leaves if x.ndim != 4]
    size = images[0].shape[:3]
    planes = [jnp.broadcast_to(x, (*size, x.shape[-1])) for x in numbers]
    return jnp.concatenate([*images, *planes], axis=-1)


class _PlaneLayers(eqx.Module):
    """Convolutions and heads over `[N, H, W, C]`."""

    convolutions: tuple[Any, ...]
    reductions: dict[str, Convolution | Normalized]
    heads: dict[str, HeadLayers]
    planes: tuple[str, ...] = eqx.field(static=True)  # names of the heads that are `Planes`
    shape: tuple[int, int, int] = eqx.field(static=True)
    config: PlaneNetwork = eqx.field(static=True)

    def __init__(
        self,
        config: PlaneNetwork,
        input_shape: tuple[int, int, int],
        heads: Mapping[str, Head | Planes],
        *,
        key: jax.Array,
    ):
        key, *head_keys = jax.random.split(key, 1 + 2 * len(heads))
        self.config = config
        self.planes = tuple(name for name, head in heads.items() if isinstance(head, Planes))
        self.convolutions, self.shape = make_convolutions(config.torso, input_shape, key)
        height, width, channels = self.shape
        reduced, layer_norm = min(channels, HEAD_PLANES), config.torso.layer_norm
        self.reductions, self.heads = {}, {}
        for (name, head), reduction_key, head_key in zip(
            heads.items(), head_keys[::2], head_keys[1::2], strict=True
        ):
            if isinstance(head, Head):
                reduction = Convolution(channels, reduced, 1, 1, True, key=reduction_key)
                self.reductions[name] = Normalized(reduction) if layer_norm else reduction
                head = dataclasses.replace(head, hidden=config.hidden + head.hidden)
                self.heads[name] = HeadLayers(height * width * reduced, head, key=head_key)

    def __call__(self, x: jax.Array) -> dict[str, jax.Array]:
        dtype = self.config.compute_dtype
        x = apply_convolutions(self.config.torso, self.convolutions, cast(x, dtype))
        outputs = dict.fromkeys(self.planes, cast(x))
        for name, head in self.heads.items():
            reduced = relu(self.reductions[name](relu(x)))
            outputs[name] = head(reduced.reshape(len(reduced), -1), None, dtype)
        return outputs
