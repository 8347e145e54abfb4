"""DQN and its extensions, each as a setting; many together are Rainbow.

Sources: DQN: Mnih et al. 2015; double: van Hasselt et al. 2016 (arXiv 1509.06461); dueling: Wang et
al. 2016 (arXiv 1511.06581); prioritized replay: Schaul et al. 2016 (arXiv 1511.05952); noisy
networks: Fortunato et al. 2018 (arXiv 1706.10295); distributions: see `ops/action_values.py`;
Rainbow: Hessel et al. 2018 (arXiv 1710.02298); one epsilon for each environment: Horgan et al. 2018
(arXiv 1803.00933).

Differences from the papers: Adam instead of Mnih's RMSProp; the norm of the mean loss's gradient is
clipped at 10, as by Wang et al. and in DQN Zoo's Rainbow, besides Mnih's clipping of TD errors (the
Huber loss). Each environment and timestep acts with noise of its own, an update has one noise for
each of its three passes, evaluations have none. Priorities of C51 are cross-entropies, as in DQN
Zoo, not KL divergences. Defaults suit small tasks; the recipes `atari_dqn`, whose target network is
Dopamine's, and `atari_rainbow` have the papers' sizes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from podracer.agent import DEFAULT_CONTEXT, Agent, Context
from podracer.agents.common import off_policy, value_based
from podracer.agents.common.off_policy import TargetNetworkOptimizer
from podracer.agents.common.optimizers import Optimizer
from podracer.agents.common.settings import QLearningSettings, build_optimizer
from podracer.devices.reductions import MaskedMean, mean_of
from podracer.fields import bounded, static, struct
from podracer.networks import MLP, Network, NetworkBuilder, TorsoNetwork
from podracer.ops import action_values
from podracer.ops.action_masks import epsilon_greedy, mask_logits
from podracer.replay import Buffer, Replay, Sample
from podracer.schedules import Linear, Schedule
from podracer.types import EnvironmentSpec, LearnerState, Metrics, Params, TimeStep, Trajectory


@struct
class DQNCarry:
    """State of an epsilon-greedy actor in each environment, `[B, ...]`."""

    rank: jax.Array  # f32 [B], see `value_based.environment_ranks`


@struct
class DQN(QLearningSettings):
    """Deep Q-network for discrete actions; see `rainbow` for all extensions together."""

    learning_rate: Schedule = bounded(2.5e-4)
    double: bool = static(default=True)
    """Double Q-learning: the online network selects the next action, not the target network."""
    dueling: bool = static(default=False)
    """Dueling network: separate streams for the state's value and the actions' advantages."""
    stream_hidden: tuple[int, ...] = static(default=(), low=1)
    """Sizes of the hidden layers of each stream, between the network and its outputs."""
    noisy: bool = static(default=False)
    """Noisy layers in the streams, which explore by themselves: set epsilon to 0."""
    noise_scale: float = static(default=0.5, low=0.0)
    """Initial scale sigma_0 of the noise, over the square root of a layer's inputs, at least 0."""
    value: action_values.ActionValue = static(default=action_values.Mean())
    """Kind of action value: its mean, by the Huber loss or squared errors, a categorical
    distribution (C51) or quantiles (QR-DQN)."""
    network: NetworkBuilder = static(default=TorsoNetwork(MLP(hidden=(128, 128))))
    """Network of the action values, without its heads."""

    def build(self, spec: EnvironmentSpec, context: Context = DEFAULT_CONTEXT) -> Agent:
        return build(self, Method, spec)


def build(settings: DQN, method: Callable[..., Method], spec: EnvironmentSpec) -> Agent:
    """Return an agent with the functions `init`, `act` and `learn` of a method."""
    network = value_based.build_q_network(
        settings.network,
        spec,
        settings.value.size,
        dueling=settings.dueling,
        noisy=settings.noisy,
        noise_scale=settings.noise_scale,
        hidden=settings.stream_hidden,
    )
    agent = method(
        settings,
        off_policy.require_feed_forward(network),
        settings.replay.build(spec, settings.n_step + 1),
        TargetNetworkOptimizer(build_optimizer(settings), settings.target_update_period),
    )
    actor_params = value_based.actor_params(settings.epsilon)
    return Agent.of(agent, spec, actor_params=actor_params)


@dataclasses.dataclass(frozen=True)
class Method:
    """Functions of an agent, to subclass where its targets or its loss differ."""

    settings: DQN
    network: Network
    buffer: Buffer
    optimizer: TargetNetworkOptimizer

    def init(self, key: jax.Array, num_envs: int) -> LearnerState:
        state = self.optimizer.init(self.network.init(key))
        return LearnerState(state, self.buffer.init(num_envs))

    def carry(self, num_envs: int) -> DQNCarry:
        """Return the ranks of environments: `act` does not know which are in its batch."""
        return DQNCarry(value_based.environment_ranks(num_envs))

    def act(
        self,
        params: value_based.ActorParams,
        carry: DQNCarry,
        timestep: TimeStep,
        keys: jax.Array,
        explore: bool,
    ) -> tuple[jax.Array, tuple[()], DQNCarry]:
        settings = self.settings
        fold_in = jax.vmap(jax.random.fold_in, (0, None))
        noise = fold_in(keys, 1) if settings.noisy and explore else None
        q = settings.value.mean(self.outputs(params.params, timestep, noise))
        epsilon = value_based.apex_epsilon(params.epsilon, settings.apex_alpha, carry.rank)
        epsilon = epsilon if explore else jnp.zeros(())
        return epsilon_greedy(q, timestep.observation, keys, epsilon), (), carry

    def learn(
        self, state: LearnerState, trajectory: Trajectory, key: jax.Array, axis: str | None
    ) -> tuple[LearnerState, Metrics]:
        update = partial(self.optimizer.update, self.loss, axis)
        return off_policy.learn_from_replay(self.buffer, update, state, trajectory, key, axis)

    def loss(
        self, params: Params, target_params: Params, sample: Sample, key: jax.Array
    ) -> tuple[MaskedMean, tuple[Metrics, jax.Array]]:
        """Return the mean loss of TD errors from G + γ Q'(s', a'), metrics and priorities `[N]`."""
        settings, value = self.settings, self.settings.value
        transition = off_policy.n_step_transition(sample, settings.discount)
        # One noise for all samples (Fortunato et al. 2018, section 3.1).
        noise, *noises = jax.random.split(key, (3, 1)) if settings.noisy else [None] * 3
        outputs = self.outputs(params, transition.timestep, noise)
        prediction = value_based.gather_action(outputs, transition.action)
        targets = self.targets(params, target_params, transition, noises)
        returns, next_values = jax.lax.stop_gradient(targets)
        discounts = transition.bootstrap_discount
        losses, priorities = value.loss(prediction, next_values, returns, discounts)
        loss = mean_of(transition.weight * losses, transition.mask)
        metrics = {"loss": loss, "q": mean_of(value.mean(prediction), transition.mask)}
        return loss, (metrics, jax.lax.stop_gradient(transition.mask * priorities))

    def targets(
        self,
        params: Params,
        target_params: Params,
        transition: off_policy.Transition,
        noises: Sequence[jax.Array | None],
    ) -> tuple[jax.Array, jax.Array]:
        """Return the returns G `[N]`, and the outputs `[N, Z]` of the values Q'(s', a').

        `noises` are keys `[1]` for the target network, and for the online one that selects a'.
        """
        target_noise, online_noise = noises
        next_timestep = transition.next_timestep
        target = self.outputs(target_params, next_timestep, target_noise)
        double = self.settings.double
        online = self.outputs(params, next_timestep, online_noise) if double else target
        next_q = mask_logits(next_timestep.observation, self.settings.value.mean(online))
        next_action = jnp.argmax(next_q, axis=-1)
        return transition.n_step_return, value_based.gather_action(target, next_action)

    def outputs(self, params: Params, timestep: TimeStep, noise: jax.Array | None) -> jax.Array:
        """Return the network's outputs `[N, A, Z]` for timesteps `[N, ...]`."""
        inputs = (timestep.observation, timestep.first, noise)
        observation, first, noise = jax.tree.map(lambda x: x[None], inputs)
        arguments = {} if noise is None else {"noise": noise}
        heads, _ = self.network.apply(params, (), observation, first, **arguments)
        return value_based.q_outputs(heads, self.settings.value.size)[0]


def rainbow(**settings: Any) -> DQN:
    """Return DQN with all its extensions (Hessel et al. 2018); `settings` override its fields.

    Learning rate, target network, sizes of layers and the range of returns suit small tasks;
    `atari_rainbow` has the paper's.
    """
    extensions = {
        "epsilon": 0.0,
        "n_step": 3,
        "dueling": True,
        "stream_hidden": (128,),
        "noisy": True,
        "value": action_values.Atoms(),
        "optimizer": Optimizer(epsilon=1.5e-4),
        "replay": Replay(
            prioritized=True,
            priority_exponent=0.5,
            importance_exponent=Linear(0.4, 1.0, frames=50_000_000),
        ),
        "network": TorsoNetwork(MLP(hidden=(128,))),
    }
    return DQN(**{**extensions, **settings})
