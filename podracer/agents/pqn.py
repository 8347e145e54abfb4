"""PQN: Q(λ) on the newest rollout, without replay or target network.

Many environments and a layer-normalized network keep it stable. λ-returns of a rollout, along its
ε-greedy actions (Peng's Q(λ)) and by the values that acting computed, are learned in several epochs
of shuffled minibatches: transitions for feed-forward networks, whole sequences from their stored
recurrent state for recurrent ones. Source: Gallici et al. 2024, algorithm 1 and appendix on
implementation (arXiv 2407.04811), and the settings of its authors' code.

Differences from both: recurrent networks have the targets of the rollout too, where theirs are
computed again for each minibatch; they begin from a stored state instead of a window of four
earlier steps, and do not see the last action; returns bootstrap at a time-out; rewards are not
scaled; weights are initially orthogonal; an observation is divided by 255 only where it has pixels.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from podracer import schedules
from podracer.agent import DEFAULT_CONTEXT, Agent, Context
from podracer.agents.common import epochs, optimizers, value_based
from podracer.agents.common.settings import ClippedSettings, EpochSettings, build_optimizer
from podracer.agents.common.value_based import ActorParams
from podracer.devices.reductions import MaskedMean, mean_of
from podracer.fields import bounded, static, struct
from podracer.networks import MLP, Network, NetworkBuilder, TorsoNetwork
from podracer.ops import returns
from podracer.ops.action_masks import epsilon_greedy, mask_logits
from podracer.schedules import Linear, Schedule
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
class Batch(epochs.Batch):
    """Items to learn from, with λ-returns as their targets."""

    action: jax.Array  # i32


@struct
class PQN(ClippedSettings, EpochSettings):
    """Parallelized Q-network for discrete actions."""

    learning_rate: Schedule = bounded(5e-4)
    trace_lambda: float = bounded(0.65, high=1.0)
    """Trace parameter lambda of the returns, in [0, 1]; 0 gives one-step targets."""
    epsilon: Schedule = bounded(Linear(1.0, 0.05, frames=50_000), high=1.0)
    """Probability epsilon of a random action, in [0, 1]."""
    optimizer: optimizers.OptimizerBuilder = optimizers.Optimizer("radam", epsilon=1e-8)
    num_epochs: int = static(default=2, low=1)
    network: NetworkBuilder = static(default=TorsoNetwork(MLP((128, 128), layer_norm=True)))
    """Network with a value for each action; without layer normalization it may diverge."""

    def build(self, spec: EnvironmentSpec, context: Context = DEFAULT_CONTEXT) -> Agent:
        network = value_based.build_q_network(self.network, spec, 1, dueling=False)
        agent = _PQN(self, network, build_optimizer(self))
        actor_params = value_based.actor_params(self.epsilon)
        return Agent.of(agent, spec, carry=network.carry, actor_params=actor_params)


@dataclasses.dataclass(frozen=True)
class _PQN:
    settings: PQN
    network: Network
    optimizer: optimizers.ScheduledOptimizer

    def init(self, key: jax.Array, num_envs: int) -> LearnerState:
        return LearnerState(self.optimizer.init(self.network.init(key)))

    def act(
        self, params: ActorParams, carry: Carry, timestep: TimeStep, keys: jax.Array, explore: bool
    ) -> tuple[jax.Array, PyTree, Carry]:
        """Choose epsilon-greedy actions; extras are the `value` of the best ones, f32 `[B]`."""
        q, carry = self.action_values(
            params.params, carry, jax.tree.map(lambda x: x[None], timestep)
        )
        epsilon = params.epsilon if explore else jnp.zeros(())
        action = epsilon_greedy(q[0], timestep.observation, keys, epsilon)
        return action, {"value": jnp.max(q[0], axis=-1)}, carry

    def learn(
        self, state: LearnerState, trajectory: Trajectory, key: jax.Array, axis: str | None
    ) -> tuple[LearnerState, Metrics]:
        """Update in `num_epochs` times `num_minibatches` optimizer steps."""
        batch = self.make_batch(state.shared.params, trajectory)
        batch, items = epochs.shuffle(key, batch, self.settings)
        learner, metrics = epochs.fit(
            self.optimizer, self.network, self.loss, state.shared, batch, (items,), axis
        )
        num_frames = schedules.frames_of(batch.valid, metrics["loss"].share, axis)
        return LearnerState(optimizers.with_more_frames(learner, num_frames)), metrics

    def make_batch(self, params: Params, trajectory: Trajectory) -> Batch:
        """Return a rollout `[T, B, ...]` with its λ-returns."""
        settings, steps = self.settings, trajectory.steps
        rewards, discounts, valid = trajectory.transitions(settings.discount)
        final = jax.tree.map(lambda x: x[None], trajectory.final)
        final_q, _ = self.action_values(params, trajectory.final_carry, final)
        values = jnp.concatenate([steps.extras["value"], jnp.max(final_q, axis=-1)])
        target = returns.lambda_returns(
            values[:-1], values[1:], rewards, discounts, valid, settings.trace_lambda
        )
        return Batch(
            observation=steps.timestep.observation,
            first=steps.timestep.first,
            action=steps.action,
            target=target,
            valid=valid.astype(jnp.float32),
            carry=jax.tree.map(lambda x: x[None], trajectory.carry),
        )

    def loss(self, params: Params, batch: Batch) -> tuple[MaskedMean, Metrics]:
        """Return half the mean squared error to the targets."""
        carry = jax.tree.map(lambda x: x[0], batch.carry)
        values, _ = self.action_values(params, carry, batch)
        q = value_based.at_action(values, batch.action)
        loss = mean_of(0.5 * (batch.target - q) ** 2, batch.valid)
        return loss, {"loss": loss, "q": mean_of(q, batch.valid)}

    def action_values(
        self, params: Params, carry: Carry, timesteps: TimeStep | Batch
    ) -> tuple[jax.Array, Carry]:
        """Return action values `[T, B, A]` of timesteps `[T, B, ...]`, and the new memory."""
        heads, carry = self.network.apply(params, carry, timesteps.observation, timesteps.first)
        values = value_based.q_outputs(heads, size=1)[..., 0]
        return mask_logits(timesteps.observation, values), carry
