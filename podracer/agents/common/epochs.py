"""Several epochs of minibatches on one rollout: their order, their advantages, when they stop."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp

from podracer import schedules
from podracer.agents.common import actor_critic
from podracer.agents.common.actor_critic import ScheduledOptimizer
from podracer.devices.reductions import global_grad_in_blocks
from podracer.errors import ConfigError
from podracer.means import Mean, pack, unpack
from podracer.networks import Network
from podracer.ops.minibatches import permutation, take
from podracer.ops.moments import moments_of
from podracer.types import LearnerState, Metrics, Params, PyTree

State = TypeVar("State")
Counted = TypeVar("Counted", bound=actor_critic.CountedState)
# (state, minibatch) -> (new state, metrics); the `approx_kl` among them, which is that of the
# old state, must be the `Mean` over all shards
Update = Callable[[State, PyTree], tuple[State, Metrics]]
Grouping = Literal["minibatch", "batch", "none"]


def to_items(batch: Any) -> Any:
    """Return a rollout's items: transitions `[1, T B, ...]`, or sequences if it has a carry."""
    recurrent = jax.tree.leaves(batch.carry)
    return batch if recurrent else jax.tree.map(lambda x: x.reshape(1, -1, *x.shape[2:]), batch)


def shuffled_minibatches(
    key: jax.Array, num_items: int, num_minibatches: int, num_epochs: int
) -> jax.Array:
    """Return items 0 .. N - 1 in a new order for each epoch, as minibatches u32 `[K, n]`.

    There are K = `num_epochs` times `num_minibatches`. Raises `ConfigError` where N items cannot be
    split evenly.
    """
    if num_items % num_minibatches:
        raise ConfigError(
            f"a device cannot split the {num_items} items of its rollout into {num_minibatches} "
            "equal minibatches: take a num_minibatches that divides them."
        )
    keys = jax.random.split(key, num_epochs)
    items = jax.vmap(lambda key: permutation(key, num_items))(keys)
    return items.reshape(num_epochs * num_minibatches, -1)


def fit(
    network: Network,
    optimizer: ScheduledOptimizer,
    loss: Callable[[Params, Any], tuple[Mean, Metrics]],
    state: LearnerState,
    batch: Any,
    items: jax.Array,
    axis: str | None,
) -> tuple[LearnerState, Metrics]:
    """Take an optimizer step on each minibatch of `items` `[K, n]` of a batch of `to_items`."""
    update = partial(fit_minibatch, network, optimizer, loss, batch, axis)
    learner, metrics = scan_minibatches(update, state.shared, items, target_kl=None)
    num_frames = schedules.frames_of(batch.valid, metrics["loss"].share, axis)
    return LearnerState(actor_critic.count_frames(learner, num_frames)), metrics


def fit_minibatch(
    network: Network,
    optimizer: ScheduledOptimizer,
    loss: Callable[[Params, Any], tuple[Mean, Metrics]],
    batch: Any,
    axis: str | None,
    learner: Counted,
    items: jax.Array,
) -> tuple[Counted, Metrics]:
    """Take an optimizer step on the `loss(params, minibatch)` of items u32 `[n]` of a batch.

    Leaves of the batch are `[T, N, ...]`, those of the minibatch `[T, n, ...]`. The gradient of the
    loss, a mean over items, and the metrics are averaged over shards, in one reduction.
    """
    length = max(x.shape[0] for x in jax.tree.leaves(batch))
    grads, metrics = global_grad_in_blocks(
        lambda params, items: loss(params, take(batch, items)),
        learner.params,
        items,
        indices_in_cache=network.rows_in_cache // length,
        axis=axis,
    )
    learner, update_metrics = optimizer.step(learner, grads)
    return learner, {**metrics, **update_metrics}


def advantage_moments(
    advantages: jax.Array,
    valid: jax.Array,
    minibatches: jax.Array,
    grouping: Grouping,
    axis: str | None,
) -> tuple[jax.Array, jax.Array]:
    """Return the mean and the variance `[K]` that standardize the advantages of K minibatches.

    Advantages and `valid` are `[T, N]`, minibatches items `[K, n]`; the moments are those of all
    shards.
    """
    mean, variance = jnp.zeros(()), jnp.ones(())
    if grouping != "none":
        if grouping == "minibatch":  # [T, n, K]
            advantages, valid = (
                jnp.moveaxis(x.at[:, minibatches].get(mode="promise_in_bounds"), 1, -1)
                for x in (advantages, valid)
            )
        moments = moments_of(advantages, axis, valid)
        mean, variance = moments.mean, moments.variance
    shape = minibatches.shape[:1]
    return jnp.broadcast_to(mean, shape), jnp.broadcast_to(variance, shape)


def scan_minibatches(
    update: Update[State],
    state: State,
    minibatches: PyTree,
    target_kl: float | None,
) -> tuple[State, Metrics]:
    """Update a state on minibatches, leaves `[K, ...]`, in turn; metrics are means over them.

    With a `target_kl` the update of the first minibatch whose `approx_kl` exceeds 1.5 times as
    much is not applied, and the minibatches after it are skipped, as in Stable-Baselines3.
    """
    if target_kl is None:
        structures = []

        def packed_update(state: State, minibatch: PyTree) -> tuple[State, jax.Array]:
            state, metrics = update(state, minibatch)
            structures.append(jax.tree.structure(metrics))
            return state, pack(metrics)

        state, packed = jax.lax.scan(packed_update, state, minibatches)
        return state, unpack(jnp.mean(packed, axis=0), structures[0])

    attempt = partial(_update_within, 1.5 * target_kl, update)
    first = jax.tree.map(lambda x: x[0], minibatches)
    shapes = jax.eval_shape(attempt, state, first)[1]
    no_metrics = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def step(loop: tuple[State, jax.Array], minibatch: PyTree) -> Any:
        state, stop = loop
        loop, metrics = jax.lax.cond(
            stop, lambda *_: ((state, stop), no_metrics), attempt, state, minibatch
        )
        return loop, (metrics, ~stop)

    loop = (state, jnp.bool_(False))
    (state, _), (metrics, tried) = jax.lax.scan(step, loop, minibatches)
    means = jax.tree.map(lambda x: jnp.sum(x) / jnp.sum(tried), metrics)
    return state, {**means, "minibatch_fraction": jnp.mean(metrics["minibatch_fraction"])}


def _update_within(
    most_kl: float, update: Update[State], state: State, minibatch: PyTree
) -> tuple[tuple[State, jax.Array], Metrics]:
    """Return an updated state, or the old one and True where the divergence is too large."""
    new_state, metrics = update(state, minibatch)
    stop = metrics["approx_kl"].value > most_kl
    state = jax.tree.map(lambda old, new: jnp.where(stop, old, new), state, new_state)
    return (state, stop), {**metrics, "minibatch_fraction": 1.0 - stop}
