"""R2D2: recurrent Q-learning from replayed sequences that start at stored recurrent states.

Source: Kapturowski et al. 2019, "Recurrent Experience Replay in Distributed Reinforcement
Learning". As in Acme's R2D2 the loss is summed over a sequence's timesteps and averaged over
sequences, and the last reward goes through tanh before the network sees it.

Differences from the paper: sequences cross the ends of episodes, where memory and last action are
reset; they start once in a rollout instead of at every 40th timestep; a new one has the largest
priority so far, where their actors compute it; defaults suit small tasks (the paper: a burn-in of
40, an unroll of 80, learning rate 1e-4, target network every 2,500 updates).
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp

from podracer.agent import DEFAULT_CONTEXT, Agent, Context
from podracer.agents.common import recurrent, value_based
from podracer.agents.common.off_policy import TargetNetworkOptimizer, learn_from_replay
from podracer.agents.common.optimizers import Optimizer, OptimizerBuilder
from podracer.agents.common.settings import QLearningSettings, build_optimizer
from podracer.devices.reductions import MaskedMean, mean_of
from podracer.fields import bounded, static, struct
from podracer.networks import MLP, Network, NetworkBuilder, TorsoNetwork
from podracer.ops import returns
from podracer.ops.action_masks import epsilon_greedy, mask_logits
from podracer.ops.transforms import squash, unsquash
from podracer.replay import Buffer, Replay, Sample
from podracer.schedules import Schedule
from podracer.types import (
    EnvironmentSpec,
    LearnerState,
    Metrics,
    Params,
    PyTree,
    TimeStep,
    Trajectory,
)


@struct
class R2D2Carry:
    """Recurrent state of each environment, `[B, ...]`."""

    memory: PyTree  # recurrent state of the network
    last_action: jax.Array  # i32 [B], 0 before the first one
    rank: jax.Array  # f32 [B], of the environment, see `value_based.environment_ranks`


@struct
class R2D2(QLearningSettings):
    """Recurrent double Q-learning for discrete actions."""

    learning_rate: Schedule = bounded(5e-4)
    discount: float = bounded(0.997, high=1.0)
    epsilon: Schedule = bounded(0.4, high=1.0)
    apex_alpha: float = bounded(7.0)
    max_gradient_norm: float = bounded(40.0, low=1e-6)
    optimizer: OptimizerBuilder = Optimizer(epsilon=1e-3)
    priority_eta: float = static(
        default=recurrent.PRIORITY_ETA, low=0.0, high=1.0
    )  # static, so that 1 - eta is computed in float64
    """Weight eta, in [0, 1], of a sequence's largest TD error in its priority, against the mean."""
    burn_in_length: int = static(default=20, low=0)
    """Timesteps of a sequence that only refresh the stored recurrent state."""
    unroll_length: int = static(default=20, low=1)
    """Timesteps of a sequence, after the burn-in, whose action values are learned; sequences begin
    where rollouts do, so a longer rollout would leave timesteps out."""
    n_step: int = static(default=5, low=1)
    rescale_values: bool = static(default=True)
    """Learn values on the scale h of `ops/transforms.py`, for rewards that are not clipped."""
    action_reward_inputs: bool = static(default=True)
    """Whether last action, one-hot, and last reward are inputs of the recurrent layer too."""
    replay: Replay = static(
        default=Replay(
            batch_size=64, prioritized=True, priority_exponent=0.9, importance_exponent=0.6
        )
    )
    network: NetworkBuilder = static(
        default=TorsoNetwork(MLP(hidden=(64,)), memory="lstm", memory_size=64)
    )
    """Recurrent network of the action values, without its heads."""

    def build(self, spec: EnvironmentSpec, context: Context = DEFAULT_CONTEXT) -> Agent:
        num_actions, inputs = value_based.require_discrete(spec).num_actions, spec
        if self.action_reward_inputs:
            observation = recurrent.last_step_spec(spec.observation, num_actions)
            inputs = dataclasses.replace(spec, observation=observation)
        length = self.burn_in_length + self.unroll_length + self.n_step
        agent = _R2D2(
            self,
            num_actions,
            value_based.build_q_network(self.network, inputs, 1, dueling=True),
            self.replay.build(spec, length, context.rollout_length, every_step=True),
            TargetNetworkOptimizer(build_optimizer(self), self.target_update_period),
        )
        actor_params = value_based.actor_params(self.epsilon)
        return Agent.of(agent, spec, actor_params=actor_params)


@dataclasses.dataclass(frozen=True)
class _R2D2:
    settings: R2D2
    num_actions: int
    network: Network
    buffer: Buffer
    optimizer: TargetNetworkOptimizer

    def init(self, key: jax.Array, num_envs: int) -> LearnerState:
        state = self.optimizer.init(self.network.init(key))
        stored = recurrent.stored_spec(stored_carry(self.carry(1)))
        return LearnerState(state, self.buffer.init(num_envs, carry=stored))

    def carry(self, num_envs: int) -> R2D2Carry:
        last_action = jnp.zeros(num_envs, jnp.int32)
        ranks = value_based.environment_ranks(num_envs)
        return R2D2Carry(self.network.carry(num_envs), last_action, ranks)

    def act(
        self,
        params: value_based.ActorParams,
        carry: R2D2Carry,
        timestep: TimeStep,
        keys: jax.Array,
        explore: bool,
    ) -> tuple[jax.Array, PyTree, R2D2Carry]:
        timesteps = jax.tree.map(lambda x: x[None], timestep)
        q, memory = self.q_values(params.params, carry.memory, timesteps, carry.last_action[None])
        epsilon = value_based.apex_epsilon(params.epsilon, self.settings.apex_alpha, carry.rank)
        epsilon = epsilon if explore else jnp.zeros(())
        action = epsilon_greedy(q[0], timestep.observation, keys, epsilon)
        return action, (), R2D2Carry(memory, action, carry.rank)

    def learn(
        self, state: LearnerState, trajectory: Trajectory, key: jax.Array, axis: str | None
    ) -> tuple[LearnerState, Metrics]:
        recurrent.check_rollout(self.buffer.stride, trajectory)
        update = partial(self.optimizer.update, self.loss, axis)
        carry = stored_carry(trajectory.carry)
        return learn_from_replay(self.buffer, update, state, trajectory, key, axis, carry)

    def loss(
        self, params: Params, target_params: Params, sample: Sample, key: jax.Array
    ) -> tuple[MaskedMean, tuple[Metrics, jax.Array]]:
        """Return the sum over a sequence of the halved squared errors, a mean over sequences.

        It is the loss of sequences without the timesteps that are not valid.
        """
        del key
        settings, trajectory = self.settings, sample.trajectory
        q = self.unroll(params, trajectory)
        target_q = self.unroll(target_params, trajectory)
        next_values = value_based.at_action(target_q, jnp.argmax(q, axis=-1))
        next_values = unsquash(next_values) if settings.rescale_values else next_values

        rewards, discounts, valid = trajectory.transitions(settings.discount)
        start = settings.burn_in_length
        targets = returns.n_step_targets(
            next_values, rewards[start:], discounts[start:], valid[start:], settings.n_step
        )
        targets = squash(targets) if settings.rescale_values else targets

        learned = slice(start, start + settings.unroll_length)
        action = trajectory.steps.action[learned]
        predictions = value_based.at_action(q[: settings.unroll_length], action)
        mask = valid[learned].astype(jnp.float32)
        td_error = mask * (jax.lax.stop_gradient(targets) - predictions)
        losses = jnp.sum(0.5 * td_error**2, axis=0)
        loss = MaskedMean(jnp.mean(sample.weights * losses), jnp.mean(mask))

        size = jax.lax.stop_gradient(jnp.abs(td_error))
        priorities = recurrent.sequence_priorities(size, mask, settings.priority_eta)
        return loss, ({"loss": loss, "q": mean_of(predictions, mask)}, priorities)

    def unroll(self, params: Params, trajectory: Trajectory) -> jax.Array:
        """Return action values `[unroll + n, N, A]` after the burn-in, which gets no gradient."""
        memory, last_action = trajectory.carry
        last_actions = jnp.concatenate([last_action[None], trajectory.steps.action])
        inputs = (trajectory.timesteps(), last_actions)
        q_values = partial(self.q_values, params)
        return recurrent.unroll(q_values, memory, inputs, self.settings.burn_in_length)

    def q_values(
        self, params: Params, memory: PyTree, timesteps: TimeStep, last_actions: jax.Array
    ) -> tuple[jax.Array, PyTree]:
        """Return action values `[T, B, A]` of timesteps `[T, B, ...]`, and the last memory.

        `last_actions`, i32 `[T, B]`, are those that led to the timesteps.
        """
        observation = timesteps.observation
        if self.settings.action_reward_inputs:
            one_hot = jax.nn.one_hot(last_actions, self.num_actions)
            observation = recurrent.with_last_step(observation, timesteps, one_hot)
        heads, memory = self.network.apply(params, memory, observation, timesteps.first)
        values = value_based.q_outputs(heads, size=1)[..., 0]
        return mask_logits(timesteps.observation, values), memory


def stored_carry(carry: R2D2Carry) -> tuple[PyTree, jax.Array]:
    """Return what the replay keeps of a carry: memory and last action."""
    return carry.memory, carry.last_action
