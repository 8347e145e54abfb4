"""Tabular networks: a row of outputs for each state."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from podracer.errors import ConfigError
from podracer.networks.network import Head, Network
from podracer.types import ArraySpec, Carry, Params, PyTree


@dataclasses.dataclass(frozen=True)
class Table:
    """Table of outputs for environments whose observation is the index of a state.

    All outputs are 0 at first. Parameters are `{head: f32 [num_values, n]}`.
    """

    def build(self, observation: PyTree, heads: Mapping[str, Head]) -> Network:
        """Return the network; raises `ConfigError` for observations and heads that do not fit."""
        num_values = observation.num_values if isinstance(observation, ArraySpec) else None
        if num_values is None or observation.shape:
            raise ConfigError(
                "Table needs the index of a state as its observation: take a TorsoNetwork for "
                "others."
            )
        if any(head.noisy or head.hidden for head in heads.values()):
            raise ConfigError("Table has no noisy heads and no hidden layers: take a TorsoNetwork.")

        def init(key: jax.Array) -> Params:
            return {name: jnp.zeros((num_values, head.size)) for name, head in heads.items()}

        def apply(
            params: Params, carry: Carry, observation: PyTree, first: jax.Array
        ) -> tuple[dict[str, jax.Array], Carry]:
            return {name: table[observation] for name, table in params.items()}, carry

        return Network(init, lambda num_envs: (), apply)
