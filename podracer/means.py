"""Means over the items that count.

A step that only resets an environment is no transition: it counts in no mean. The number of steps
that count differs between shards and between minibatches. So such a mean travels as a fraction
whose parts are averaged apart and divided once, at the end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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


def pack(metrics: Mapping[str, Array | Mean]) -> Float32[Array, "n"]:
    """Return all numbers of metrics in one array: loops handle it as one."""
    leaves = [jnp.float32(x) for x in jax.tree.leaves(metrics)]
    if any(x.ndim for x in leaves):
        return jnp.concatenate([x.ravel() for x in leaves])
    return jnp.stack(leaves)


def unpack(packed: Float32[Array, "n"], shapes: Any) -> dict[str, Any]:
    """Return metrics of the shapes of a tree, its leaves' `shape`, that were packed."""
    leaves, structure = jax.tree.flatten(shapes)
    if not any(x.shape for x in leaves):
        return jax.tree.unflatten(structure, list(packed))
    parts = jnp.split(packed, np.cumsum([math.prod(x.shape) for x in leaves])[:-1])
    arrays = [part.reshape(x.shape) for part, x in zip(parts, leaves, strict=True)]
    return jax.tree.unflatten(structure, arrays)


def shapes_of(metrics: Mapping[str, Array | Mean]) -> Any:
    """Return what `unpack` needs of metrics, without their values."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(jnp.shape(x), jnp.float32), metrics)


def as_mean(metric: Array | Mean) -> Mean:
    """Return a metric as a mean in which it counts as one item."""
    return metric if isinstance(metric, Mean) else Mean(metric, jnp.ones_like(metric))
