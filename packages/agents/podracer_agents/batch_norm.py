"""Layer that normalizes batches by their own moments, for CrossQ and FlashSAC."""

from __future__ import annotations

import equinox as eqx
import jax
import jax.numpy as jnp

from podracer.devices.reductions import moments_of
from podracer.networks.layers import cast

BATCH_MOMENTUM = 0.99  # decay of running moments
BATCH_EPSILON, PLAIN_EPSILON = 1e-3, 1e-5  # added to variances
MAX_RATIO, MAX_SHIFT = 3.0, 5.0  # bounds of the correction towards running moments
WARMUP_BATCHES = 100_000  # batches before there is a correction


class BatchNorm(eqx.Module):
    """Batch renormalization of each feature, `x [N, n] -> [N, n]`, then scale and shift.

    Acting normalizes by running moments. Learning normalizes by the batch's moments, and after a
    warm-up corrects them towards the running ones, within bounds. Gradients pass through the
    batch's moments, not through the correction. Source: Ioffe 2017 (arXiv 1702.03275); the
    constants, and where epsilon stands, are CrossQ's code's (Bhatt et al. 2024, arXiv 1902.05605).
    A plain layer never corrects the batch's moments, as in FlashSAC.
    """

    scale: jax.Array
    shift: jax.Array
    mean: jax.Array  # running, as the next two: no gradient reaches them
    variance: jax.Array
    batches: jax.Array  # f32 [], number of batches
    is_plain: bool = eqx.field(static=True)

    def __init__(self, size: int, *, is_plain: bool = False):
        self.is_plain = is_plain
        self.scale, self.shift = jnp.ones(size), jnp.zeros(size)
        self.mean, self.variance = jnp.zeros(size), jnp.ones(size)
        self.batches = jnp.zeros(())

    def __call__(self, x: jax.Array) -> jax.Array:
        return self._normalize(x, *jax.lax.stop_gradient((self.mean, self.variance)))

    def learn(
        self, x: jax.Array, weights: jax.Array, axis: str | None
    ) -> tuple[jax.Array, BatchNorm]:
        """Return a normalized batch and the layer with new running moments; `weights [N]`."""
        batch = moments_of(x, axis, weights, batch_axes=1)
        old_mean, old_variance, batches = jax.lax.stop_gradient(
            (self.mean, self.variance, self.batches)
        )
        std, old_std = (jnp.sqrt(v + BATCH_EPSILON) for v in (batch.variance, old_variance))
        ratio = jnp.clip(std / old_std, 1.0 / MAX_RATIO, MAX_RATIO)
        shift = jnp.clip((batch.mean - old_mean) / old_std, -MAX_SHIFT, MAX_SHIFT)
        is_warm = (batches >= WARMUP_BATCHES) & (not self.is_plain)
        ratio = jax.lax.stop_gradient(jnp.where(is_warm, ratio, 1.0))
        shift = jax.lax.stop_gradient(jnp.where(is_warm, shift, 0.0))
        # The root of a feature that never changes has no slope.
        mean = batch.mean - shift / ratio * jnp.sqrt(jnp.maximum(batch.variance, 1e-16))
        y = self._normalize(x, mean, batch.variance / ratio**2)

        def follow(old: jax.Array, new: jax.Array) -> jax.Array:
            return BATCH_MOMENTUM * old + (1.0 - BATCH_MOMENTUM) * jax.lax.stop_gradient(new)

        running = follow(old_mean, batch.mean), follow(old_variance, batch.variance), batches + 1
        layer = eqx.tree_at(lambda m: (m.mean, m.variance, m.batches), self, running)
        return y, layer

    def _normalize(self, x: jax.Array, mean: jax.Array, variance: jax.Array) -> jax.Array:
        factor = jax.lax.rsqrt(variance + (PLAIN_EPSILON if self.is_plain else BATCH_EPSILON))
        mean, scale, shift, factor = (v[None] for v in (mean, self.scale, self.shift, factor))
        return ((cast(x) - mean) * factor * scale + shift).astype(x.dtype)
