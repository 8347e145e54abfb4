"""A transformer as a network of your own, whose recurrent state is a cache of keys and values.

Attention reaches back over the newest timesteps of the episode, those in the cache included, so
acting step by step computes what learning computes for whole rollouts. Distances have learned
biases. Source: Vaswani et al. 2017 (arXiv 1706.03762), normalized before each layer.
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
class Transformer:
    """Causal transformer over vector observations, then linear heads."""

    width: int = 64
    num_heads: int = 4
    num_layers: int = 2
    window: int = 16
    """Number of timesteps that attention reaches over, the current one included."""

    def build(self, observation: Any, heads: Mapping[str, Head]) -> Network:
        (inputs,), width, window = observation.shape, self.width, self.window

        def init(key: jax.Array) -> dict[str, Any]:
            keys = iter(jax.random.split(key, 1 + 4 * self.num_layers + len(heads)))

            def layer() -> dict[str, jax.Array]:
                return {
                    "qkv": _matrix(next(keys), width, 3 * width),
                    "output": _matrix(next(keys), width, width),
                    "hidden": _matrix(next(keys), width, 2 * width),
                    "residual": _matrix(next(keys), 2 * width, width),
                    "distance": jnp.zeros((self.num_heads, window)),
                }

            return {
                "embed": _matrix(next(keys), inputs, width),
                "layers": [layer() for _ in range(self.num_layers)],
                "heads": {
                    name: head.scale * _matrix(next(keys), width, head.size)
                    for name, head in heads.items()
                },
            }

        def carry(num_envs: int) -> dict[str, jax.Array]:
            shape = (num_envs, self.num_layers, window - 1, 2 * width)
            return {"cache": jnp.zeros(shape), "is_cached": jnp.zeros(shape[::2], bool)}

        def attend(
            layer: dict[str, jax.Array], x: jax.Array, cache: jax.Array, reach: jax.Array
        ) -> tuple[jax.Array, jax.Array]:
            """Return `x [B, T, width]` after attention, and all keys and values beside it."""
            query, keys_and_values = jnp.split(_norm(x) @ layer["qkv"], [width], axis=-1)
            memory = jnp.concatenate([cache, keys_and_values], axis=1)
            parts = (query, *jnp.split(memory, 2, axis=-1))
            q, k, v = (y.reshape(*y.shape[:2], self.num_heads, -1) for y in parts)
            T, S = q.shape[1], k.shape[1]
            distance = jnp.arange(S - T, S)[:, None] - jnp.arange(S)[None]  # [T, S]
            scores = jnp.einsum("bthd,bshd->bhts", q, k) / jnp.sqrt(q.shape[-1])
            scores += layer["distance"][:, jnp.clip(distance, 0, window - 1)][None]
            is_near = ((distance >= 0) & (distance < window))[None]
            weights = jax.nn.softmax(jnp.where((reach & is_near)[:, None], scores, -1e9))
            mixed = jnp.einsum("bhts,bshd->bthd", weights, v).reshape(x.shape)
            return x + mixed @ layer["output"], memory

        def apply(
            params: dict[str, Any], carry: dict[str, jax.Array], obs: jax.Array, first: jax.Array
        ) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
            """Return outputs `[T, B, n]` of observations `[T, B, inputs]`, and the new cache."""
            x = jnp.swapaxes(obs, 0, 1) @ params["embed"]
            episode = jnp.cumsum(first.T, axis=1)  # [B, T], 0 goes on from the cache
            cached = jnp.where(carry["is_cached"], 0, -1)
            episodes = jnp.concatenate([cached, episode], axis=1)
            reach = episode[:, :, None] == episodes[:, None]
            caches = []
            for number, layer in enumerate(params["layers"]):
                x, memory = attend(layer, x, carry["cache"][:, number], reach)
                x = x + jax.nn.gelu(_norm(x) @ layer["hidden"]) @ layer["residual"]
                caches.append(memory[:, memory.shape[1] - window + 1 :])
            is_cached = (episodes == episode[:, -1:])[:, episodes.shape[1] - window + 1 :]
            x = jnp.swapaxes(_norm(x), 0, 1)
            outputs = {name: x @ head for name, head in params["heads"].items()}
            return outputs, {"cache": jnp.stack(caches, axis=1), "is_cached": is_cached}

        return Network(init, carry=carry, apply=apply)


def _matrix(key: jax.Array, inputs: int, outputs: int) -> jax.Array:
    return jax.nn.initializers.lecun_normal()(key, (inputs, outputs))


def _norm(x: jax.Array) -> jax.Array:
    return jax.nn.standardize(x, axis=-1)


def main(**overrides: Any) -> float:
    """Train on a task of memory; return the mean return of the last evaluation."""
    experiment = podracer.Experiment(
        recipe="memory_transformer",
        environment="probe:memory",
        agent=podracer.PPO(learning_rate=1e-3, network=Transformer()),
        driver=podracer.AnakinConfig(num_envs=64, rollout_length=16, updates_per_chunk=10),
        frames=81_920,
    )
    result = podracer.train(experiment, **overrides)
    assert result.evaluation is not None
    return float(result.evaluation.returns.mean())


if __name__ == "__main__":
    print(f"mean return {main():.2f}; the best possible is 1")
