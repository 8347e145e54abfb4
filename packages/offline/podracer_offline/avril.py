"""AVRIL: a reward and a policy from demonstrations, by approximate variational inference.

An encoder has a Gaussian posterior of the reward of each action, with a standard normal prior. The
demonstrator's policy is a softmax of action values Q. Both are tied by the reward that Q implies,
a temporal difference along the demonstration, which has to be likely under the posterior. No
reward of the data set is read, and no environment is needed. Source: Chan and van der Schaar 2021,
"Scalable Bayesian Inverse Reinforcement Learning" (arXiv 2102.06483), and its authors' code.

Differences from that code: a transition to a terminal counts, with a value of 0 behind it; the code
leaves the last transition of each episode out, as here after a time-out, where no action follows.
Hidden layers have tanh, not ELU, and initial weights are orthogonal.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from podracer import schedules
from podracer.agent import DEFAULT_CONTEXT, Agent, Context
from podracer.agents.common import off_policy, value_based
from podracer.agents.common.optimizers import Optimizer, OptimizerBuilder, ScheduledOptimizer
from podracer.agents.common.settings import LearnerSettings
from podracer.devices.reductions import MaskedMean, global_grad, mean_of
from podracer.errors import ConfigError
from podracer.fields import bounded, static, struct
from podracer.networks import MLP, Head, Network, NetworkBuilder, TorsoNetwork, outputs
from podracer.ops.action_masks import mask_logits
from podracer.ops.distributions import Categorical, Normal
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
from podracer_offline.records import as_recorded, require_records


@struct
class AVRILParams:
    """Parameters of both networks."""

    critic: Params  # action values, which the policy is a softmax of
    encoder: Params  # posterior of rewards


@struct
class AVRIL(LearnerSettings):
    """Approximate variational reward imitation learning for discrete actions."""

    learning_rate: Schedule = bounded(1e-4)
    discount: float = bounded(1.0, high=1.0)
    constraint_cost: float = bounded(1.0)
    """Weight lambda of the temporal-difference constraint; at 0 the policy is a clone."""
    state_only: bool = static(default=False)
    """Whether rewards depend on the observation alone, and not on the action."""
    optimizer: OptimizerBuilder = Optimizer(epsilon=1e-8)
    """Optimizer of the parameters."""
    network: NetworkBuilder = static(default=TorsoNetwork(MLP((64, 64), "tanh")))
    """Network of the action values, and another one of the rewards, without their heads."""

    def build(self, spec: EnvironmentSpec, context: Context = DEFAULT_CONTEXT) -> Agent:
        inner = require_records(spec, "AVRIL")
        if context.rollout_length < 2:
            raise ConfigError(
                "AVRIL learns from an action and the next one: take a rollout_length of at least 2."
            )
        critic = value_based.build_q_network(self.network, inner, 1, dueling=False)
        optimizer = ScheduledOptimizer(self.optimizer.build(), self.learning_rate)
        agent = _AVRIL(self, inner, off_policy.require_feed_forward(critic), optimizer)
        built = Agent(
            spec=inner,
            init=agent.init,
            act=agent.act,
            learn=agent.learn,
            actor_params=lambda state: state.shared.params.critic,
            distribution=agent.distribution,
        )
        return as_recorded(built, spec)

    def encoder(self, spec: EnvironmentSpec) -> Network:
        """Return the network of rewards: means, then logarithms of scales, of each action."""
        num_rewards = 1 if self.state_only else value_based.require_discrete(spec).num_actions
        return self.network.build(spec.observation, {"reward": Head(2 * num_rewards)})

    def reward(self, spec: EnvironmentSpec, params: AVRILParams, observation: PyTree) -> Normal:
        """Return the posterior of each action's reward, `[N, A]`, on observations `[N, ...]`.

        `params` are `state.shared.params` of a learner's state.
        """
        observation = jax.tree.map(jnp.asarray, observation)
        parameters = outputs(self.encoder(spec), params.encoder, observation)["reward"]
        shape = (len(parameters), value_based.require_discrete(spec).num_actions)
        halves = jnp.split(parameters, 2, axis=-1)
        return Normal(*(jnp.broadcast_to(x, shape) for x in halves))


@dataclasses.dataclass(frozen=True)
class _AVRIL:
    settings: AVRIL
    spec: EnvironmentSpec
    critic: Network
    optimizer: ScheduledOptimizer

    def init(self, key: jax.Array, num_envs: int) -> LearnerState:
        critic_key, encoder_key = jax.random.split(key)
        encoder = self.settings.encoder(self.spec).init(encoder_key)
        params = AVRILParams(self.critic.init(critic_key), encoder)
        return LearnerState(self.optimizer.init(params))

    def action_values(self, params: Params, observation: PyTree) -> jax.Array:
        """Return action values `[N, A]` of observations `[N, ...]`."""
        values = value_based.q_outputs(outputs(self.critic, params, observation), size=1)[..., 0]
        return mask_logits(observation, values)

    def distribution(
        self, params: Params, carry: Carry, timestep: TimeStep
    ) -> tuple[Categorical, Carry]:
        return Categorical(self.action_values(params, timestep.observation)), carry

    def act(
        self, params: Params, carry: Carry, timestep: TimeStep, keys: jax.Array, explore: bool
    ) -> tuple[jax.Array, PyTree, Carry]:
        policy, carry = self.distribution(params, carry, timestep)
        return policy.sample(keys) if explore else policy.mode(), (), carry

    def learn(
        self, state: LearnerState, trajectory: Trajectory, key: jax.Array, axis: str | None
    ) -> tuple[LearnerState, Metrics]:
        """Take a step on the bound of all transitions of a rollout."""
        grads, metrics = global_grad(self.loss, state.shared.params, trajectory, axis=axis)
        num_frames = schedules.count_frames(trajectory, axis)
        state, norm = self.optimizer.apply_gradients(state, grads, num_frames)
        return state, {**metrics, **norm}

    def loss(self, params: AVRILParams, trajectory: Trajectory) -> tuple[MaskedMean, Metrics]:
        """Return the negative evidence lower bound with the constraint, and its parts as metrics.

            L = E[-log π(a|s) + KL(q || N(0, 1)) - λ log q(Q(s, a) - γ Q(s', a'))]

        The posterior q is of the reward of s and a. The mean is over transitions to a terminal, and
        over those whose next action a' is known.
        """
        settings, steps, following = self.settings, trajectory.steps, trajectory.next_timesteps()
        is_known = (~following.last).at[-1].set(False)  # the next action
        mask = trajectory.valid() & (is_known | (following.discount == 0))
        pairs = (steps.timestep.observation, steps.action)
        observation, action = jax.tree.map(lambda x: x.reshape(mask.size, *x.shape[2:]), pairs)

        policy = Categorical(self.action_values(params.critic, observation))
        q = value_based.at_action(policy.logits, action).reshape(mask.shape)
        next_q = jnp.concatenate([q[1:], jnp.zeros_like(q[:1])])
        implied_reward = q - settings.discount * following.discount * next_q
        reward = jax.tree.map(
            lambda x: value_based.at_action(x, action).reshape(*mask.shape, 1),
            settings.reward(self.spec, params, observation),
        )
        prior = Normal(jnp.zeros_like(reward.mean), jnp.zeros_like(reward.mean))
        policy_loss = -policy.log_prob(action).reshape(mask.shape)
        divergence = reward.divergence(prior)
        constraint_loss = -reward.log_prob(implied_reward[..., None])

        total = mean_of(policy_loss + divergence + settings.constraint_cost * constraint_loss, mask)
        matches = (policy.mode() == action).reshape(mask.shape)
        return total, {
            "loss": total,
            "policy_loss": mean_of(policy_loss, mask),
            "divergence_loss": mean_of(divergence, mask),
            "constraint_loss": mean_of(constraint_loss, mask),
            "accuracy": mean_of(matches, mask),
            "posterior_mean": mean_of(reward.mean[..., 0], mask),
            "posterior_std": mean_of(jnp.exp(reward.log_scale[..., 0]), mask),
        }
