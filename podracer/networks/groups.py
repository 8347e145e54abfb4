"""Networks that see a group of an observation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from podracer.errors import ConfigError
from podracer.networks.network import Head, Network, NetworkBuilder
from podracer.types import Carry, Params, PyTree, select


@dataclasses.dataclass(frozen=True)
class GroupNetwork:
    """Network, without its heads, that sees entries of an observation that is a dictionary.

    `entry` is the key of the observation among the inputs, where agents add others. Without `keys`
    the network sees all.
    """

    network: NetworkBuilder
    keys: tuple[str, ...]
    entry: str | None = None

    def build(self, observation: PyTree, heads: Mapping[str, Head]) -> Network:
        """Return the network; raises `ConfigError` for one with functions besides `apply`."""
        network = self.network.build(self._select(observation), heads)
        if not self.keys:
            return network
        if type(network) is not Network:
            raise ConfigError(f"a {type(network).__name__} takes no groups of an observation.")

        def apply(
            params: Params, carry: Carry, observation: PyTree, first: jax.Array, *noise: Any
        ) -> tuple[dict[str, jax.Array], Carry]:
            return network.apply(params, carry, self._select(observation), first, *noise)

        return dataclasses.replace(network, apply=apply)

    def _select(self, inputs: PyTree) -> PyTree:
        if self.entry is None:
            return select(inputs, self.keys)
        return {**inputs, self.entry: select(inputs[self.entry], self.keys)}
