"""DDPG: a deterministic policy that ascends a learned action value; and its successor TD3.

TD3 is DDPG with two critics, delayed updates of the policy and smoothed targets.

Sources: Lillicrap et al. 2016 (arXiv 1509.02971); Fujimoto et al. 2018 (arXiv 1802.09477). The
order of an update is TD3's, algorithm 1. Different from both papers: initial weights are
orthogonal (scaled by sqrt 2, the policy's last layer by 0.01), not uniform; actor and critics have
one learning rate. Batch, hidden layers and learning rate come from TD3's published code.
Different from DDPG's paper: Gaussian noise, not an Ornstein-Uhlenbeck process; the action enters
the critic's first layer; no batch normalization; tau is 0.005, not 0.001. Distributional critics
and AdamW's weight decay come from FastTD3 (Seo et al. 2025, arXiv 2505.22642), which projects the
critics' distributions before it takes the smaller.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from podracer.agent import DEFAULT_CONTEXT, Agent, Context, with_last_action
from podracer.agents.common.normalization import normalize_observation
from podracer.agents.common.optimizers import global_norm
from podracer.agents.continuous import learning
from podracer.agents.continuous.learning import ActorCriticState, ActorParams, Parts, Transition
from podracer.agents.continuous.models import ContinuousNetworks
from podracer.devices.reductions import MaskedMean, global_grad, mean_of
from podracer.fields import bounded, static, struct
from podracer.ops.distributions import to_bounds
from podracer.types import Carry, EnvironmentSpec, LearnerState, Metrics, Params, PyTree, TimeStep


@struct
class DDPGState(ActorCriticState):
    """Learner state; actor and critics have targets."""

    updates: jax.Array  # i32 [], of the critics


@struct
class DDPG(learning.PolicySettings):
    """Deep deterministic policy gradient for continuous actions; see also `td3`."""

    action_noise_std: float = bounded(0.1)
    """Standard deviation sigma of the exploration noise, in halves of the action range."""
    target_noise_std: float = bounded(0.0)
    """Standard deviation of the noise on the target policy's actions, in halves of the range."""
    target_noise_clip: float = bounded(0.5)
    """Largest absolute noise c on the target policy's actions, in halves of the action range."""
    num_critics: int = static(default=1, low=1)
    policy_delay: int = static(default=1, low=1)
    """Updates d of the critics for each update of the policy and the targets."""

    def build(self, spec: EnvironmentSpec, context: Context = DEFAULT_CONTEXT) -> Agent:
        networks = learning.build_networks(self, spec, policy_outputs=1)
        return learning.build(self, Method, networks, spec, context)


@dataclasses.dataclass(frozen=True)
class Method:
    """DDPG with its networks; a subclass may have another `actor_loss`."""

    settings: DDPG
    networks: ContinuousNetworks
    learner: learning.Learner
    distribution = None  # a policy of means alone has none

    def init(self, key: jax.Array, num_envs: int) -> LearnerState:
        params = Parts(*self.networks.init(key, self.settings.num_critics))
        state = self.learner.init(params, params, num_envs, self.networks.carry(1))
        return LearnerState(DDPGState(**vars(state.shared), updates=jnp.int32(0)), state.local)

    def act(
        self, params: ActorParams, carry: Carry, timestep: TimeStep, keys: jax.Array, explore: bool
    ) -> tuple[jax.Array, PyTree, Carry]:
        """Choose the policy's actions, with noise to explore."""
        settings = self.settings
        timestep = normalize_observation(params.obs_moments, timestep)
        outputs, carry = self.networks.policy_step(params.actor, carry, timestep)
        action = jnp.tanh(outputs)
        if explore:
            action = learning.with_noise(action, keys, settings.action_noise_std)
            action = learning.random_at_start(action, keys, params.frames, settings.random_frames)
        action = to_bounds(self.networks.space, action)
        return action, (), with_last_action(carry, action)

    def update(
        self, state: DDPGState, transition: Transition, key: jax.Array, axis: str | None
    ) -> tuple[DDPGState, Metrics, jax.Array]:
        """Update the critics; every `policy_delay`-th time then the policy and the targets too."""
        settings, learner = self.settings, self.learner
        grads, (metrics, priorities) = global_grad(
            self.critic_loss, state.params.critics, state, transition, key, axis=axis
        )
        state = learner.step(state, Parts(None, grads))
        metrics["gradient_norm"] = global_norm(grads)

        def update_policy(state: DDPGState) -> tuple[DDPGState, Metrics]:
            loss, actor = partial(self.actor_loss, axis=axis), state.params.actor
            grads, metrics = global_grad(loss, actor, state, transition, axis=axis)
            state = learner.step(state, Parts(grads, None))
            metrics["actor_gradient_norm"] = global_norm(grads)
            return learner.move_targets(state, state.params), metrics

        state = dataclasses.replace(state, updates=state.updates + 1)
        is_due = state.updates % settings.policy_delay == 0
        state, actor_metrics = learning.update_if(is_due, update_policy, state)
        return state, {**metrics, **actor_metrics}, priorities

    def critic_loss(
        self, critics: tuple[Params, ...], state: DDPGState, transition: Transition, key: jax.Array
    ) -> tuple[MaskedMean, tuple[Metrics, jax.Array]]:
        """Regress to Q(s, a) = r + gamma min Q'(s', μ'(s') + clipped noise)."""
        next_obs, settings = transition.next_timestep.observation, self.settings
        # Target policy smoothing (TD3, section 5.3).
        next_action = self.policy(state.target_params.actor, next_obs)
        noise = settings.target_noise_std * jax.random.normal(key, next_action.shape)
        noise = jnp.clip(noise, -settings.target_noise_clip, settings.target_noise_clip)
        next_action = jnp.clip(next_action + noise, -1.0, 1.0)
        next_outputs = self.networks.q_outputs(state.target_params.critics, next_obs, next_action)
        return self.networks.loss(critics, next_outputs, transition)

    def actor_loss(
        self, actor: Params, state: DDPGState, transition: Transition, axis: str | None = None
    ) -> tuple[MaskedMean, Metrics]:
        """Maximize Q(s, μ(s)) of the first critic."""
        obs, mask = transition.timestep.observation, transition.mask
        action = self.policy(actor, obs)
        q = self.networks.q_values(state.params.critics[:1], obs, action)[0]
        loss = mean_of(-q, mask)
        return loss, {"actor_loss": loss}

    def policy(self, params: Params, observation: PyTree) -> jax.Array:
        """Return actions `[N, size]` in [-1, 1]."""
        return jnp.tanh(self.networks.policy(params, observation))


def td3(**settings: Any) -> DDPG:
    """Return DDPG as TD3 (Fujimoto et al. 2018); `settings` override its fields."""
    return DDPG(**{"num_critics": 2, "policy_delay": 2, "target_noise_std": 0.2, **settings})
