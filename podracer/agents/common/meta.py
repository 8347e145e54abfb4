"""Gradients through updates: what every agent that learns how to learn is made of.

An update takes a learner's parameters and a batch to new parameters; an objective judges where a
few updates led. Its gradient with respect to what steered them is exact, no path is cut.
Source: Xu et al. 2018, "Meta-Gradient Reinforcement Learning" (arXiv 1805.09801), section 2.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from podracer.types import Params, PyTree

Update = Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]
Objective = Callable[[PyTree, PyTree, PyTree], tuple[jax.Array, PyTree]]


def meta_grad(
    update: Update,
    objective: Objective,
    meta: Params,
    learner: PyTree,
    batches: PyTree,
    *,
    recompute: bool = False,
) -> tuple[Params, PyTree]:
    """Gradient of `objective(meta, learner after K updates, aux of each [K]) -> (scalar, info)`
    with respect to `meta`, and `(learner after K updates, info)`.

    `update(meta, learner, batch) -> (learner, aux)` is applied to each of the K items along the
    leading axis of `batches`. With `recompute` the inner values of an update are computed again on
    the way back instead of kept: about a third more arithmetic, the memory of one update instead
    of K.
    """
    step = jax.checkpoint(update) if recompute else update

    def loss(meta: Params) -> tuple[jax.Array, PyTree]:
        def body(learner: PyTree, batch: PyTree) -> tuple[PyTree, PyTree]:
            return step(meta, learner, batch)

        after, aux = jax.lax.scan(body, learner, batches)
        value, info = objective(meta, after, aux)
        return value, (after, info)

    return jax.grad(loss, has_aux=True)(meta)


def clip_by_norm(limit: float | jax.Array) -> optax.GradientTransformation:
    """Gradients scaled down to a global norm of `limit`; with a derivative also where all are 0,
    which `optax.clip_by_global_norm` lacks."""

    def clip(grads: Params, params: Params | None) -> Params:
        square = jnp.maximum(
            optax.tree.norm(grads, squared=True), 1e-20
        )  # whose slope is still finite
        scale = jnp.minimum(1.0, limit * jax.lax.rsqrt(square))
        return jax.tree.map(lambda g: g * scale, grads)

    return optax.stateless(clip)
