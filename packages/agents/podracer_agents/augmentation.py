"""DrQ: random shifts of pictures, for any agent with a replay.

    DQN(replay=ShiftedReplay(padding=4))

Each picture of a sample is padded by copies of its border, and cut out at a random place. The
values of both ends of a transition are those of shifted pictures, one shift for each.
Source: Kostrikov et al. 2020, "Image Augmentation Is All You Need" (arXiv 2004.13649), with one
shift in place of averages over several (K = M = 1), as in DrQ-v2 (Yarats et al. 2021, arXiv
2107.09645).
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Shaped

from podracer.errors import ConfigError
from podracer.fields import bounded
from podracer.replay import Buffer, Replay, ReplayState, Sample
from podracer.types import EnvironmentSpec, PyTree


@dataclasses.dataclass(frozen=True)
class ShiftedReplay(Replay):
    """Replay whose samples have shifted pictures, observations `[H, W, C]`."""

    padding: int = bounded(4, low=1)
    """Largest shift in pixels, in each direction."""

    def build(
        self, spec: EnvironmentSpec, length: int, stride: int = 1, *, every_step: bool = False
    ) -> ShiftedBuffer:
        """Return the buffer of an agent. Raises `ConfigError` where there are no pictures."""
        if not any(len(leaf.shape) == 3 for leaf in jax.tree.leaves(spec.observation)):
            raise ConfigError(
                f"ShiftedReplay shifts pictures [H, W, C], and {spec.name} shows none: take Replay."
            )
        return ShiftedBuffer(self, spec, length, stride, every_step)


class ShiftedBuffer(Buffer):
    """Buffer that shifts the pictures of samples."""

    config: ShiftedReplay

    def sample(
        self, state: ReplayState, key: Array, N: int, frames: ArrayLike = 0, axis: str | None = None
    ) -> Sample:
        """Sample N sequences, and shift each of their pictures."""
        sample_key, key = jax.random.split(key)
        sample = super().sample(state, sample_key, N, frames, axis)
        trajectory, final = sample.trajectory, sample.trajectory.final
        timesteps = trajectory.steps.timestep
        step_key, final_key = jax.random.split(key)
        timesteps = dataclasses.replace(
            timesteps, observation=self._shift(timesteps.observation, step_key)
        )
        final = dataclasses.replace(final, observation=self._shift(final.observation, final_key))
        steps = dataclasses.replace(trajectory.steps, timestep=timesteps)
        trajectory = dataclasses.replace(trajectory, steps=steps, final=final)
        return dataclasses.replace(sample, trajectory=trajectory)

    def _shift(self, observation: PyTree, key: Array) -> PyTree:
        leaves, tree = jax.tree.flatten(observation)
        specs = jax.tree.leaves(self.spec.observation)
        keys = jax.random.split(key, len(leaves))
        shifted = [
            shift(x, key, self.config.padding) if len(spec.shape) == 3 else x
            for x, spec, key in zip(leaves, specs, keys, strict=True)
        ]
        return jax.tree.unflatten(tree, shifted)


def shift(
    pictures: Shaped[Array, "*b H W C"], key: Array, padding: int
) -> Shaped[Array, "*b H W C"]:
    """Return pictures, each shifted by up to `padding` pixels; its border fills the gap."""
    height, width, channels = pictures.shape[-3:]
    flat = pictures.reshape(-1, height, width, channels)
    padded = jnp.pad(flat, ((0, 0), (padding, padding), (padding, padding), (0, 0)), mode="edge")
    starts = jax.random.randint(key, (len(flat), 2), 0, 2 * padding + 1)

    def cut(picture: jax.Array, start: jax.Array) -> jax.Array:
        return jax.lax.dynamic_slice(picture, (start[0], start[1], 0), (height, width, channels))

    return jax.vmap(cut)(padded, starts).reshape(pictures.shape)
