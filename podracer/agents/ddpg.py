"""DDPG: a deterministic policy that ascends a learned action value; and its successor TD3.

TD3 is DDPG with two critics, delayed updates of the policy and smoothed targets. TD3+BC is TD3 from
a data set, whose policy stays near the recorded actions.

Sources: Lillicrap et al. 2016 (arXiv 1509.02971); Fujimoto et al. 2018 (arXiv 1802.09477). The
order of an update is TD3's, algorithm 1. Different from both papers: initial weights are
orthogonal (scaled by sqrt 2, the policy's last layer by 0.01), not uniform; actor and critics have
one learning rate. Batch, hidden layers and learning rate come from TD3's published code.
Different from DDPG's paper: Gaussian noise, not an Ornstein-Uhlenbeck process; the action enters
the critic's first layer; no batch normalization; tau is 0.005, not 0.001. Distributional critics
and AdamW's weight decay come from FastTD3 (Seo et al. 2025, arXiv 2505.22642), which projects the
critics' distributions before it takes the smaller.

TD3+BC: Fujimoto and Gu 2021, "A Minimalist Approach to Offline Reinforcement Learning" (arXiv
2106.06860). Different from the authors' code: observations are normalized by running moments of the
replayed transitions, not by those of the whole data set, computed before.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from podracer.agent import DEFAULT_CONTEXT, Agent, Context
from podracer.agents.common.normalization import normalize_observation
from podracer.agents.continuous import learning, models
from podracer.agents.continuous.learning import (
    ActorCriticState,
    ActorParams,
    Learner,
    Parts,
    PolicySettings,
    Transition,
)
from podracer.agents.continuous.models import ContinuousNetworks
from podracer.devices.kernels import global_norm
from podracer.devices.reductions import global_grad, global_mean
from podracer.fields import bounded, static, struct
from podracer.means import Mean, divide, mean_of
from podracer.ops.distributions import to_bounds
from podracer.types import (
    Carry,
    EnvironmentSpec,
    LearnerState,
    Metrics,
    Params,
    PyTree,
    TimeStep,
)


@struct
class DDPGState(ActorCriticState):
    """Learner state; actor and critics have targets."""

    updates: jax.Array  # i32 [], of the critics


@struct
class DDPG(PolicySettings):
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
    cloning_alpha: float | None = bounded(None)
    """Weight alpha of the action value, over its mean size in the batch, in a policy loss that also
    clones the batch's actions (TD3+BC); 0 clones alone, None maximizes the value alone."""

    def build(self, spec: EnvironmentSpec, context: Context = DEFAULT_CONTEXT) -> Agent:
        return learning.build(self, _DDPG, spec, context, policy_outputs=1)


@dataclasses.dataclass(frozen=True)
class _DDPG:
    settings: DDPG
    networks: ContinuousNetworks
    learner: Learner

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
        return action, (), models.with_last_action(carry, action)

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
            grads, metrics = global_grad(
                partial(self.actor_loss, axis=axis),
                state.params.actor,
                state,
                transition,
                axis=axis,
            )
            state = learner.step(state, Parts(grads, None))
            metrics["actor_gradient_norm"] = global_norm(grads)
            return learner.move_targets(state, state.params), metrics

        state = dataclasses.replace(state, updates=state.updates + 1)
        is_due = state.updates % settings.policy_delay == 0
        state, actor_metrics = learning.update_if(is_due, update_policy, state)
        return state, {**metrics, **actor_metrics}, priorities

    def critic_loss(
        self, critics: tuple[Params, ...], state: DDPGState, transition: Transition, key: jax.Array
    ) -> tuple[Mean, tuple[Metrics, jax.Array]]:
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
    ) -> tuple[Mean, Metrics]:
        """Maximize Q(s, μ(s)) of the first critic, with `cloning_alpha` near the batch's actions.

        The loss is then -λ Q(s, μ(s)) + (μ(s) - a)², where λ is alpha over the mean |Q| of the
        whole batch (Fujimoto and Gu 2021, equations 4 and 5).
        """
        obs, mask = transition.timestep.observation, transition.mask
        action = self.policy(actor, obs)
        q = self.networks.q_values(state.params.critics[:1], obs, action)[0]
        if self.settings.cloning_alpha is None:
            loss = mean_of(-q, mask)
            return loss, {"actor_loss": loss}
        size = global_mean(mean_of(jnp.abs(jax.lax.stop_gradient(q)), mask), axis)
        value_weight = divide(jnp.float32(self.settings.cloning_alpha), size.value)
        error = jnp.mean((action - transition.action) ** 2, axis=-1)
        loss = mean_of(error - value_weight * q, mask)
        return loss, {"actor_loss": loss, "cloning_loss": mean_of(error, mask)}

    def policy(self, params: Params, observation: PyTree) -> jax.Array:
        """Return actions `[N, size]` in [-1, 1]."""
        return jnp.tanh(self.networks.policy(params, observation))


def td3(**settings: Any) -> DDPG:
    """Return DDPG as TD3 (Fujimoto et al. 2018); `settings` override its fields."""
    return DDPG(**{"num_critics": 2, "policy_delay": 2, "target_noise_std": 0.2, **settings})


def td3_bc(**settings: Any) -> DDPG:
    """Return TD3 as TD3+BC (Fujimoto and Gu 2021); `settings` override its fields."""
    return td3(**{"cloning_alpha": 2.5, "normalize_observations": True, **settings})
