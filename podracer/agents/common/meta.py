"""Meta-gradients: exact gradients of an outer loss through the updates of an inner learner.

An update maps a learner's state and a batch to a new state; the outer loss judges the state
after a few updates. It is differentiated with respect to the metaparameters of the updates.
Source: Xu et al. 2018, "Meta-Gradient Reinforcement Learning" (arXiv 1805.09801), section 2.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from podracer import schedules
from podracer.agent import Agent
from podracer.agents.common import actor_critic, optimizers
from podracer.agents.common.actor_critic import ActorCritic
from podracer.agents.common.optimizers import CountedState, ParamsState, ScheduledOptimizer
from podracer.agents.common.settings import ActorCriticSettings
from podracer.devices.reductions import global_mean
from podracer.fields import bounded, struct
from podracer.schedules import Schedule
from podracer.types import EnvironmentSpec, LearnerState, Metrics, Params, PyTree

META_OPTIMIZER = optax.scale_by_adam()

Update = Callable[[PyTree, PyTree, PyTree], tuple[PyTree, PyTree]]
Objective = Callable[[PyTree, PyTree, PyTree], tuple[jax.Array, PyTree]]


@struct
class MetaGradientSettings(ActorCriticSettings):
    """Settings of actor-critics that differentiate through their own updates."""

    meta_learning_rate: Schedule = bounded(1e-3)
    """Learning rate of Adam for the metaparameters."""


def build(
    settings: MetaGradientSettings,
    method: Callable[[Any, ActorCritic, ScheduledOptimizer], Any],
    spec: EnvironmentSpec,
    *,
    num_heads: int = 1,
) -> Agent:
    """Return an actor-critic with the functions `init` and `learn` of a method."""
    model = actor_critic.build(settings, spec, num_heads=num_heads)
    # With a derivative where gradients are 0.
    clip = clip_by_global_norm(settings.max_gradient_norm)
    optimizer = optax.chain(clip, settings.optimizer.build(root_epsilon=1e-10))
    agent = method(settings, model, ScheduledOptimizer(optimizer, settings.learning_rate))
    act, groups = model.act_with_log_prob, model.groups
    return Agent.of(model, spec, init=agent.init, act=act, learn=agent.learn, groups=groups)


@struct
class MetaState(CountedState):
    """Parameters θ and metaparameters η, each with the state of their optimizer."""

    metaparams: Any
    meta_optimizer_state: Any  # optax.ScaleByAdamState


def init_state(learner: CountedState, metaparams: PyTree) -> LearnerState:
    """Return the state of a learner and of metaparameters before the first update."""
    return LearnerState(_join(learner, ParamsState(metaparams, META_OPTIMIZER.init(metaparams))))


def learn(
    meta_learning_rate: Schedule,
    state: MetaState,
    update: Update,
    objective: Objective,
    batches: PyTree,
    num_frames: jax.Array,
    axis: str | None,
) -> tuple[LearnerState, Metrics]:
    """Take inner updates of the parameters, then an outer step on the metaparameters.

    `update`, `objective` and `batches` are arguments of `meta_grad`, whose `info` are metrics; the
    batches come from `num_frames` frames of all shards.
    """
    learner = CountedState(state.params, state.optimizer_state, state.frames)
    grads, (learner, metrics) = meta_grad(update, objective, state.metaparams, learner, batches)
    # Each shard has a part of the gradient, through the mean of all inner gradients.
    grads = global_mean(grads, axis)
    rate = schedules.value_at(meta_learning_rate, state.frames)
    old_meta = ParamsState(state.metaparams, state.meta_optimizer_state)
    meta = optimizers.take_step(META_OPTIMIZER, rate, old_meta, grads)
    metrics = {**metrics, "meta_gradient_norm": optimizers.global_norm(grads)}
    return LearnerState(_join(optimizers.with_more_frames(learner, num_frames), meta)), metrics


def _join(learner: CountedState, meta: ParamsState) -> MetaState:
    return MetaState(
        **vars(learner), metaparams=meta.params, meta_optimizer_state=meta.optimizer_state
    )


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
        new_learner, aux = jax.lax.scan(partial(step, meta), learner, batches)
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
