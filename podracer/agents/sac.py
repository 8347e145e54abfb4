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

from podracer.agent import DEFAULT_CONTEXT, Agent, Context, with_last_action
from podracer.agents.common.normalization import normalize_observation
from podracer.agents.common.optimizers import global_norm
from podracer.agents.continuous import learning
from podracer.agents.continuous.learning import ActorCriticState, ActorParams, Parts, Transition
from podracer.agents.continuous.models import ContinuousNetworks
from podracer.devices.reductions import MaskedMean, global_grad, mean_of
from podracer.fields import bounded, struct
from podracer.ops.distributions import LOG_SCALE_BOUNDS, SquashedNormal, to_bounds
from podracer.types import Carry, EnvironmentSpec, LearnerState, Metrics, Params, PyTree, TimeStep


class Actor(NamedTuple):
    """Parameters of the policy and of its temperature."""

    policy: Params
    log_temperature: jax.Array  # f32 [], log alpha


@struct
class SAC(learning.PolicySettings):
    """Soft actor-critic for continuous actions."""

    initial_temperature: float = bounded(1.0, low=1e-6)
    """Temperature alpha, the weight of the entropy, before the first update."""
    target_entropy: float = bounded(-1.0, low=-math.inf)
    """Entropy, in nats for each action coordinate, to which the temperature steers the policy."""

    def build(self, spec: EnvironmentSpec, context: Context = DEFAULT_CONTEXT) -> Agent:
        networks = learning.build_networks(self, spec, policy_outputs=2)
        return learning.build(self, Method, networks, spec, context)


@dataclasses.dataclass(frozen=True)
class Method:
    """SAC's networks and updates; subclasses have losses, steps or policies of their own."""

    settings: SAC
    networks: ContinuousNetworks
    learner: learning.Learner

    def init(self, key: jax.Array, num_envs: int) -> LearnerState:
        policy, critics = self.networks.init(key, self.settings.num_critics)
        actor = Actor(policy, jnp.log(jnp.float32(self.settings.initial_temperature)))
        carry = self.networks.carry(1)
        return self.learner.init(Parts(actor, critics), critics, num_envs, carry)

    def act(
        self, params: ActorParams, carry: Carry, timestep: TimeStep, keys: jax.Array, explore: bool
    ) -> tuple[jax.Array, PyTree, Carry]:
        """Sample actions of the policy, or take its modes."""
        policy, carry = self.distribution(params, carry, timestep)
        if explore:
            action, _ = policy.sample(keys)
            random_frames = self.settings.random_frames
            action = learning.random_at_start(action, keys, params.frames, random_frames)
        else:
            action = policy.mode()
        action = to_bounds(self.networks.space, action)
        return action, (), with_last_action(carry, action)

    def distribution(
        self, params: ActorParams, carry: Carry, timestep: TimeStep
    ) -> tuple[SquashedNormal, Carry]:
        """Return the policy; before `random_frames` are over, acting does not sample from it."""
        timestep = normalize_observation(params.obs_moments, timestep)
        outputs, carry = self.networks.policy_step(params.actor.policy, carry, timestep)
        return self.describe(outputs), carry

    def update(
        self, state: ActorCriticState, transition: Transition, key: jax.Array, axis: str | None
    ) -> tuple[ActorCriticState, Metrics, jax.Array]:
        """Update the critics, then actor and temperature by them, then the targets."""
        critic_key, actor_key = jax.random.split(key)
        grads, (metrics, priorities) = global_grad(
            self.critic_loss, state.params.critics, state, transition, critic_key, axis=axis
        )
        state = self.step(state, Parts(None, grads))
        actor_grads, actor_metrics = global_grad(
            self.actor_loss, state.params.actor, state, transition, actor_key, axis=axis
        )
        state = self.step(state, Parts(actor_grads, None))
        state = self.learner.move_targets(state, state.params.critics)
        metrics = {**metrics, **actor_metrics, "actor_gradient_norm": global_norm(actor_grads)}
        return state, {**metrics, "gradient_norm": global_norm(grads)}, priorities

    def step(self, state: ActorCriticState, grads: Parts) -> ActorCriticState:
        """Return a state after one optimizer step of each part that has a gradient, not None."""
        return self.learner.step(state, grads)

    def critic_loss(
        self,
        critics: tuple[Params, ...],
        state: ActorCriticState,
        transition: Transition,
        key: jax.Array,
    ) -> tuple[MaskedMean, tuple[Metrics, jax.Array]]:
        """Regress to r + gamma (min Q'(s', a') - alpha log π(a'|s')), equations 3 and 5."""
        actor, networks = state.params.actor, self.networks
        keys = jax.random.split(key, transition.mask.shape)
        next_obs = transition.next_timestep.observation
        next_action, next_log_prob = self.policy(actor, next_obs).sample(keys)
        next_outputs = networks.q_outputs(state.target_params, next_obs, next_action)
        penalty = jnp.exp(actor.log_temperature) * next_log_prob
        return networks.loss(critics, next_outputs, transition, penalty=penalty)

    def actor_loss(
        self, actor: Actor, state: ActorCriticState, transition: Transition, key: jax.Array
    ) -> tuple[MaskedMean, Metrics]:
        """Sum the losses of policy and temperature, see `loss_of_policy`."""
        policy = self.policy(actor, transition.timestep.observation)
        return self.loss_of_policy(policy, actor, state, transition, key)

    def loss_of_policy(
        self,
        policy: SquashedNormal,
        actor: Actor,
        state: ActorCriticState,
        transition: Transition,
        key: jax.Array,
    ) -> tuple[MaskedMean, Metrics]:
        """Sum the losses of a batch's policy and of the temperature, equations 9 and 18."""
        obs, mask = transition.timestep.observation, transition.mask
        keys = jax.random.split(key, mask.shape)
        action, log_prob = policy.sample(keys)
        min_q = jnp.min(self.networks.q_values(state.params.critics, obs, action), axis=0)
        temperature = jnp.exp(jax.lax.stop_gradient(actor.log_temperature))
        losses, share = temperature * log_prob - min_q, jnp.mean(mask)
        metrics = {"entropy": mean_of(-log_prob, mask), "temperature": temperature}
        # The temperature rises while the entropy is below its target.
        target_entropy = self.settings.target_entropy * self.networks.space.size
        excess_entropy = jax.lax.stop_gradient(-log_prob) - target_entropy
        temperature_loss = actor.log_temperature * jnp.mean(mask * excess_entropy)
        policy_loss = jnp.mean(mask * losses)
        metrics["actor_loss"] = MaskedMean(policy_loss, share)
        return MaskedMean(policy_loss + temperature_loss, share), metrics

    def policy(self, actor: Actor, observation: PyTree) -> SquashedNormal:
        return self.describe(self.networks.policy(actor.policy, observation))

    def describe(self, outputs: jax.Array) -> SquashedNormal:
        """Return the policy of its network's outputs `[N, 2 * size]`."""
        mean, log_scale = jnp.split(outputs, 2, axis=-1)
        return SquashedNormal(mean, jnp.clip(log_scale, *LOG_SCALE_BOUNDS))
