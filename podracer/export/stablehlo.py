"""Decisions as StableHLO, by `jax.export`."""

from __future__ import annotations

import jax

from podracer.export.decision import Decision

PLATFORMS = ("cpu", "cuda", "tpu")


def to_stablehlo(decision: Decision) -> bytes:
    """Return a decision as bytes for `jax.export.deserialize`, which holds for any batch size."""
    (batch,) = jax.export.symbolic_shape("B")
    exported = jax.export.export(jax.jit(decision), platforms=PLATFORMS)(decision.structs(batch))
    return bytes(exported.serialize())
