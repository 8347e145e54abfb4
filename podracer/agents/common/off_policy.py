"""Shared parts of agents with a replay buffer: the learning loop, n-step transitions, targets."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from podracer import schedules
from podracer.agents.common.optimizers import CountedState, ScheduledOptimizer
from podracer.devices import fused
from podracer.devices.mesh import check_divisible
from podracer.devices.reductions import MaskedMean, as_mean, global_grad, num_shards
from podracer.errors import ConfigError
from podracer.fields import reset_on_warm_start, struct
from podracer.networks import Network
from podracer.ops import returns
from podracer.replay import Buffer, Sample
from podracer.types import Carry, LearnerState, Metrics, Params, TimeStep, Trajectory


@struct
class ReplayLearnerState:
    """Learner state of an agent that learns from a replay."""

    frames: jax.Array = reset_on_warm_start()
    """Valid transitions of all rollouts, uint32 [], see `schedules`."""


State = TypeVar("State", bound=ReplayLearnerState | CountedState)
# (state, sample, key) -> (new state, metrics, priorities f32 [N] of the sample)
Update = Callable[[State, Sample, jax.Array], tuple[State, Metrics, jax.Array]]


def require_feed_forward(network: Network) -> Network:
    """Return the network; raise `ConfigError` if it is recurrent.

    Samples that start anywhere have no recurrent state to start from, and a search steps from one
    node to another.
    """
    if jax.tree.leaves(network.carry(1)):
        raise ConfigError(
            "the agent needs a feed-forward network, one without a memory: agents with recurrent "
            "ones are R2D2 and PQN for discrete actions, SAC and DDPG for continuous ones, "
            "A2C, PPO and IMPALA for both."
        )
    return network


def learn_from_replay(
    buffer: Buffer,
    update: Update[State],
    state: LearnerState,
    trajectory: Trajectory,
    key: jax.Array,
    axis: str | None,
    carry: Carry = (),
) -> tuple[LearnerState, Metrics]:
    """Add a rollout to the replay, then draw a sample and update, `updates_per_rollout` times.

    `carry [B, ...]` is the recurrent state to keep with the rollout's first timestep. Metrics are
    means over the updates. Until `replay.warmup` frames have been added nothing is learned, and
    metrics have no value. The rollout's frames count from the next call on.
    """
    config, shards, frames = buffer.config, num_shards(axis), state.shared.frames
    check_divisible("replay.batch_size", config.batch_size, shards)
    share = config.batch_size // shards
    replay = buffer.add(state.local, trajectory.steps, carry)

    def step(loop: tuple[State, Any], key: jax.Array) -> tuple[tuple[State, Any], Metrics]:
        shared, priorities = loop
        sample_key, update_key = jax.random.split(key)
        current = dataclasses.replace(replay, priorities=priorities)
        sample = buffer.sample(current, sample_key, share, frames, axis)
        shared, metrics, new_priorities = update(shared, sample, update_key)
        priorities = buffer.update_priorities(priorities, sample, new_priorities)
        return (shared, priorities), {name: as_mean(metric) for name, metric in metrics.items()}

    def run_updates(loop: tuple[State, Any]) -> tuple[tuple[State, Any], Metrics]:
        keys = jax.random.split(key, config.updates_per_rollout)
        with jax.named_scope("minibatches"):
            loop, metrics = fused.scan(step, loop, keys, packed=True)
        return loop, jax.tree.map(partial(jnp.mean, axis=0), metrics)

    loop = state.shared, replay.priorities
    shapes = jax.eval_shape(step, loop, key)[1]
    no_metrics = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    # Frames of the run, as this replay may be that of a part of its environments.
    new_frames = schedules.add_frames(frames, schedules.count_frames(trajectory, axis))
    ready = (new_frames >= config.warmup) & (buffer.size(replay) > 0)
    (shared, priorities), metrics = fused.cond(
        ready, run_updates, lambda loop: (loop, no_metrics), loop
    )
    shared = dataclasses.replace(shared, frames=new_frames)
    return LearnerState(shared, dataclasses.replace(replay, priorities=priorities)), metrics


@struct
class TargetNetworkState(CountedState):
    """Learner state of an agent whose target network is a periodic copy of its parameters."""

    target_params: Params
    updates: jax.Array  # i32 []


@dataclasses.dataclass(frozen=True)
class TargetNetworkOptimizer:
    """Optimizer of parameters that are copied to a target network after every `period`-th step."""

    optimizer: ScheduledOptimizer
    period: int

    def init(self, params: Params) -> TargetNetworkState:
        """Return the state before the first step; the target network equals the parameters."""
        return TargetNetworkState(
            **vars(self.optimizer.init(params)),
            target_params=jax.tree.map(jnp.copy, params),
            updates=jnp.int32(0),
        )

    def update(
        self,
        loss: Callable[..., tuple[MaskedMean, tuple[Metrics, jax.Array]]],
        axis: str | None,
        state: TargetNetworkState,
        sample: Sample,
        key: jax.Array,
    ) -> tuple[TargetNetworkState, Metrics, jax.Array]:
        """Take a step on a sample of a replay; return the state, metrics and priorities.

        `loss(params, target_params, sample, key)` returns the loss and `(metrics, priorities)`.
        """
        grads, (metrics, priorities) = global_grad(
            loss, state.params, state.target_params, sample, key, axis=axis
        )
        state, gradient_metrics = self.optimizer.step(state, grads)
        updates = state.updates + 1
        target_params = fused.periodic_update(
            state.params, state.target_params, updates, self.period
        )
        state = dataclasses.replace(state, target_params=target_params, updates=updates)
        return state, {**metrics, **gradient_metrics}, priorities


@struct
class Transition:
    """From a timestep to one up to n steps later in the same episode; leaves are `[N, ...]`.

    The value target of `timestep` is `n_step_return + bootstrap_discount * value(next_timestep)`.
    """

    timestep: TimeStep
    action: jax.Array  # taken at `timestep`
    n_step_return: jax.Array  # f32 [N], discounted rewards up to `next_timestep`
    bootstrap_discount: jax.Array  # f32 [N], product of the discounts up to `next_timestep`
    next_timestep: TimeStep
    mask: jax.Array  # f32 [N], 0 where a time-out at `timestep` made the action meaningless
    weight: jax.Array  # f32 [N], importance weight of the sample, at most 1


def n_step_transition(sample: Sample, discount: float | jax.Array) -> Transition:
    """Return the transition from the first timestep of each sequence to its last.

    Where a time-out cuts the sequence, the transition ends at the time-out.
    """
    trajectory = sample.trajectory
    rewards, discounts, valid = trajectory.transitions(discount)
    n_step_return, bootstrap_discount, num_steps = returns.n_step_returns(rewards, discounts, valid)
    columns = jnp.arange(num_steps.shape[0])
    return Transition(
        timestep=jax.tree.map(lambda x: x[0], trajectory.steps.timestep),
        action=trajectory.steps.action[0],
        n_step_return=n_step_return,
        bootstrap_discount=bootstrap_discount,
        next_timestep=jax.tree.map(lambda x: x[num_steps, columns], trajectory.timesteps()),
        mask=valid[0].astype(jnp.float32),
        weight=sample.weights,
    )
