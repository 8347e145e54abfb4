"""Several epochs of minibatches on one rollout: their order, a step on each, when they stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, UInt32

from podracer.agents.common.optimizers import CountedState, ScheduledOptimizer
from podracer.agents.common.settings import EpochSettings
from podracer.devices import fused, reductions
from podracer.devices.reductions import MaskedMean
from podracer.errors import ConfigError
from podracer.fields import struct
from podracer.networks import Network
from podracer.types import Carry, Metrics, PyTree

State = TypeVar("State", bound=CountedState)
AnyBatch = TypeVar("AnyBatch", bound="Batch")


@struct
class Batch:
    """Rollout to learn from, `[T, B, ...]`, and what `shuffle` makes of it; agents add fields."""

    observation: PyTree
    first: jax.Array  # bool
    target: jax.Array  # f32, of the value
    valid: jax.Array  # f32, 0 where an episode was cut
    carry: Carry  # recurrent state at the start, [1, B, ...], or ()


def shuffle(
    key: jax.Array, batch: AnyBatch, settings: EpochSettings
) -> tuple[AnyBatch, UInt32[Array, "K n"]]:
    """Return a rollout's items, and their order as K minibatches of n items for all epochs.

    Items are transitions, or whole sequences if the batch has a carry. Each epoch has a new order.

    Args:
        key: key of the orders.
        batch: leaves `[T, B, ...]` of a rollout.
        settings: numbers of epochs and of minibatches in each; K is their product.

    Returns:
        The batch with N items, leaves `[1, N, ...]`, or `[T, N, ...]` of sequences; and indices of
        items. Raises `ConfigError` where N items cannot be split evenly.
    """
    if not jax.tree.leaves(batch.carry):
        batch = jax.tree.map(lambda x: x.reshape(1, batch.valid.size, *x.shape[2:]), batch)
    num_items, num_minibatches = batch.valid.shape[1], settings.num_minibatches
    if num_items % num_minibatches:
        raise ConfigError(
            f"a device cannot split the {num_items} items of its rollout into {num_minibatches} "
            "equal minibatches: take a num_minibatches that divides them."
        )
    keys = jax.random.split(key, settings.num_epochs)
    orders = jax.vmap(lambda key: permutation(key, num_items))(keys)
    return batch, orders.reshape(settings.num_epochs * num_minibatches, -1)


def permutation(key: jax.Array, n: int) -> UInt32[Array, "n"]:
    """Return a pseudo-random permutation of 0 .. n-1, in a few multiplications per index.

    Rounds of `x -> odd * x + b (mod 2^k)` and `x -> x ^ (x >> s)` are bijections of k-bit numbers;
    where n is not a power of two, indices that land outside follow their cycle until they are
    inside. `jax.random.permutation` sorts, which on a CPU takes 300 times as long. This one
    is drawn from at most 2^256 permutations, not from all n!: enough for minibatches.
    """
    bits = max(1, (n - 1).bit_length())
    mask = jnp.uint32((1 << bits) - 1)
    shift = (bits + 1) // 2
    constants = jax.random.bits(key, (4, 2), jnp.uint32)

    def mix(x: jax.Array) -> jax.Array:
        for multiplier, offset in constants:
            x = (x * (multiplier | 1) + offset) & mask
            x = x ^ (x >> shift)
        return x

    items = mix(jnp.arange(n, dtype=jnp.uint32))
    if n == 1 << bits:
        return items
    return jax.lax.while_loop(
        lambda x: jnp.any(x >= n), lambda x: jnp.where(x >= n, mix(x), x), items
    )


def take(batch: PyTree, items: UInt32[Array, "*m"]) -> PyTree:
    """Gather items from leaves `[T, N, ...]`: `[T, *m, ...]`."""
    # Promising bounds spares a comparison and a fill of every number.
    return jax.tree.map(
        lambda x: x.at[:, items].get(mode="promise_in_bounds", unique_indices=True), batch
    )


def fit(
    optimizer: ScheduledOptimizer,
    network: Network,
    loss: Callable[..., tuple[MaskedMean, Metrics]],
    learner: State,
    batch: Batch,
    minibatches: tuple[jax.Array, ...],
    axis: str | None,
    *,
    target_kl: float | None = None,
) -> tuple[State, Metrics]:
    """Take an optimizer step on each of K minibatches in turn.

    Args:
        optimizer: optimizer, whose learning rate is one for all steps: the learner's frames stay.
        network: network of the loss.
        loss: `loss(params, minibatch, *arguments)`, a mean over items, and metrics.
        learner: parameters and the state of the optimizer.
        batch: items, leaves `[T, N, ...]`, see `shuffle`.
        minibatches: indices of items u32 `[K, n]`, then arguments `[K]` of the loss.
        axis: mesh axis over which gradients and metrics are averaged.
        target_kl: the step on the first minibatch whose `approx_kl` exceeds 1.5 times as much is
            not taken, nor any after it, as in Stable-Baselines3; None never stops.

    Returns:
        The learner after the last step, and means of the metrics over minibatches.
    """
    rows_of_an_item = max(x.shape[0] for x in jax.tree.leaves(batch))

    def step(learner: State, minibatch: tuple[jax.Array, ...]) -> tuple[State, Metrics]:
        items, *arguments = minibatch
        grads, metrics = reductions.global_grad_in_blocks(
            lambda params, items: loss(params, take(batch, items), *arguments),
            learner.params,
            items,
            indices_in_cache=network.rows_in_cache // rows_of_an_item,
            axis=axis,
        )
        learner, norm = optimizer.step(learner, grads)
        return learner, {**metrics, **norm}

    with jax.named_scope("minibatches"):
        if target_kl is not None:
            return _scan_until(1.5 * target_kl, step, learner, minibatches)
        learner, metrics = fused.scan(step, learner, minibatches, packed=True)
    return learner, jax.tree.map(lambda x: jnp.mean(x, axis=0), metrics)


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
