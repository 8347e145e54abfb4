"""DQN and its extensions, each as a setting; all of them together are Rainbow.

Sources: DQN: Mnih et al. 2015; double: van Hasselt et al. 2016 (arXiv 1509.06461); dueling: Wang et
al. 2016 (arXiv 1511.06581); prioritized replay: Schaul et al. 2016 (arXiv 1511.05952); noisy
networks: Fortunato et al. 2018 (arXiv 1706.10295); distributions: see `ops/action_values.py`;
Rainbow: Hessel et al. 2018 (arXiv 1710.02298); one epsilon for each environment: Horgan et al. 2018
(arXiv 1803.00933).
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from podracer.agents.common import actor_critic, off_policy, value_based
from podracer.networks import MLP, Network, NetworkBuilder, TorsoNetwork
from podracer.ops.action_values import ActionValue, Atoms, Mean
from podracer.replay import Buffer, Replay, Sample
from podracer.types import (
    Carry,
    EnvironmentSpec,
    LearnerState,
    Metrics,
    Params,
    PyTree,
    TimeStep,
    Trajectory,
    bounded,
    static,
    struct,
)


@struct
class DQNState(off_policy.TargetNetworkState):
    """Learner state: network, target network, optimizer, and how far exploration has decayed."""

    exploration_progress: jax.Array  # f32 [], from 0 to 1


@struct
class DQN:
    """Deep Q-network for discrete actions; see `rainbow` for all extensions together."""

    learning_rate: float = bounded(2.5e-4)
    """Learning rate of Adam."""
    discount: float = bounded(0.99, high=1.0)
    """Discount factor gamma, in [0, 1]."""
    epsilon: float = bounded(0.01, high=1.0)
    """Probability epsilon of a random action after the decay, in [0, 1]."""
    apex_alpha: float = bounded(0.0)
    """Spread alpha of epsilon: environment i of B takes epsilon ** (1 + alpha * i / (B - 1))."""
    max_gradient_norm: float = bounded(10.0)
    """Largest global norm of the gradient; larger ones are scaled down to it."""
    epsilon_decay_frames: int = static(default=50_000, low=0)
    """Frames over which the probability of a random action falls from 1 to epsilon; 0: no decay."""
    target_update_period: int = static(default=250, low=1)
    """Number of updates between copies of the parameters to the target network."""
    n_step: int = static(default=1, low=1)
    """Rewards n in a return before it bootstraps."""
    double: bool = static(default=True)
    """Double Q-learning: the online network selects the next action, not the target network."""
    dueling: bool = static(default=False)
    """Dueling network: separate streams for the state's value and the actions' advantages."""
    stream_hidden: tuple[int, ...] = static(default=(), low=1)
    """Sizes of the hidden layers of each stream, between the network and its outputs."""
    noisy: bool = static(default=False)
    """Noisy layers in the streams, which explore by themselves: set epsilon to 0."""
    value: ActionValue = static(default=Mean())
    """Kind of action value: its mean, a categorical distribution (C51) or quantiles (QR-DQN)."""
    replay: Replay = static(default=Replay())
    """Replay buffer."""
    network: NetworkBuilder = static(default=TorsoNetwork(MLP(hidden=(128, 128))))
    """Network of the action values, without its heads."""
    spec: EnvironmentSpec | None = static(default=None)

    def init(self, key: jax.Array, num_envs: int) -> LearnerState:
        params = self._network.init(key)
        state = DQNState(
            params=params,
            target_params=jax.tree.map(jnp.copy, params),
            optimizer_state=self._optimizer.init(params),
            updates=jnp.int32(0),
            exploration_progress=jnp.float32(0.0 if self.epsilon_decay_frames else 1.0),
        )
        return LearnerState(state, self._buffer.init(num_envs))

    def carry(self, num_envs: int) -> Carry:
        # `act` does not know which environments are in its batch; the carry stays with each one.
        return value_based.epsilon_exponents(self.apex_alpha, num_envs)

    def actor_params(self, state: LearnerState) -> value_based.ActorParams:
        learner: DQNState = state.shared
        epsilon = value_based.linear_epsilon(self.epsilon, learner.exploration_progress)
        return value_based.ActorParams(learner.params, epsilon)

    def act(
        self,
        params: value_based.ActorParams,
        carry: Carry,
        timestep: TimeStep,
        keys: jax.Array,
        explore: bool,
    ) -> tuple[jax.Array, PyTree, Carry]:
        noise = value_based.noise_keys(keys) if self.noisy and explore else None
        q = self.value.mean(self._outputs(params.params, timestep, noise))
        q = actor_critic.mask_logits(timestep.observation, q)
        epsilon = params.epsilon**carry if explore else jnp.zeros(())
        return value_based.epsilon_greedy(q, keys, epsilon), (), carry

    def learn(
        self, state: LearnerState, trajectory: Trajectory, key: jax.Array, axis: str | None
    ) -> tuple[LearnerState, Metrics]:
        learner: DQNState = state.shared
        progress = off_policy.advance_exploration(
            learner.exploration_progress, trajectory, self.epsilon_decay_frames, axis
        )
        learner = dataclasses.replace(learner, exploration_progress=progress)
        update = partial(
            off_policy.update_with_target_network,
            loss=self._loss,
            optimizer=self._optimizer,
            target_update_period=self.target_update_period,
            axis=axis,
        )
        state = LearnerState(learner, state.local)
        return off_policy.learn_from_replay(self._buffer, update, state, trajectory, key, axis)

    def _loss(
        self, params: Params, target_params: Params, sample: Sample, key: jax.Array
    ) -> tuple[jax.Array, tuple[Metrics, jax.Array]]:
        transition = off_policy.n_step_transition(sample, self.discount)
        next_timestep = transition.next_timestep
        # One noise for all samples, as in Fortunato et al. 2018, section 3.1.
        noise = jax.random.split(key, (3, 1)) if self.noisy else (None, None, None)
        outputs = self._outputs(params, transition.timestep, noise[0])
        target_outputs = self._outputs(target_params, next_timestep, noise[1])

        # The online network selects the next action, the target network evaluates it.
        selector = self._outputs(params, next_timestep, noise[2]) if self.double else target_outputs
        next_q = actor_critic.mask_logits(next_timestep.observation, self.value.mean(selector))
        next_action = jnp.argmax(next_q, axis=-1)

        prediction = value_based.gather_action(outputs, transition.action)
        bootstrap = value_based.gather_action(target_outputs, next_action)
        losses, priorities = self.value.loss(
            prediction,
            jax.lax.stop_gradient(bootstrap),
            transition.n_step_return,
            transition.bootstrap_discount,
        )
        loss = jnp.mean(transition.mask * transition.weight * losses)
        metrics = {"loss": loss, "q": jnp.mean(self.value.mean(prediction))}
        return loss, (metrics, jax.lax.stop_gradient(transition.mask * priorities))

    def _outputs(self, params: Params, timestep: TimeStep, noise: jax.Array | None) -> jax.Array:
        """Return the network's outputs `[N, A, Z]` for timesteps `[N, ...]`."""
        timestep = jax.tree.map(lambda x: x[None], timestep)
        noise_args = () if noise is None else (noise[None],)
        heads, _ = self._network.apply(
            params, (), timestep.observation, timestep.first, *noise_args
        )
        return value_based.q_outputs(heads, self.value.size)[0]

    @property
    def _network(self) -> Network:
        return off_policy.require_feed_forward(
            value_based.build_q_network(
                self.network,
                self.spec,
                self.value.size,
                dueling=self.dueling,
                noisy=self.noisy,
                hidden=self.stream_hidden,
            )
        )

    @property
    def _buffer(self) -> Buffer:
        return off_policy.make_buffer(self.replay, self.spec, self.n_step)

    @property
    def _optimizer(self) -> optax.GradientTransformation:
        return optax.chain(
            optax.clip_by_global_norm(self.max_gradient_norm),
            optax.adam(self.learning_rate, eps=1e-5),
        )


def rainbow(**settings: Any) -> DQN:
    """Return DQN with all its extensions (Hessel et al. 2018); `settings` override its fields."""
    extensions = {
        "epsilon": 0.0,
        "epsilon_decay_frames": 0,
        "n_step": 3,
        "dueling": True,
        "noisy": True,
        "value": Atoms(),
        "replay": Replay(prioritized=True, priority_exponent=0.5),
    }
    return DQN(**{**extensions, **settings})
