"""Meta-gradients: exact gradients of an outer loss through the updates of an inner learner.

An update maps a learner's state and a batch to a new state; the outer loss is that of the state
after a few updates. It is differentiated with respect to the metaparameters of the updates.
Source: Xu et al. 2018, "Meta-Gradient Reinforcement Learning" (arXiv 1805.09801), section 2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from podracer.agents.common.optimizers import OptimizerBuilder
from podracer.ops.dense import affine
from podracer.ops.lstm import lstm
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
    """Return the gradient with respect to `meta` of an objective after K updates of a learner.

    `update(meta, learner, batch) -> (learner, aux)` is applied to each of the K items along the
    leading axis of `batches`; then `objective(meta, learner, aux [K, ...]) -> (scalar, info)`.
    Also returns `(learner, info)` after the K updates.

    With `recompute` the backward pass computes the inner values of an update again instead of
    keeping them: about a third more arithmetic, and the memory of one update instead of K.
    """
    step = jax.checkpoint(update) if recompute else update

    def loss(meta: Params) -> tuple[jax.Array, PyTree]:
        new_learner, aux = jax.lax.scan(
            lambda learner, batch: step(meta, learner, batch), learner, batches
        )
        value, info = objective(meta, new_learner, aux)
        return value, (new_learner, info)

    return jax.grad(loss, has_aux=True)(meta)


def clip_by_global_norm(limit: float | jax.Array) -> optax.GradientTransformation:
    """Return a transformation that scales gradients down to a global norm of `limit`.

    It has a derivative also where all gradients are 0, unlike `optax.clip_by_global_norm`.
    """

    def clip(grads: Params, params: Params | None) -> Params:
        # At least 1e-20, where the slope of the root is still finite.
        squared_norm = jnp.maximum(optax.tree.norm(grads, squared=True), 1e-20)
        scale = jnp.minimum(1.0, limit * jax.lax.rsqrt(squared_norm))
        return jax.tree.map(lambda g: g * scale, grads)

    return optax.stateless(clip)


def differentiable_optimizer(
    optimizer: OptimizerBuilder, max_gradient_norm: float | jax.Array
) -> optax.GradientTransformation:
    """Return the unscaled optimizer on clipped gradients, with a derivative where they are 0."""
    clip = clip_by_global_norm(max_gradient_norm)
    return optax.chain(clip, optimizer.build(root_epsilon=1e-10))


# --- networks that read rollouts ------------------------------------------------------------------


def backward_lstm(core: Any, inputs: jax.Array, valid: jax.Array, discount: jax.Array) -> jax.Array:
    """Return the hidden states `[T, B, H]` of an `eqx.nn.LSTMCell` from the last step to the first.

    It reads `inputs [T, B, n]`, and begins anew where `backward_resets` says so.
    """
    resets = backward_resets(valid, discount)
    gates = affine(inputs, core.weight_ih.T, core.bias)
    zeros = jnp.zeros((gates.shape[1], core.hidden_size))
    outputs: Any = lstm(gates, core.weight_hh.T, resets, (zeros, zeros), True)
    return outputs[0]


def backward_resets(valid: jax.Array, discount: jax.Array) -> jax.Array:
    """Return where nothing of the next step may reach the one before, bool `[T, B]`.

    It is where an episode ends, terminal or cut. `valid` and `discount` are `[T, B]`.
    """
    is_cut = jnp.concatenate([~valid[1:], jnp.zeros_like(valid[:1])])
    return is_cut | (discount == 0)


def apply_linear(layer: Any, x: jax.Array) -> jax.Array:
    """Return the outputs `[*b, m]` of an `eqx.nn.Linear` for inputs `[*b, n]`."""
    return affine(x, layer.weight.T, layer.bias)
