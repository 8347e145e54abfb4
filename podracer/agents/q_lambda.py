"""Greedy Q(λ): the agent of the published Anakin notebook (Hessel et al. 2021, section 3).

It acts greedily in its action values, without exploration and without a target network; the loss is
the mean squared error to λ-returns that bootstrap from the best action. Its loss is a function of
the outputs of `act`, so Anakin can run it as the paper's fused unit.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from podracer.agent import DEFAULT_CONTEXT, Agent, Context, Fused
from podracer.agents.common import value_based
from podracer.agents.common.optimizers import Optimizer, OptimizerBuilder, ScheduledOptimizer
from podracer.agents.common.settings import LearnerSettings
from podracer.devices.reductions import MaskedMean, mean_of
from podracer.fields import bounded, static, struct
from podracer.networks import MLP, Head, NetworkBuilder, TorsoNetwork
from podracer.ops import returns
from podracer.ops.action_masks import mask_logits
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
class QLambda(LearnerSettings):
    """Greedy Q(λ) for discrete actions."""

    learning_rate: Schedule = bounded(1e-4)
    discount: float = bounded(1.0, high=1.0)
    trace_lambda: float = bounded(0.99, high=1.0)
    """Trace parameter lambda of the returns, in [0, 1]; 0 gives one-step targets."""
    optimizer: OptimizerBuilder = Optimizer(epsilon=1e-8)
    """Optimizer of the parameters."""
    network: NetworkBuilder = static(default=TorsoNetwork(MLP(hidden=(256,))))
    """Network with a value for each action."""

    def build(self, spec: EnvironmentSpec, context: Context = DEFAULT_CONTEXT) -> Agent:
        num_actions = value_based.require_discrete(spec).num_actions
        network = self.network.build(spec.observation, {"q": Head(num_actions)})
        optimizer = ScheduledOptimizer(self.optimizer.build(), self.learning_rate)

        def init(key: jax.Array, num_envs: int) -> LearnerState:
            return LearnerState(optimizer.init(network.init(key)))

        def action_values(
            params: Params, carry: Carry, timesteps: TimeStep
        ) -> tuple[jax.Array, Carry]:
            """Return action values `[T, B, A]` of timesteps `[T, B]`, and the new memory."""
            outputs, carry = network.apply(params, carry, timesteps.observation, timesteps.first)
            return mask_logits(timesteps.observation, outputs["q"]), carry

        def act(
            params: Params, carry: Carry, timestep: TimeStep, keys: jax.Array, explore: bool
        ) -> tuple[jax.Array, PyTree, Carry]:
            """Choose the best action, whether or not to explore; extras are the values `q`."""
            q, carry = action_values(params, carry, jax.tree.map(lambda x: x[None], timestep))
            return jnp.argmax(q[0], axis=-1).astype(jnp.int32), {"q": q[0]}, carry

        def loss(
            params: Params, state: LearnerState, trajectory: Trajectory, reuse: bool
        ) -> tuple[MaskedMean, Metrics]:
            """Return the mean squared error to the λ-returns, see `Fused.loss`."""
            if reuse:
                final = jax.tree.map(lambda x: x[None], trajectory.final)
                q_final, _ = action_values(params, trajectory.final_carry, final)
                q = trajectory.steps.extras["q"]
            else:
                q, _ = action_values(params, trajectory.carry, trajectory.timesteps())
                q, q_final = q[:-1], q[-1:]
            q_tm1 = value_based.at_action(q, trajectory.steps.action)
            v = jnp.concatenate([jnp.max(q, axis=-1), jnp.max(q_final, axis=-1)])
            v = jax.lax.stop_gradient(v)
            rewards, discounts, valid = trajectory.transitions(self.discount)
            # Acting is greedy, so the value of a state is that of the action taken there.
            targets = returns.lambda_returns(
                v[:-1], v[1:], rewards, discounts, valid, self.trace_lambda
            )
            error = mean_of((targets - q_tm1) ** 2, valid)
            return error, {"loss": error, "q": mean_of(q_tm1, valid)}

        learn = Fused(loss, optimizer.apply_gradients)
        return Agent(spec=spec, init=init, act=act, learn=learn, carry=network.carry)
