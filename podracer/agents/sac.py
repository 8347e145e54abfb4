"""SAC: maximum-entropy actor-critic with a stochastic policy and a learned temperature.

Source: Haarnoja et al. 2018, "Soft Actor-Critic Algorithms and Applications" (arXiv 1812.05905).
Each update makes algorithm 1's steps in its order. Different from the paper, and as in common
implementations: the temperature's loss is linear in log alpha and shares its samples of the policy
with the actor's loss; priorities, n-step returns, weight decay and distributional critics are
possible, and of n steps only the last one's entropy counts in the critics' targets. Different from
both: weights are initially orthogonal, and the policy's standard deviation is at least exp(-5), not
exp(-20).
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from podracer import schedules
from podracer.agents.common import continuous, continuous_networks
from podracer.agents.common.continuous import ActorParams, Parts, Transition
from podracer.agents.common.continuous_networks import ContinuousNetworks, ReturnDistribution
from podracer.agents.common.optimizers import Optimizer, OptimizerBuilder
from podracer.agents.common.recurrent import Recurrence
from podracer.means import Mean, mean_of
from podracer.networks import MLP, NetworkBuilder, TorsoNetwork
from podracer.ops.distributions import LOG_SCALE_BOUNDS, SquashedNormal, to_bounds
from podracer.replay import Replay
from podracer.schedules import Schedule
from podracer.types import (
    Carry,
    Derived,
    EnvironmentSpec,
    LearnerState,
    Metrics,
    Params,
    PyTree,
    TimeStep,
    bounded,
    derived,
    static,
    struct,
)


class Actor(NamedTuple):
    """Parameters of the policy and of its temperature."""

    policy: Params
    log_temperature: jax.Array  # f32 [], log alpha


@struct
class SACState(continuous.ActorCriticState):
    """Learner state; only the critics have targets."""

    params: Parts  # of `Actor` and the critics
    target_params: tuple[Params, ...]  # of the critics


@struct
class SAC:
    """Soft actor-critic for continuous actions."""

    learning_rate: Schedule = bounded(3e-4)
    """Learning rate of the optimizer, for the actor, the critics and the temperature."""
    discount: float = bounded(0.99, high=1.0)
    """Discount factor gamma, in [0, 1]."""
    target_update_rate: float = bounded(0.005, high=1.0)
    """Rate tau, in [0, 1], at which the target critics follow the critics in each update."""
    initial_temperature: float = bounded(1.0, low=1e-6)
    """Temperature alpha, the weight of the entropy, before the first update."""
    target_entropy: float = bounded(-1.0, low=-math.inf)
    """Entropy, in nats for each action coordinate, to which the temperature steers the policy."""
    optimizer: OptimizerBuilder = Optimizer(epsilon=1e-8)
    """Optimizer of the parameters."""
    weight_decay: float = static(default=0.0, low=0.0)
    """Decoupled weight decay of matrices, times the learning rate (AdamW); biases do not decay."""
    num_critics: int = static(default=2, low=1)
    """Number of critics; targets use the smallest of their values."""
    return_distribution: ReturnDistribution | None = static(default=None)
    """Distribution of returns that the critics learn, categorical (C51) or quantiles; None for its
    mean alone."""
    n_step: int = static(default=1, low=1)
    """Rewards n in a return before it bootstraps."""
    random_frames: int = static(default=5_000, low=0)
    """Frames with uniformly random actions at the start of training."""
    normalize_observations: bool = static(default=False)
    """Normalize observations by their running mean and variance."""
    replay: Replay = static(default=Replay(1_000_000, warmup=5_000))
    """Replay buffer."""
    network: NetworkBuilder = static(default=TorsoNetwork(MLP(hidden=(256, 256))))
    """Network of the policy and of each critic, without their heads; it may be recurrent."""
    recurrence: Recurrence = static(default=Recurrence())
    """Settings for a recurrent network."""
    rollout_length: Derived[int] = derived()
    """Timesteps between two stored recurrent states, taken from the driver."""
    spec: EnvironmentSpec | None = static(default=None)

    def init(self, key: jax.Array, num_envs: int) -> LearnerState:
        policy, critics = self._networks.init(key, self.num_critics)
        actor = Actor(policy, jnp.log(jnp.float32(self.initial_temperature)))
        params = Parts(actor, critics)
        state = SACState(
            params=params,
            target_params=jax.tree.map(jnp.copy, critics),
            optimizer_states=continuous.init_optimizers(self, params),
            obs_moments=continuous.init_obs_moments(self.normalize_observations, self.spec),
            frames=schedules.init_frames(),
        )
        return LearnerState(state, continuous.init_replay(self, num_envs))

    carry = continuous.carry
    actor_params = continuous.actor_params

    def act(
        self, params: ActorParams, carry: Carry, timestep: TimeStep, keys: jax.Array, explore: bool
    ) -> tuple[jax.Array, PyTree, Carry]:
        outputs, carry = continuous.policy_outputs(
            self, params, params.actor.policy, carry, timestep
        )
        policy = _distribution(outputs)
        if explore:
            action, _ = policy.sample(keys)
            action = continuous.random_at_start(action, keys, params.frames, self.random_frames)
        else:
            action = policy.mode()
        action = to_bounds(self._networks.space, action)
        return action, (), continuous.with_last_action(carry, action)

    learn = continuous.learn

    def _update(
        self, state: SACState, transition: Transition, key: jax.Array, axis: str | None
    ) -> tuple[SACState, Metrics, jax.Array]:
        """Update the critics, then actor and temperature by them, then the targets."""
        critic_key, actor_key = jax.random.split(key)
        state, (metrics, priorities), norm = continuous.gradient_step(
            self, "critics", self._critic_loss, state, transition, critic_key, axis
        )
        state, actor_metrics, actor_norm = continuous.gradient_step(
            self, "actor", self._actor_loss, state, transition, actor_key, axis
        )
        target_params = optax.incremental_update(
            state.params.critics, state.target_params, self.target_update_rate
        )
        state = dataclasses.replace(state, target_params=target_params)
        norms = {"gradient_norm": norm, "actor_gradient_norm": actor_norm}
        return state, {**metrics, **actor_metrics, **norms}, priorities

    def _critic_loss(
        self,
        critics: tuple[Params, ...],
        state: SACState,
        transition: Transition,
        key: jax.Array,
    ) -> tuple[Mean, tuple[Metrics, jax.Array]]:
        """Regress to r + gamma (min Q'(s', a') - alpha log π(a'|s')), equations 3 and 5."""
        actor, networks = state.params.actor, self._networks
        keys = jax.random.split(key, transition.mask.shape)
        next_obs = transition.next_timestep.observation
        next_action, next_log_prob = self._policy(actor, next_obs).sample(keys)
        next_outputs = networks.q_outputs(state.target_params, next_obs, next_action)
        penalty = jnp.exp(actor.log_temperature) * next_log_prob
        return continuous.critic_loss(
            self, critics, networks.min_over_critics(next_outputs), transition, penalty=penalty
        )

    def _actor_loss(
        self, actor: Actor, state: SACState, transition: Transition, key: jax.Array
    ) -> tuple[Mean, Metrics]:
        """Sum the losses of policy and temperature, equations 9 and 18."""
        obs = transition.timestep.observation
        keys = jax.random.split(key, transition.mask.shape)
        action, log_prob = self._policy(actor, obs).sample(keys)
        min_q = jnp.min(self._networks.q_values(state.params.critics, obs, action), axis=0)
        temperature = jnp.exp(jax.lax.stop_gradient(actor.log_temperature))
        policy_loss = jnp.mean(transition.mask * (temperature * log_prob - min_q))

        # The temperature rises while the entropy is below its target.
        target_entropy = self.target_entropy * self._networks.space.size
        excess_entropy = jax.lax.stop_gradient(-log_prob) - target_entropy
        temperature_loss = actor.log_temperature * jnp.mean(transition.mask * excess_entropy)
        share = jnp.mean(transition.mask)
        return Mean(policy_loss + temperature_loss, share), {
            "actor_loss": Mean(policy_loss, share),
            "entropy": mean_of(-log_prob, transition.mask),
            "temperature": temperature,
        }

    def _policy(self, actor: Actor, observation: PyTree) -> SquashedNormal:
        return _distribution(self._networks.policy(actor.policy, observation))

    @property
    def _networks(self) -> ContinuousNetworks:
        return continuous_networks.build(
            self.network, self.spec, self.return_distribution, self.recurrence, policy_outputs=2
        )


def _distribution(outputs: jax.Array) -> SquashedNormal:
    """Return the policy of a network's outputs `[N, 2 * size]`."""
    mean, log_scale = jnp.split(outputs, 2, axis=-1)
    return SquashedNormal(mean, jnp.clip(log_scale, *LOG_SCALE_BOUNDS))
