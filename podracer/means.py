"""Means over the items that count.

A step that only resets an environment is no transition: it counts in no mean. The number of steps
that count differs between shards and between minibatches. So such a mean travels as a fraction
whose parts are averaged apart and divided once, at the end.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

from podracer.fields import struct, unchecked


@unchecked
@struct
class Mean:
    """Mean over the items that count, as a fraction.

    The averages of both parts over equal shards, minibatches or updates are the parts of the mean
    over all their items.
    """

    total: Float32[Array, "*h"]
    """Sum over the items that count, divided by the number of all items."""
    share: Float32[Array, "*h"]
    """Share of the items that count, in [0, 1]."""

    @property
    def value(self) -> Float32[Array, "*h"]:
        """Mean over the items that count; 0 where none does."""
        return divide(self.total, self.share)

    def __float__(self) -> float:
        return float(self.value)


def divide(total: Float32[Array, "..."], share: Float32[Array, "..."]) -> Float32[Array, "..."]:
    """Return a sum over items that count, divided by their share; 0 where none counts."""
    return total / jnp.maximum(share, 1e-12)  # below the smallest share of an item


def mean_of(x: Array, mask: Bool[Array, "..."] | Float32[Array, "..."]) -> Mean:
    """Return the mean of items where a mask of their shape is True, or 1."""
    mask = mask.astype(jnp.float32)
    return Mean(jnp.mean(mask * x), jnp.mean(mask))


def with_share(metrics: Mapping[str, Array], share: Float32[Array, "*h"]) -> dict[str, Mean]:
    """Return metrics that are sums over items that count, divided by the number of all items."""
    return {name: Mean(total, share) for name, total in metrics.items()}


def as_mean(metric: Array | Mean) -> Mean:
    """Return a metric as a mean in which it counts as one item."""
    return metric if isinstance(metric, Mean) else Mean(metric, jnp.ones_like(metric))
