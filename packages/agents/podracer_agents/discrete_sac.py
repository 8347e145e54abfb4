"""Discrete SAC: SAC for discrete actions, with expectations over all actions in place of samples.

Source: Christodoulou 2019, "Soft Actor-Critic for Discrete Action Settings" (arXiv 1910.07207).
Different from the paper: its differences are those of the core's `SAC`, and critics and policy are
networks of one kind. The entropy's target is a share of the largest entropy, 0.98 in the paper.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from podracer.agent import DEFAULT_CONTEXT, Agent, Context
from podracer.agents.common import off_policy, value_based
from podracer.agents.common.normalization import normalize_observation
from podracer.agents.continuous import learning
from podracer.agents.continuous.learning import ActorCriticState, ActorParams, Transition
from podracer.agents.continuous.models import ContinuousNetworks
from podracer.agents.sac import SAC, Actor, Method
from podracer.devices.reductions import MaskedMean, mean_of
from podracer.errors import ConfigError
from podracer.fields import bounded, struct
from podracer.networks import Head, Network, NetworkBuilder, outputs
from podracer.networks.groups import GroupNetwork
from podracer.ops.action_masks import mask_logits
from podracer.ops.distributions import Categorical
from podracer.types import (
    Carry,
    EnvironmentSpec,
    Metrics,
    Params,
    PyTree,
    TimeStep,
    action_mask,
)


@struct
class DiscreteSAC(SAC):
    """Soft actor-critic for discrete actions."""

    target_entropy: float = bounded(0.98, high=1.0)
    """Entropy to which the temperature steers the policy, a share of the uniform policy's over the
    allowed actions."""

    def build(self, spec: EnvironmentSpec, context: Context = DEFAULT_CONTEXT) -> Agent:
        if self.return_distribution is not None:
            raise ConfigError("DiscreteSAC has no distribution of returns: leave it out.")
        space: Any = value_based.require_discrete(spec)
        groups = self.groups(spec)

        def network(builder: NetworkBuilder, role: str, **heads: Head) -> Network:
            network = GroupNetwork(builder, groups.get(role, ()))
            return off_policy.require_feed_forward(network.build(spec.observation, heads))

        critic = network(self.critic_network or self.network, "critic", q=Head(space.num_actions))
        actor = network(self.network, "actor", action=Head(space.num_actions, 0.01))
        networks = Networks(space, critic, distribution=None, actor=actor)
        return learning.build(self, _Method, networks, spec, context)


class Networks(ContinuousNetworks):
    """Networks of a policy and of critics with a value for each action."""

    def action_values(self, params: tuple[Params, ...], observation: PyTree) -> jax.Array:
        """Return the values of all actions by each critic, f32 `[critics, N, A]`."""
        return jnp.stack([outputs(self.critic, critic, observation)["q"] for critic in params])

    def q_outputs(
        self, params: tuple[Params, ...], observation: PyTree, action: jax.Array
    ) -> jax.Array:
        values = self.action_values(params, observation)[..., None]
        return jax.vmap(value_based.gather_action, (0, None))(values, action)


class _Method(Method):
    networks: Networks

    def act(
        self, params: ActorParams, carry: Carry, timestep: TimeStep, keys: jax.Array, explore: bool
    ) -> tuple[jax.Array, PyTree, Carry]:
        policy, carry = self.distribution(params, carry, timestep)
        if not explore:
            return policy.mode(), (), carry
        uniform = Categorical(mask_logits(timestep.observation, jnp.zeros_like(policy.logits)))
        is_random = params.frames < self.settings.random_frames
        return jnp.where(is_random, uniform.sample(keys), policy.sample(keys)), (), carry

    def distribution(
        self, params: ActorParams, carry: Carry, timestep: TimeStep
    ) -> tuple[Any, Carry]:
        timestep = normalize_observation(params.obs_moments, timestep)
        return self.policy(params.actor, timestep.observation), carry

    def policy(self, actor: Actor, observation: PyTree) -> Any:
        return Categorical(
            mask_logits(observation, self.networks.policy(actor.policy, observation))
        )

    def critic_loss(
        self,
        critics: tuple[Params, ...],
        state: ActorCriticState,
        transition: Transition,
        key: jax.Array,
    ) -> tuple[MaskedMean, tuple[Metrics, jax.Array]]:
        """Regress to r + gamma Σ π(a'|s') (min Q'(s', a') - α log π(a'|s')), equation 10."""
        actor, next_obs = state.params.actor, transition.next_timestep.observation
        policy = self.policy(actor, next_obs)
        q = jnp.min(self.networks.action_values(state.target_params, next_obs), axis=0)
        value = jnp.sum(jax.nn.softmax(policy.logits) * q, axis=-1)
        value += jnp.exp(actor.log_temperature) * policy.entropy()
        return self.networks.loss(critics, value[None, :, None], transition)

    def actor_loss(
        self, actor: Actor, state: ActorCriticState, transition: Transition, key: jax.Array
    ) -> tuple[MaskedMean, Metrics]:
        """Sum the losses of policy and temperature, equations 12 and 11."""
        obs, mask = transition.timestep.observation, transition.mask
        policy = self.policy(actor, obs)
        entropy, temperature = policy.entropy(), jnp.exp(actor.log_temperature)
        q = jnp.min(self.networks.action_values(state.params.critics, obs), axis=0)
        value = jnp.sum(jax.nn.softmax(policy.logits) * q, axis=-1)
        loss = mean_of(-value - jax.lax.stop_gradient(temperature) * entropy, mask)
        # The temperature rises while the entropy is below its target.
        target = self.settings.target_entropy * _uniform_entropy(obs, policy.logits.shape[-1])
        excess = jax.lax.stop_gradient(entropy) - target
        temperature_loss = actor.log_temperature * jnp.mean(mask * excess)
        metrics = {"entropy": mean_of(entropy, mask), "temperature": temperature}
        total = MaskedMean(loss.total + temperature_loss, loss.share)
        return total, {**metrics, "actor_loss": loss}


def _uniform_entropy(observation: PyTree, num_actions: int) -> float | jax.Array:
    """Return the entropy of the uniform policy over the allowed actions, `[N]` if they differ."""
    mask = action_mask(observation)
    if mask is None:
        return math.log(num_actions)
    num_allowed = jnp.sum(mask, axis=-1)  # a mask that allows nothing is ignored
    return jnp.log(jnp.where(num_allowed == 0, num_actions, num_allowed))
