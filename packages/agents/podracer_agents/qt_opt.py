"""QT-Opt: an action value that is maximized by the cross-entropy method, without a policy network.

Source: Kalashnikov et al. 2018 (arXiv 1806.10293). Different from the paper: values are regressed
with squared errors and are not confined to [0, 1]; targets take the smallest value of two critics
that follow by Polyak averaging, as in TD3 (Fujimoto et al. 2018), not of an averaged and a lagged
copy of one; exploration is Gaussian noise, as in `DDPG`, whose defaults these are.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp

from podracer.agent import DEFAULT_CONTEXT, Agent, Context
from podracer.agents.common import off_policy
from podracer.agents.common.normalization import normalize_observation
from podracer.agents.common.optimizers import global_norm
from podracer.agents.continuous import learning, models
from podracer.agents.continuous.learning import (
    ActorCriticState,
    ActorParams,
    ContinuousSettings,
    Learner,
    Parts,
    Transition,
)
from podracer.agents.continuous.models import CriticNetworks
from podracer.devices.reductions import MaskedMean, global_grad
from podracer.fields import bounded, static, struct
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
class QTOpt(ContinuousSettings):
    """Q-learning for continuous actions, by the cross-entropy method."""

    action_noise_std: float = bounded(0.1)
    """Standard deviation sigma of the exploration noise, in halves of the action range."""
    num_samples: int = static(default=64, low=2)
    """Number of actions that each iteration of the cross-entropy method samples."""
    elite_fraction: float = static(default=0.1, low=0.0, high=1.0)
    """Fraction of the samples, the best ones, that the distribution is fitted to, in [0, 1]."""
    num_iterations: int = static(default=2, low=1)
    """Number of iterations of the cross-entropy method."""

    def build(self, spec: EnvironmentSpec, context: Context = DEFAULT_CONTEXT) -> Agent:
        networks = models.build_critics(self.network, spec, self.return_distribution)
        off_policy.require_feed_forward(networks.critic)
        buffer = self.replay.build(spec, self.n_step + 1)
        learner = Learner(self, networks, buffer, learning.build_optimizer(self))
        agent = _QTOpt(self, networks, learner)
        return Agent(
            spec=spec,
            init=agent.init,
            act=agent.act,
            learn=partial(learner.learn, agent.update),
            actor_params=agent.actor_params,
        )


@dataclasses.dataclass(frozen=True)
class _QTOpt:
    settings: QTOpt
    networks: CriticNetworks
    learner: Learner

    def init(self, key: jax.Array, num_envs: int) -> LearnerState:
        # Agents with a policy split the key, too, and initialize their critics with the second.
        critics = self.networks.init_critics(jax.random.split(key)[1], self.settings.num_critics)
        return self.learner.init(Parts((), critics), critics, num_envs)

    def actor_params(self, state: LearnerState) -> ActorParams:
        """Return the first critic's parameters."""
        shared: ActorCriticState = state.shared
        return ActorParams(shared.params.critics[0], shared.obs_moments, shared.frames)

    def act(
        self, params: ActorParams, carry: Carry, timestep: TimeStep, keys: jax.Array, explore: bool
    ) -> tuple[jax.Array, PyTree, Carry]:
        """Choose actions of nearly the largest value, with noise to explore."""
        settings = self.settings
        observation = normalize_observation(params.obs_moments, timestep).observation
        if explore:
            action = jax.vmap(self.best_action, (None, 0, 0))(params.actor, observation, keys)
            action = learning.with_noise(action, keys, settings.action_noise_std)
            action = learning.random_at_start(action, keys, params.frames, settings.random_frames)
        else:  # the best action ignores its key
            best_action = jax.vmap(self.best_action, (None, 0, None))
            action = best_action(params.actor, observation, jax.random.key(0))
        return to_bounds(self.networks.space, action), (), carry

    def update(
        self, state: ActorCriticState, transition: Transition, key: jax.Array, axis: str | None
    ) -> tuple[ActorCriticState, Metrics, jax.Array]:
        """Update the critics, then the targets."""
        grads, (metrics, priorities) = global_grad(
            self.critic_loss, state.params.critics, state, transition, key, axis=axis
        )
        state = self.learner.step(state, Parts(None, grads))
        state = self.learner.move_targets(state, state.params.critics)
        return state, {**metrics, "gradient_norm": global_norm(grads)}, priorities

    def critic_loss(
        self,
        critics: tuple[Params, ...],
        state: ActorCriticState,
        transition: Transition,
        key: jax.Array,
    ) -> tuple[MaskedMean, tuple[Metrics, jax.Array]]:
        """Regress to r + gamma min Q'(s', a'), where a' maximizes the first Q'(s', a')."""
        next_obs, networks = transition.next_timestep.observation, self.networks
        keys = jax.random.split(key, transition.mask.shape)
        best_action = jax.vmap(self.best_action, (None, 0, 0))
        next_action = best_action(state.target_params[0], next_obs, keys)
        next_outputs = networks.q_outputs(state.target_params, next_obs, next_action)
        return networks.loss(critics, next_outputs, transition)

    def best_action(self, critic: Params, observation: PyTree, key: jax.Array) -> jax.Array:
        """Return an action `[size]` in [-1, 1] of nearly the largest value for an observation.

        Each iteration samples a Gaussian, clipped to the bounds, and fits the next one to its best
        samples, at least two; the first has mean 0 and scale 1. The action is the best sample of
        the last iteration.
        """
        settings, networks = self.settings, self.networks
        shape = settings.num_samples, networks.space.size
        num_elites = max(2, round(settings.elite_fraction * settings.num_samples))
        observations = jax.tree.map(
            lambda x: jnp.broadcast_to(x, (settings.num_samples, *x.shape)), observation
        )
        elites = mean = jnp.zeros((1, networks.space.size))
        std = jnp.ones_like(mean)
        for i in range(settings.num_iterations):
            # Acting draws with the key itself and with 1 folded into it.
            noise = jax.random.normal(jax.random.fold_in(key, 2 + i), shape)
            samples = jnp.clip(mean + std * noise, -1.0, 1.0)
            q = networks.q_values((critic,), observations, samples)[0]
            elites = samples[jax.lax.top_k(q, num_elites)[1]]  # the best one first
            mean = jnp.mean(elites, axis=0, keepdims=True)
            std = jnp.std(elites, axis=0, keepdims=True)
        return elites[0]
