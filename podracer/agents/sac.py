"""SAC: maximum-entropy actor-critic with a stochastic policy and a learned temperature.

Source: Haarnoja et al. 2018, "Soft Actor-Critic Algorithms and Applications" (arXiv 1812.05905).
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from podracer.agents.common import continuous
from podracer.agents.common.continuous import ActorParams, Transition
from podracer.networks import MLP, TorsoNetwork
from podracer.ops.distributions import LOG_SCALE_BOUNDS, SquashedNormal, to_bounds
from podracer.replay import Replay
from podracer.types import (
    Carry,
    EnvironmentSpec,
    LearnerState,
    Metrics,
    Params,
    PyTree,
    TimeStep,
    bounded,
    static,
    struct,
)


class SACParams(NamedTuple):
    """Parameters of SAC; each field has an optimizer of its own."""

    actor: Params
    critics: tuple[Params, ...]
    log_temperature: jax.Array  # f32 [], log alpha


@struct
class SACState(continuous.ActorCriticState):
    """Learner state."""

    params: SACParams
    target_params: tuple[Params, ...]  # of the critics
    optimizer_states: SACParams


@struct
class SAC:
    """Soft actor-critic for continuous actions."""

    learning_rate: float = bounded(3e-4)
    """Learning rate of Adam, for the actor, the critics and the temperature."""
    discount: float = bounded(0.99, high=1.0)
    """Discount factor gamma, in [0, 1]."""
    target_update_rate: float = bounded(0.005, high=1.0)
    """Rate tau, in [0, 1], at which the target critics follow the critics in each update."""
    initial_temperature: float = bounded(1.0)
    """Temperature alpha, the weight of the entropy, before the first update."""
    target_entropy: float = bounded(-1.0, low=-math.inf)
    """Entropy, in nats for each action coordinate, to which the temperature steers the policy."""
    num_critics: int = static(default=2, low=1)
    """Number of critics; targets use the smallest of their values."""
    n_step: int = static(default=1, low=1)
    """Rewards n in a return before it bootstraps."""
    random_frames: int = static(default=5_000, low=0)
    """Frames with uniformly random actions at the start of training."""
    normalize_observations: bool = static(default=False)
    """Normalize observations by their running mean and variance."""
    replay: Replay = static(default=Replay(1_000_000, warmup=5_000))
    """Replay buffer."""
    network: TorsoNetwork = static(default=TorsoNetwork(MLP(hidden=(256, 256))))
    """Network of the policy and of each critic, without their heads."""
    spec: EnvironmentSpec | None = static(default=None)

    def init(self, key: jax.Array, num_envs: int) -> LearnerState:
        actor, critics = self._networks.init(key, self.num_critics)
        params = SACParams(actor, critics, jnp.log(jnp.float32(self.initial_temperature)))
        state = SACState(
            params=params,
            target_params=jax.tree.map(jnp.copy, critics),
            optimizer_states=continuous.init_optimizers(self, params),
            obs_moments=continuous.init_obs_moments(self.normalize_observations, self.spec),
            exploration_progress=jnp.float32(0),
        )
        return LearnerState(state, continuous.make_buffer(self).init(num_envs))

    carry = continuous.carry
    actor_params = continuous.actor_params

    def act(
        self, params: ActorParams, carry: Carry, timestep: TimeStep, keys: jax.Array, explore: bool
    ) -> tuple[jax.Array, PyTree, Carry]:
        observation = continuous.normalized_obs(params.obs_moments, timestep.observation)
        policy = self._policy(params.actor, observation)
        if explore:
            action, _ = policy.sample(keys)
            action = continuous.random_at_start(action, keys, params.exploration_progress)
        else:
            action = policy.mode()
        return to_bounds(self._networks.space, action), (), carry

    learn = continuous.learn

    def _loss(
        self,
        params: SACParams,
        target_critics: tuple[Params, ...],
        transition: Transition,
        key: jax.Array,
    ) -> tuple[jax.Array, tuple[Metrics, jax.Array]]:
        """Sum the losses of critics, actor and temperature; each takes the others as constants."""
        fixed = jax.lax.stop_gradient(params)
        temperature = jnp.exp(fixed.log_temperature)
        next_action_keys, action_keys = jax.random.split(key, (2, *transition.mask.shape))
        q_values = self._networks.q_values

        # Critics, equations 3 and 5: Q(s, a) = r + gamma (min Q'(s', a') - alpha log π(a'|s')).
        next_obs = transition.next_timestep.observation
        next_action, next_log_prob = self._policy(fixed.actor, next_obs).sample(next_action_keys)
        min_next_q = jnp.min(q_values(target_critics, next_obs, next_action), axis=0)
        soft_value = min_next_q - temperature * next_log_prob
        target = transition.n_step_return + transition.bootstrap_discount * soft_value
        obs = transition.timestep.observation
        q = q_values(params.critics, obs, transition.action)
        critic_loss, priorities = continuous.critic_loss(q, target, transition)

        # Actor, equation 9: minimize alpha log π(a|s) - min Q(s, a).
        action, log_prob = self._policy(params.actor, obs).sample(action_keys)
        min_q = jnp.min(q_values(fixed.critics, obs, action), axis=0)
        actor_loss = jnp.mean(transition.mask * (temperature * log_prob - min_q))

        # Temperature, equation 18, on log alpha: it rises while the entropy is below its target.
        target_entropy = self.target_entropy * self._networks.space.size
        excess_entropy = jax.lax.stop_gradient(-log_prob) - target_entropy
        temperature_loss = params.log_temperature * jnp.mean(transition.mask * excess_entropy)

        metrics = {
            "loss": critic_loss,
            "actor_loss": actor_loss,
            "q": jnp.mean(q),
            "entropy": -jnp.mean(log_prob),
            "temperature": temperature,
        }
        return critic_loss + actor_loss + temperature_loss, (metrics, priorities)

    def _apply_gradients(self, state: SACState, grads: SACParams) -> SACState:
        params, optimizer_states = continuous.optimizer_steps(self, state, grads)
        target_critics = optax.incremental_update(
            params.critics, state.target_params, self.target_update_rate
        )
        return dataclasses.replace(
            state, params=params, target_params=target_critics, optimizer_states=optimizer_states
        )

    def _policy(self, params: Params, observation: PyTree) -> SquashedNormal:
        mean, log_scale = jnp.split(self._networks.policy(params, observation), 2, axis=-1)
        return SquashedNormal(mean, jnp.clip(log_scale, *LOG_SCALE_BOUNDS))

    @property
    def _networks(self) -> continuous.ActorCritic:
        return continuous.build_networks(self.network, self.spec, policy_outputs=2)
