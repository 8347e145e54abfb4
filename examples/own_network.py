"""A network of your own: plain JAX, no neural-network library; PPO trains it on CartPole.

An agent needs an object with `build(observation, heads)` that returns a `Network`: three pure
functions. A module of Flax or Haiku fits the same way: call its `init` and `apply` in here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

import podracer
from podracer import Head, Network


@dataclasses.dataclass(frozen=True)
class ResidualMLP:
    """Layers `x + tanh(W norm(x))` of one width over a vector observation, then linear heads.
    Frozen, hence hashable: it is part of the agent's structure."""

    width: int = 64
    depth: int = 2

    def build(self, observation: Any, heads: Mapping[str, Head]) -> Network:
        (inputs,) = observation.shape

        def init(key: jax.Array) -> dict[str, Any]:
            first, rest, last = jax.random.split(key, 3)
            return {
                "embed": _matrix(first, inputs, self.width),
                "layers": [
                    _matrix(k, self.width, self.width) for k in jax.random.split(rest, self.depth)
                ],
                "heads": {
                    name: head.scale * _matrix(k, self.width, head.size)
                    for (name, head), k in zip(
                        heads.items(), jax.random.split(last, len(heads)), strict=True
                    )
                },
            }

        def apply(
            params: dict[str, Any], carry: Any, observation: jax.Array, first: jax.Array
        ) -> tuple[dict[str, jax.Array], Any]:
            """Outputs `[T, B, n]` from observations `[T, B, inputs]`."""
            x = observation @ params["embed"]
            for layer in params["layers"]:
                x = x + jnp.tanh(_normalized(x) @ layer)
            x = _normalized(x)
            return {name: x @ head for name, head in params["heads"].items()}, carry

        return Network(init, carry=lambda num_envs: (), apply=apply)


def _matrix(key: jax.Array, inputs: int, outputs: int) -> jax.Array:
    return jax.nn.initializers.orthogonal()(key, (inputs, outputs))


def _normalized(x: jax.Array) -> jax.Array:
    return jax.nn.standardize(x, axis=-1)


def main(**overrides: Any) -> float:
    """Train on CartPole; return the mean return of the last evaluation."""
    agent = dataclasses.replace(podracer.PPO(learning_rate=1e-3), network=ResidualMLP())
    result = podracer.train(
        "cartpole_ppo",
        recipe="cartpole_residual",
        agent=agent,
        **overrides,
    )
    assert result.evaluation is not None
    return float(result.evaluation.returns.mean())


if __name__ == "__main__":
    print(f"mean return {main():.1f}; the most possible is 500")
