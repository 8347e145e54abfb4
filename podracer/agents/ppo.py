"""PPO: several epochs of clipped policy updates on each rollout.

Minibatches are shuffled within a shard: transitions for feed-forward networks, whole sequences from
their stored recurrent state for recurrent ones. Source: Schulman et al. 2017 (arXiv 1707.06347).
The defaults are CleanRL's, but only recipes anneal the learning rate, actions at a time-out are
masked, and standard deviations are clipped to [exp(-5), exp(2)].
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Literal, cast

import jax
import jax.numpy as jnp

from podracer import schedules
from podracer.agent import DEFAULT_CONTEXT, Agent, Context
from podracer.agents.common import actor_critic, epochs, normalization, optimizers
from podracer.agents.common.actor_critic import ActorCritic
from podracer.agents.common.settings import ActorCriticSettings, EpochSettings, build_optimizer
from podracer.devices.reductions import MaskedMean, Moments, init_moments, moments_of
from podracer.fields import bounded, static, struct
from podracer.networks import MLP, NetworkBuilder, TorsoNetwork
from podracer.ops import distributions, returns
from podracer.ops.distributions import ActionDistribution
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


@struct
class ActorParams:
    """Parameters of the network and of the normalization of its observations."""

    params: Params
    observation_moments: Moments | None


@struct
class PPOState(optimizers.CountedState):
    """Learner state; moments are None where nothing is normalized by them."""

    observation_moments: Moments | None
    return_moments: Moments | None


@struct
class Batch(epochs.Batch):
    """Items to learn from, with their advantages."""

    sample: jax.Array  # action before it is scaled to the bounds
    log_prob: jax.Array  # f32, of the policy that acted
    value: jax.Array  # f32, of the value function that acted
    advantage: jax.Array  # f32


@struct
class PPO(ActorCriticSettings, EpochSettings):
    """Proximal policy optimization for discrete or continuous actions."""

    learning_rate: Schedule = bounded(2.5e-4)
    gae_lambda: float = bounded(0.95, high=1.0)
    """Parameter lambda of generalized advantage estimation, in [0, 1]; 0 gives one-step errors."""
    clip_epsilon: float = bounded(0.2)
    """Clip range epsilon of the probability ratio, and with `clip_value` of the value's change."""
    max_gradient_norm: float = bounded(0.5, low=1e-6)
    optimizer: optimizers.OptimizerBuilder = optimizers.Optimizer()
    clip_value: bool = static(default=True)
    """Whether the value loss takes the larger error of the new value and of its clipped change."""
    advantage_normalization: Literal["minibatch", "batch", "none"] = static(default="minibatch")
    """Advantages standardized together, on all devices: of each minibatch, of all, or of `none`."""
    target_kl: float | None = static(default=None, low=0.0)
    """Divergence KL(old policy, new policy) to stop at: the first minibatch that estimates more
    than 1.5 times as much is not learned from, nor any later one; None never stops."""
    normalize_observations: bool = static(default=False)
    """Normalize observations by their running mean and standard deviation, clipped to [-10, 10]."""
    normalize_rewards: bool = static(default=False)
    """Divide rewards by the standard deviation of discounted reward sums, clipped to [-10, 10]."""
    network: NetworkBuilder = static(default=TorsoNetwork(MLP((64, 64), "tanh"), shared=False))

    def build(self, spec: EnvironmentSpec, context: Context = DEFAULT_CONTEXT) -> Agent:
        agent = _PPO(self, spec, actor_critic.build(self, spec), build_optimizer(self))
        return Agent.of(agent, spec, carry=agent.model.carry, groups=agent.model.groups)


@dataclasses.dataclass(frozen=True)
class _PPO:
    settings: PPO
    spec: EnvironmentSpec
    model: ActorCritic
    optimizer: optimizers.ScheduledOptimizer

    def init(self, key: jax.Array, num_envs: int) -> LearnerState:
        """Return new parameters; local is the discounted sum of past rewards `[B]`, or `()`."""
        settings, observation = self.settings, self.spec.observation
        moments = init_moments(observation) if settings.normalize_observations else None
        state = PPOState(
            **vars(self.optimizer.init(self.model.network.init(key))),
            observation_moments=moments,
            return_moments=init_moments(jnp.zeros(())) if settings.normalize_rewards else None,
        )
        return LearnerState(state, jnp.zeros(num_envs) if settings.normalize_rewards else ())

    def actor_params(self, state: LearnerState) -> ActorParams:
        """Return the network's parameters and the moments of observations."""
        return ActorParams(state.shared.params, state.shared.observation_moments)

    def act(
        self, params: ActorParams, carry: Carry, timestep: TimeStep, keys: jax.Array, explore: bool
    ) -> tuple[jax.Array, PyTree, Carry]:
        """Sample actions; extras are `sample`, `log_prob`, `value`, normalized `observation`."""
        timestep = normalization.normalize_observation(params.observation_moments, timestep)
        action, extras, carry = self.model.act(params.params, carry, timestep, keys, explore)
        policy = distributions.policy(self.spec.action, extras.pop("policy"))
        extras["log_prob"] = policy.log_prob(extras["sample"])
        if self.settings.normalize_observations:
            extras["observation"] = timestep.observation
        return action, extras, carry

    def distribution(
        self, params: ActorParams, carry: Carry, timestep: TimeStep
    ) -> tuple[ActionDistribution, Carry]:
        timestep = normalization.normalize_observation(params.observation_moments, timestep)
        return self.model.distribution(params.params, carry, timestep)

    def learn(
        self, state: LearnerState, trajectory: Trajectory, key: jax.Array, axis: str | None
    ) -> tuple[LearnerState, Metrics]:
        """Estimate advantages, then take steps on minibatches for K epochs (algorithm 1)."""
        settings, learner = self.settings, cast(PPOState, state.shared)
        learner, trajectory, reward_sums = self.normalize(learner, trajectory, state.local, axis)
        batch = self.make_batch(learner.params, trajectory)
        batch, minibatches = epochs.shuffle(key, batch, settings)
        advantage_moments = self.advantage_moments(batch, minibatches, axis)
        value_moments = moments_of((batch.target, batch.advantage), axis, batch.valid)
        entropy_cost = schedules.value_at(settings.entropy_cost, learner.frames)
        learner, metrics = epochs.fit(
            self.optimizer,
            self.model.network,
            partial(self.loss, entropy_cost),
            learner,
            batch,
            (minibatches, *advantage_moments),
            axis,
            target_kl=settings.target_kl,
        )
        num_frames = jnp.round(value_moments.count).astype(jnp.uint32)
        learner = optimizers.with_more_frames(learner, num_frames)
        target_variance, error_variance = value_moments.variance
        varies = target_variance > 1e-12 * value_moments.mean[0] ** 2  # by more than rounding
        explained = jnp.where(varies, 1.0 - error_variance / target_variance, 0.0)
        return LearnerState(learner, reward_sums), {**metrics, "explained_variance": explained}

    def normalize(
        self, learner: PPOState, trajectory: Trajectory, reward_sums: PyTree, axis: str | None
    ) -> tuple[PPOState, Trajectory, PyTree]:
        """Return a rollout in normalized units, and the moments and sums that it adds to."""
        if self.settings.normalize_observations:
            moments = cast(Moments, learner.observation_moments)
            new_moments = normalization.update_moments(moments, trajectory, axis)
            trajectory = normalization.normalized_by_actor(moments, trajectory)
            learner = dataclasses.replace(learner, observation_moments=new_moments)
        if self.settings.normalize_rewards:
            moments = cast(Moments, learner.return_moments)
            trajectory, moments, reward_sums = normalization.scale_rewards(
                moments, reward_sums, trajectory, discount=self.settings.discount, axis=axis
            )
            learner = dataclasses.replace(learner, return_moments=moments)
        return learner, trajectory, reward_sums

    def make_batch(self, params: Params, trajectory: Trajectory) -> Batch:
        """Return a rollout `[T, B, ...]` with its advantages and value targets."""
        settings, steps, behavior = self.settings, trajectory.steps, trajectory.steps.extras
        last_value = self.model.final_value(params, trajectory)
        values = jnp.concatenate([behavior["value"], last_value[None]])
        rewards, discounts, valid = trajectory.transitions(settings.discount)
        advantage = returns.generalized_advantages(
            values[:-1], values[1:], rewards, discounts, valid, settings.gae_lambda
        )
        return Batch(
            observation=steps.timestep.observation,
            first=steps.timestep.first,
            sample=behavior["sample"],
            log_prob=behavior["log_prob"],
            value=behavior["value"],
            target=behavior["value"] + advantage,
            advantage=advantage,
            valid=valid.astype(jnp.float32),
            carry=jax.tree.map(lambda x: x[None], trajectory.carry),
        )

    def advantage_moments(
        self, batch: Batch, minibatches: jax.Array, axis: str | None
    ) -> tuple[jax.Array, jax.Array]:
        """Return the mean and the variance `[K]` that standardize advantages of K minibatches.

        `minibatches` are indices `[K, n]` of the batch's items; all shards have the same moments.
        """
        mean, variance = jnp.zeros(()), jnp.ones(())
        grouping = self.settings.advantage_normalization
        if grouping != "none":
            advantages, valid = batch.advantage, batch.valid
            if grouping == "minibatch":  # [T, n, K]
                advantages, valid = (
                    jnp.moveaxis(x.at[:, minibatches].get(mode="promise_in_bounds"), 1, -1)
                    for x in (advantages, valid)
                )
            moments = moments_of(advantages, axis, valid)
            mean, variance = moments.mean, moments.variance
        shape = minibatches.shape[:1]
        return jnp.broadcast_to(mean, shape), jnp.broadcast_to(variance, shape)

    def loss(
        self,
        entropy_cost: float | jax.Array,
        params: Params,
        batch: Batch,
        advantage_mean: jax.Array,
        advantage_variance: jax.Array,
    ) -> tuple[MaskedMean, Metrics]:
        """Return the loss, the negative objective of equation 9."""
        settings, epsilon = self.settings, self.settings.clip_epsilon
        carry = jax.tree.map(lambda x: x[0], batch.carry)
        outputs, _ = self.model.network.apply(params, carry, batch.observation, batch.first)
        policy = distributions.policy(self.spec.action, outputs["policy"])
        value = outputs["value"][..., 0]
        log_ratio = policy.log_prob(batch.sample) - batch.log_prob
        ratio = jnp.exp(log_ratio)
        clipped_ratio = jnp.clip(ratio, 1.0 - epsilon, 1.0 + epsilon)
        entropy = jnp.mean(batch.valid * policy.entropy())

        advantage = batch.advantage - advantage_mean
        advantage = advantage * jax.lax.rsqrt(advantage_variance + 1e-8)
        surrogate = jnp.minimum(ratio * advantage, clipped_ratio * advantage)  # equation 7
        policy_loss = -jnp.mean(batch.valid * surrogate)
        value_error = (value - batch.target) ** 2
        if settings.clip_value:  # in the paper's code alone; Engstrom et al. 2020, section 3
            clipped_value = batch.value + jnp.clip(value - batch.value, -epsilon, epsilon)
            value_error = jnp.maximum(value_error, (clipped_value - batch.target) ** 2)
        value_loss = 0.5 * jnp.mean(batch.valid * value_error)
        loss = policy_loss + settings.value_cost * value_loss - entropy_cost * entropy
        parts = {
            "loss": loss,
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy,
            "approx_kl": jnp.mean(batch.valid * kl_estimate(log_ratio)),
            "clip_fraction": jnp.mean(batch.valid * (jnp.abs(ratio - 1.0) > epsilon)),
        }
        share = jnp.mean(batch.valid)
        metrics = {name: MaskedMean(part, share) for name, part in parts.items()}
        return MaskedMean(loss, share), metrics


def kl_estimate(log_ratio: jax.Array) -> jax.Array:
    """Return `r - 1 - log r`, whose mean over samples of the old policy estimates KL(old, new).

    `log_ratio [*b]` is the logarithm of the ratio r of the new and the old probability. Near 0,
    where the difference would be rounding errors alone, the result is the first terms of its
    series. Source: Schulman 2020, "Approximating KL divergence".
    """
    x = log_ratio
    series = x * x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120))))
    return jnp.where(jnp.abs(x) < 0.2, series, jnp.exp(x) - 1.0 - x)
