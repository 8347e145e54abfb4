"""Several epochs of minibatches on one rollout: their order, their advantages, when they stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp

from podracer.agents.common.optimizers import CountedState, ScheduledOptimizer
from podracer.devices import kernels
from podracer.devices.reductions import global_grad_in_blocks
from podracer.errors import ConfigError
from podracer.means import Mean, pack, shapes_of, unpack
from podracer.networks import Network
from podracer.ops.minibatches import permutation, take
from podracer.ops.moments import moments_of
from podracer.types import Metrics, PyTree

State = TypeVar("State", bound=CountedState)
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


def advantage_moments(
    advantages: jax.Array,
    valid: jax.Array,
    minibatches: jax.Array,
    grouping: Grouping,
    axis: str | None,
) -> tuple[jax.Array, jax.Array]:
    """Return the mean and the variance `[K]` that standardize the advantages of K minibatches.

    Advantages and `valid` are `[T, N]`, minibatches items `[K, n]`; all shards have the same
    moments.
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


def fit(
    network: Network,
    optimizer: ScheduledOptimizer,
    loss: Callable[..., tuple[Mean, Metrics]],
    learner: State,
    batch: Any,
    minibatches: tuple[jax.Array, ...],
    axis: str | None,
    target_kl: float | None = None,
) -> tuple[State, Metrics]:
    """Take an optimizer step on each of K minibatches in turn; metrics are means over them.

    `minibatches` are items u32 `[K, n]` of the batch, whose leaves are `[T, N, ...]`, and arguments
    `[K]` of the `loss(params, minibatch, *arguments)`, a mean over items. Gradients and metrics are
    averaged over shards. With a `target_kl` the step on the first minibatch whose `approx_kl`
    exceeds 1.5 times as much is not taken, nor any after it, as in Stable-Baselines3.
    """
    length = max(x.shape[0] for x in jax.tree.leaves(batch))
    learning_rate = optimizer.rate(learner.frames)

    def step(learner: State, minibatch: tuple[jax.Array, ...]) -> tuple[State, Metrics]:
        items, *arguments = minibatch
        grads, metrics = global_grad_in_blocks(
            lambda params, items: loss(params, take(batch, items), *arguments),
            learner.params,
            items,
            indices_in_cache=network.rows_in_cache // length,
            axis=axis,
        )
        learner, norm = optimizer.step(learner, grads, learning_rate)
        return learner, {**metrics, **norm}

    if target_kl is not None:
        return _scan_until(1.5 * target_kl, step, learner, minibatches)
    shapes = []

    def packed_step(packed: PyTree, minibatch: PyTree) -> tuple[PyTree, jax.Array]:
        new_learner, metrics = step(kernels.unpack(packed, learner), minibatch)
        shapes.append(shapes_of(metrics))
        return kernels.pack(new_learner), pack(metrics)

    with jax.named_scope("minibatches"):
        packed, means = kernels.scan(packed_step, kernels.pack(learner), minibatches)
    means = unpack(jnp.mean(means, axis=0), shapes[0])
    return kernels.unpack(packed, learner), means


def _scan_until(
    most_kl: float,
    step: Callable[[State, PyTree], tuple[State, Metrics]],
    learner: State,
    minibatches: PyTree,
) -> tuple[State, Metrics]:
    """Step on minibatches up to the first whose `approx_kl`, before the step, is larger."""

    def attempt(learner: State, minibatch: PyTree) -> tuple[tuple[State, jax.Array], Metrics]:
        new_learner, metrics = step(learner, minibatch)
        stop = metrics["approx_kl"].value > most_kl
        learner = jax.tree.map(lambda old, new: jnp.where(stop, old, new), learner, new_learner)
        return (learner, stop), {**metrics, "minibatch_fraction": 1.0 - stop}

    first = jax.tree.map(lambda x: x[0], minibatches)
    shapes = jax.eval_shape(attempt, learner, first)[1]
    no_metrics = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def attempt_or_skip(loop: tuple[State, jax.Array], minibatch: PyTree) -> Any:
        learner, stop = loop
        loop, metrics = jax.lax.cond(
            stop, lambda *_: ((learner, stop), no_metrics), attempt, learner, minibatch
        )
        return loop, (metrics, ~stop)

    loop = (learner, jnp.bool_(False))
    (learner, _), (metrics, tried) = jax.lax.scan(attempt_or_skip, loop, minibatches)
    means = jax.tree.map(lambda x: jnp.sum(x, axis=0) / jnp.sum(tried), metrics)
    return learner, {**means, "minibatch_fraction": jnp.mean(metrics["minibatch_fraction"])}
