"""FRODO: an actor-critic that learns what its values should predict, while it learns.

A network reads a rollout from its end to its beginning and gives every step a target G, in the
place of a return. The parameters take a few steps on an inner loss with these targets, each on the
rollouts of other environments; then the gradient of an outer loss, V-trace's with fixed
hyperparameters, on those left is taken through these steps with respect to the network of learned
targets. A cost makes these agree with themselves one step later. Source: Xu et al. 2020 (arXiv
2007.08433). The network's inputs and size are ours; the paper holds out the next rollout.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from podracer import schedules
from podracer.agent import DEFAULT_CONTEXT, Agent, Context
from podracer.agents.common import actor_critic, meta
from podracer.agents.common.actor_critic import ActorCritic
from podracer.agents.common.optimizers import (
    CountedState,
    ScheduledOptimizer,
)
from podracer.agents.impala import Impala
from podracer.agents.rules.common import apply_linear, backward_lstm
from podracer.devices.reductions import MaskedMean, global_mean, mean_of
from podracer.errors import ConfigError
from podracer.fields import bounded, static, struct
from podracer.types import EnvironmentSpec, LearnerState, Metrics, Params, Trajectory

NUM_INPUTS = 5


@struct
class Metaparams:
    """Metaparameters η: parameters of the network that computes the learned targets."""

    core: Any  # eqx.nn.LSTMCell
    head: Any  # eqx.nn.Linear


@struct
class Frodo(meta.MetaGradientSettings):
    """Actor-critic for discrete or continuous actions, whose return is a learned function."""

    discount: float = bounded(0.99, high=1.0)
    """Discount factor gamma of the outer loss and of the consistency of targets, in [0, 1]."""
    consistency_cost: float = bounded(0.1)
    """Weight, in the outer loss, of the squared difference between a target and the reward plus the
    discounted target one step later."""
    inner_updates: int = static(default=3, low=1)
    """Number K of inner updates; the environments are divided into K + 1 parts, the last of which
    has the outer loss."""
    units: int = static(default=64, low=1)
    """Units of the LSTM that computes the learned targets."""

    def build(self, spec: EnvironmentSpec, context: Context = DEFAULT_CONTEXT) -> Agent:
        return meta.build(self, _Frodo, spec)


@dataclasses.dataclass(frozen=True)
class _Frodo:
    settings: Frodo
    model: ActorCritic
    optimizer: ScheduledOptimizer

    def init(self, key: jax.Array, num_envs: int) -> LearnerState:
        """Return new parameters. Raises `ConfigError` if the environments cannot be divided."""
        parts = self.settings.inner_updates + 1
        if num_envs % parts:
            raise ConfigError(
                f"FRODO divides the environments into inner_updates + 1 = {parts} parts, but "
                f"there are {num_envs} on each device: take a multiple."
            )
        learner_key, core_key, head_key = jax.random.split(key, 3)
        learner = self.optimizer.init(self.model.network.init(learner_key))
        core = eqx.nn.LSTMCell(NUM_INPUTS, self.settings.units, key=core_key)
        head = eqx.nn.Linear(self.settings.units, 1, key=head_key)
        return meta.init_state(learner, Metaparams(core, head))

    def learn(
        self, state: LearnerState, trajectory: Trajectory, key: jax.Array, axis: str | None
    ) -> tuple[LearnerState, Metrics]:
        """Take the inner steps on the parameters, then an outer one on the metaparameters.

        Losses are means over all steps, where those that are not valid count as 0; metrics are
        means over valid ones.
        """
        num_frames = schedules.count_frames(trajectory, axis)
        learner: meta.MetaState = state.shared
        parts = split_environments(
            trajectory, self.settings.inner_updates + 1, learner.meta_optimizer_state.count
        )
        held_out = jax.tree.map(lambda x: x[-1], parts)
        return meta.learn(
            self.settings.meta_learning_rate,
            learner,
            partial(self.inner_update, axis),
            partial(self.outer_loss, held_out),
            jax.tree.map(lambda x: x[:-1], parts),
            num_frames,
            axis,
        )

    def inner_update(
        self, axis: str | None, eta: Metaparams, learner: CountedState, trajectory: Trajectory
    ) -> tuple[CountedState, Metrics]:
        """Take one step towards the targets; also return how much they contradict themselves."""
        # Targets and advantages are constants for the inner gradient, functions for the outer one.
        (log_prob, entropy, values), pullback = jax.vjp(
            lambda params: self.outputs(params, trajectory), learner.params
        )
        targets = self.targets(eta, log_prob, values, trajectory)
        advantages = trajectory.valid() * (targets - values[:-1])

        def inner_loss(outputs: tuple[jax.Array, ...]) -> tuple[jax.Array, Metrics]:
            log_prob, entropy, values = outputs
            loss, metrics = actor_critic.loss(
                log_prob,
                entropy,
                values[:-1],
                targets=targets,
                advantages=advantages,
                valid=trajectory.valid(),
                value_cost=self.settings.value_cost,
                entropy_cost=schedules.value_at(self.settings.entropy_cost, learner.frames),
            )
            return loss.total, metrics

        output_grads, metrics = jax.grad(inner_loss, has_aux=True)((log_prob, entropy, values))
        grads = global_mean(pullback(output_grads)[0], axis)
        learner, update_metrics = self.optimizer.step(learner, grads)
        inconsistency = self.inconsistency(targets, trajectory)
        return learner, {**metrics, **update_metrics, "inconsistency": inconsistency}

    def outer_loss(
        self, trajectory: Trajectory, eta: Metaparams, learner: CountedState, aux: dict[str, Any]
    ) -> tuple[jax.Array, Metrics]:
        """Return V-trace's loss after the inner updates, plus the cost of inconsistent targets."""
        settings = self.settings
        impala = Impala(
            discount=settings.discount,
            value_cost=settings.value_cost,
            entropy_cost=settings.entropy_cost,
        )
        loss, _ = impala.loss(self.model, learner.params, trajectory, learner.frames)
        metrics = jax.tree.map(jnp.mean, aux)
        outer_loss = loss.total + self.settings.consistency_cost * metrics["inconsistency"].total
        return outer_loss, {**metrics, "outer_loss": MaskedMean(outer_loss, loss.share)}

    def outputs(
        self, params: Params, trajectory: Trajectory
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return log-probabilities and entropies `[T, B]`, and values `[T+1, B]`."""
        policy, values = self.model.unroll(params, trajectory)
        return policy.log_prob(trajectory.steps.extras["sample"]), policy.entropy(), values

    # --- the network of learned targets -----------------------------------------------------------

    def targets(
        self, eta: Metaparams, log_prob: jax.Array, values: jax.Array, trajectory: Trajectory
    ) -> jax.Array:
        """Return the target G of each step `[T, B]`, computed from the last one back to the first.

        The inputs are reward, discount, both values and the truncated importance ratio. No
        information flows back across the end of an episode.
        """
        next_timesteps, valid = trajectory.next_timesteps(), trajectory.valid()
        ratio = jnp.exp(log_prob - trajectory.steps.extras["log_prob"])
        discount = self.settings.discount * next_timesteps.discount
        inputs = (
            next_timesteps.reward,
            discount,
            values[:-1],
            discount * values[1:],
            jnp.minimum(ratio, 1.0),
        )
        stacked = jnp.stack(inputs, axis=-1)
        hidden = backward_lstm(eta.core, stacked, valid, next_timesteps.discount)
        return apply_linear(eta.head, hidden)[..., 0]

    def inconsistency(self, targets: jax.Array, trajectory: Trajectory) -> MaskedMean:
        """Return the mean of (r + γ G' - G)² / 2, where G' is the target one step later.

        The last step of a rollout, and steps that a time-out follows, do not count.
        """
        next_timesteps, valid = trajectory.next_timesteps(), trajectory.valid()
        discount = self.settings.discount * next_timesteps.discount[:-1]
        later = jax.lax.stop_gradient(next_timesteps.reward[:-1] + discount * targets[1:])
        has_later = valid[:-1] & (valid[1:] | (discount == 0))
        if not later.size:  # rollouts of one step
            return MaskedMean(jnp.zeros(()), jnp.zeros(()))
        return mean_of(0.5 * (later - targets[:-1]) ** 2, has_later)


def split_environments(trajectory: Trajectory, count: int, shift: ArrayLike) -> Trajectory:
    """Return `count` parts `[count, T, B / count, ...]` of the environments, rotated by `shift`.

    Environment i is of part i % count, so that shards have the same parts as one device.
    """

    def split_axis(axis: int, x: jax.Array) -> jax.Array:
        parts = x.reshape(*x.shape[:axis], -1, count, *x.shape[axis + 1 :])
        return jnp.roll(jnp.moveaxis(parts, axis + 1, 0), shift, axis=0)

    steps = jax.tree.map(partial(split_axis, 1), trajectory.steps)
    ends = (trajectory.final, trajectory.carry, trajectory.final_carry)
    return Trajectory(steps, *jax.tree.map(partial(split_axis, 0), ends))
