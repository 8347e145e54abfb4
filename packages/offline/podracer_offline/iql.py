"""IQL: implicit Q-learning from a data set, without values of actions that it does not have.

The value is an expectile of the critics' values of recorded actions, near the best one. The policy
is fitted to the recorded actions, each weighted by the exponential of its advantage. With a replay
it goes on in an environment, from its own actions (section 5.3).
Source: Kostrikov et al. 2021, "Offline Reinforcement Learning with Implicit Q-Learning" (arXiv
2110.06169). Four things differ from the authors' code. The loss of the critics is half of theirs.
One step minimizes all three losses at the same parameters. No tanh squashes the mean of the policy:
an action at a bound has the likelihood of all samples that are clipped to it. All parts have one
learning rate.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax

from podracer import schedules
from podracer.agent import DEFAULT_CONTEXT, Agent, Context
from podracer.agents.common import actor_critic, off_policy
from podracer.agents.common.actor_critic import ActorCritic
from podracer.agents.common.off_policy import Transition
from podracer.agents.common.optimizers import (
    CountedState,
    Optimizer,
    OptimizerBuilder,
    ScheduledOptimizer,
    with_more_frames,
)
from podracer.agents.common.settings import GaussianSettings, LearnerSettings
from podracer.agents.continuous import models
from podracer.agents.continuous.learning import Parts
from podracer.agents.continuous.models import CriticNetworks
from podracer.devices.reductions import MaskedMean, global_grad, mean_of
from podracer.errors import ConfigError
from podracer.fields import bounded, static, struct
from podracer.networks import MLP, NetworkBuilder, TorsoNetwork, outputs
from podracer.ops.distributions import from_bounds, policy
from podracer.replay import Buffer, Replay, Sample
from podracer.schedules import Schedule
from podracer.types import (
    Carry,
    EnvironmentSpec,
    LearnerState,
    Metrics,
    Params,
    PyTree,
    TimeStep,
    Trajectory,
)
from podracer_offline.likelihood import clipped_log_prob
from podracer_offline.records import as_recorded, replayed, require_records


@struct
class IQLState(CountedState):
    """Learner state: the parameters are `Parts`, a policy with a value, and critics."""

    target_params: tuple[Params, ...]  # critics alone


@struct
class IQL(LearnerSettings, GaussianSettings):
    """Implicit Q-learning for continuous actions."""

    learning_rate: Schedule = bounded(3e-4)
    expectile: float = bounded(0.7, high=1.0)
    """Expectile tau, in [0, 1], of the critics' values that the value is: 0.5 is their mean."""
    inverse_temperature: float = bounded(3.0)
    """Inverse temperature beta of the policy's weights; 0 is behavior cloning."""
    max_weight: float = bounded(100.0, low=1e-6)
    """Largest weight of an action in the policy's loss."""
    target_update_rate: float = bounded(0.005, high=1.0)
    """Rate tau, in [0, 1], at which the target critics follow the critics in each update."""
    num_critics: int = static(default=2, low=1)
    """Number of critics; targets use the smallest of their values."""
    replay: Replay | None = static(default=None)
    """Uniform replay buffer, to learn in an environment; None learns from each transition of a data
    set as it comes."""
    optimizer: OptimizerBuilder = Optimizer(epsilon=1e-8)
    """Optimizer of the parameters."""
    network: NetworkBuilder = static(default=TorsoNetwork(MLP((256, 256)), shared=False))
    """Network of the policy, of the value and of each critic, without their heads."""

    def build(self, spec: EnvironmentSpec, context: Context = DEFAULT_CONTEXT) -> Agent:
        """Return the agent for an environment."""
        inner = require_records(spec, "IQL") if self.replay is None else replayed(spec)
        critics = models.build_critics(self.network, inner, None)
        network = actor_critic.build_network(
            self.network, inner, state_dependent_std=self.state_dependent_std
        )
        model = ActorCritic(off_policy.require_feed_forward(network), inner.action)
        optimizer = ScheduledOptimizer(self.optimizer.build(), self.learning_rate)
        buffer = None
        if self.replay is not None:
            if self.replay.prioritized:
                raise ConfigError("IQL samples uniformly: take `agent.replay.prioritized=False`.")
            buffer = self.replay.build(inner, 2)
        agent = _IQL(self, model, critics, optimizer, buffer)
        built = Agent(
            spec=inner,
            init=agent.init,
            act=agent.act,
            learn=agent.learn,
            actor_params=lambda state: state.shared.params.actor,
            distribution=model.distribution,
        )
        return as_recorded(built, spec)


@dataclasses.dataclass(frozen=True)
class _IQL:
    settings: IQL
    model: ActorCritic
    critics: CriticNetworks
    optimizer: ScheduledOptimizer
    buffer: Buffer | None

    def init(self, key: jax.Array, num_envs: int) -> LearnerState:
        model_key, critics_key = jax.random.split(key)
        critics = self.critics.init_critics(critics_key, self.settings.num_critics)
        state = self.optimizer.init(Parts(self.model.network.init(model_key), critics))
        target_params = jax.tree.map(jnp.copy, critics)
        local = () if self.buffer is None else self.buffer.init(num_envs)
        return LearnerState(IQLState(**vars(state), target_params=target_params), local)

    def act(
        self, params: Params, carry: Carry, timestep: TimeStep, keys: jax.Array, explore: bool
    ) -> tuple[jax.Array, PyTree, Carry]:
        """Sample actions of the policy, or take its modes."""
        action, _, carry = self.model.act(params, carry, timestep, keys, explore)
        return action, (), carry

    def learn(
        self, state: LearnerState, trajectory: Trajectory, key: jax.Array, axis: str | None
    ) -> tuple[LearnerState, Metrics]:
        """Update by all transitions of the rollout, or by samples of the replay that it joins."""
        if self.buffer is None:
            learner, metrics = self.update(state.shared, self.transition(trajectory), axis)
            learner = with_more_frames(learner, schedules.count_frames(trajectory, axis))
            return LearnerState(learner), metrics

        def learn_sample(
            learner: IQLState, sample: Sample, key: jax.Array
        ) -> tuple[IQLState, Metrics, jax.Array]:
            # Each sample is a rollout of one transition.
            learner, metrics = self.update(learner, self.transition(sample.trajectory), axis)
            return learner, metrics, sample.weights

        return off_policy.learn_from_replay(self.buffer, learn_sample, state, trajectory, key, axis)

    def update(
        self, learner: IQLState, transition: Transition, axis: str | None
    ) -> tuple[IQLState, Metrics]:
        """Take a step on the losses, then move the target critics."""
        grads, metrics = global_grad(
            self.loss, learner.params, learner.target_params, transition, axis=axis
        )
        learner, norm = self.optimizer.step(learner, grads)
        target_params = optax.incremental_update(
            learner.params.critics, learner.target_params, self.settings.target_update_rate
        )
        return dataclasses.replace(learner, target_params=target_params), {**metrics, **norm}

    def transition(self, trajectory: Trajectory) -> Transition:
        """Return all transitions of a rollout, `[T B, ...]`, with actions in [-1, 1]."""
        steps, timesteps = trajectory.steps, trajectory.timesteps()
        following = jax.tree.map(lambda x: x[1:], timesteps)
        transition = Transition(
            timestep=steps.timestep,
            action=from_bounds(self.critics.space, steps.action),
            n_step_return=following.reward,
            bootstrap_discount=self.settings.discount * following.discount,
            next_timestep=following,
            mask=trajectory.valid().astype(jnp.float32),
            weight=jnp.ones_like(following.reward),
        )
        num_items = transition.mask.size  # a leaf without numbers does not tell it
        return jax.tree.map(lambda x: x.reshape(num_items, *x.shape[2:]), transition)

    def loss(
        self, params: Parts, target_params: tuple[Params, ...], transition: Transition
    ) -> tuple[MaskedMean, Metrics]:
        """Return the sum of the losses of value, critics and policy, equations 5, 6 and 7."""
        settings, mask = self.settings, transition.mask
        obs, next_obs = transition.timestep.observation, transition.next_timestep.observation
        heads = outputs(self.model.network, params.actor, obs)
        next_value = outputs(self.model.network, params.actor, next_obs)["value"]
        q = jnp.min(self.critics.q_values(target_params, obs, transition.action), axis=0)
        advantage = q - heads["value"][:, 0]

        is_negative = (advantage < 0).astype(jnp.float32)
        value_loss = mean_of(jnp.abs(settings.expectile - is_negative) * advantage**2, mask)
        next_value = jax.lax.stop_gradient(next_value)
        critic_loss, _ = self.critics.loss(params.critics, next_value[None], transition)
        weight = jnp.exp(settings.inverse_temperature * jax.lax.stop_gradient(advantage))
        weight = jnp.minimum(weight, settings.max_weight)
        log_prob = clipped_log_prob(policy(self.model.space, heads["policy"]), transition.action)
        policy_loss = mean_of(-weight * log_prob, mask)

        total = value_loss.total + critic_loss.total + policy_loss.total
        total = MaskedMean(total, value_loss.share)
        return total, {
            "loss": total,
            "value_loss": value_loss,
            "critic_loss": critic_loss,
            "policy_loss": policy_loss,
            "q": mean_of(q, mask),
            "advantage": mean_of(advantage, mask),
        }
