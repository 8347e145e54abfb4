"""QT-Opt: an action value that is maximized by the cross-entropy method, without a policy network.

Source: Kalashnikov et al. 2018 (arXiv 1806.10293). Different from the paper: values are regressed
with squared errors and are not confined to [0, 1]; targets take the smallest value of two critics
that follow by Polyak averaging, as in TD3 (Fujimoto et al. 2018), not of an averaged and a lagged
copy of one; exploration is Gaussian noise, as in `DDPG`, whose defaults these are.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax

from podracer.agent import DEFAULT_CONTEXT, Agent, Context
from podracer.agents.common import off_policy
from podracer.agents.common.normalization import normalize_observation
from podracer.agents.common.optimizers import Optimizer, OptimizerBuilder
from podracer.agents.continuous import learning, models
from podracer.agents.continuous.learning import (
    ActorCriticState,
    ActorParams,
    Learner,
    Parts,
    Transition,
)
from podracer.agents.continuous.models import CriticNetworks, ReturnDistribution
from podracer.devices.reductions import global_grad
from podracer.fields import bounded, static, struct
from podracer.means import Mean
from podracer.networks import MLP, NetworkBuilder, TorsoNetwork
from podracer.ops.distributions import to_bounds
from podracer.replay import Buffer, Replay
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
class QTOpt:
    """Q-learning for continuous actions, by the cross-entropy method."""

    learning_rate: Schedule = bounded(3e-4)
    """Learning rate of the optimizer."""
    discount: float = bounded(0.99, high=1.0)
    """Discount factor gamma, in [0, 1]."""
    target_update_rate: float = bounded(0.005, high=1.0)
    """Rate tau, in [0, 1], at which the target critics follow the critics in each update."""
    action_noise_std: float = bounded(0.1)
    """Standard deviation sigma of the exploration noise, in halves of the action range."""
    optimizer: OptimizerBuilder = Optimizer(epsilon=1e-8)
    """Optimizer of the parameters."""
    weight_decay: float = static(default=0.0, low=0.0)
    """Decoupled weight decay of matrices, times the learning rate (AdamW); biases do not decay."""
    num_critics: int = static(default=2, low=1)
    """Number of critics; targets use the smallest of their values, actions maximize the first."""
    return_distribution: ReturnDistribution | None = static(default=None)
    """Distribution of returns that the critics learn, categorical (C51) or quantiles; None for its
    mean alone."""
    num_samples: int = static(default=64, low=2)
    """Number of actions that each iteration of the cross-entropy method samples."""
    elite_fraction: float = static(default=0.1, low=0.0, high=1.0)
    """Fraction of the samples, the best ones, that the distribution is fitted to, in [0, 1]."""
    num_iterations: int = static(default=2, low=1)
    """Number of iterations of the cross-entropy method."""
    n_step: int = static(default=1, low=1)
    """Rewards n in a return before it bootstraps."""
    random_frames: int = static(default=5_000, low=0)
    """Frames with uniformly random actions at the start of training."""
    normalize_observations: bool = static(default=False)
    """Normalize observations by their running mean and variance."""
    replay: Replay = static(default=Replay(1_000_000, warmup=5_000))
    """Replay buffer."""
    network: NetworkBuilder = static(default=TorsoNetwork(MLP(hidden=(256, 256))))
    """Network of each critic, without its head."""

    def build(self, spec: EnvironmentSpec, context: Context = DEFAULT_CONTEXT) -> Agent:
        """Return the agent for an environment."""
        networks = models.build_critics(self.network, spec, self.return_distribution)
        off_policy.require_feed_forward(networks.critic)
        buffer = Buffer(self.replay, spec, self.n_step + 1)
        optimizer = learning.build_optimizer(self.optimizer, self.weight_decay, self.learning_rate)
        learner = Learner(
            networks, buffer, optimizer, self.discount, self.n_step, self.normalize_observations
        )
        agent = _QTOpt(self, networks, learner)
        return Agent(
            spec=spec,
            init=agent.init,
            act=agent.act,
            learn=agent.learn,
            actor_params=agent.actor_params,
            warmup=self.replay.warmup,
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

    def learn(
        self, state: LearnerState, trajectory: Trajectory, key: jax.Array, axis: str | None
    ) -> tuple[LearnerState, Metrics]:
        return self.learner.learn(self.update, state, trajectory, key, axis)

    def update(
        self, state: ActorCriticState, transition: Transition, key: jax.Array, axis: str | None
    ) -> tuple[ActorCriticState, Metrics, jax.Array]:
        """Update the critics, then the targets."""
        grads, (metrics, priorities) = global_grad(
            self.critic_loss, state.params.critics, state, transition, key, axis=axis
        )
        state = self.learner.step(state, Parts(None, grads))
        target_params = optax.incremental_update(
            state.params.critics, state.target_params, self.settings.target_update_rate
        )
        state = dataclasses.replace(state, target_params=target_params)
        return state, {**metrics, "gradient_norm": optax.tree.norm(grads)}, priorities

    def critic_loss(
        self,
        critics: tuple[Params, ...],
        state: ActorCriticState,
        transition: Transition,
        key: jax.Array,
    ) -> tuple[Mean, tuple[Metrics, jax.Array]]:
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
