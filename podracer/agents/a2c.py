"""A2C: policy gradient with a learned value function, one update for each rollout.

Its loss is a function of the outputs of `act`, so Anakin can run it as the paper's fused unit.
Sources: Mnih et al. 2016 (arXiv 1602.01783); advantages of Schulman et al. 2016 (arXiv 1506.02438).
Differs from the paper: updates are synchronous, the optimizer is Adam at a constant rate instead of
RMSProp at one that falls to 0 (both are settings), and the advantages are generalized; with
`gae_lambda` 1 they are the paper's n-step ones.
"""

from __future__ import annotations

import jax

from podracer import schedules
from podracer.agent import DEFAULT_CONTEXT, Agent, Context, Fused
from podracer.agents.common import actor_critic
from podracer.agents.common.optimizers import Optimizer, OptimizerBuilder
from podracer.agents.common.settings import ActorCriticSettings, build_optimizer
from podracer.devices.reductions import MaskedMean
from podracer.fields import bounded, struct
from podracer.ops import returns
from podracer.schedules import Schedule
from podracer.types import EnvironmentSpec, LearnerState, Metrics, Params, Trajectory


@struct
class A2C(ActorCriticSettings):
    """Advantage actor-critic for discrete or continuous actions."""

    learning_rate: Schedule = bounded(7e-4)
    gae_lambda: float = bounded(0.95, high=1.0)
    """Parameter lambda of generalized advantage estimation, in [0, 1]; 0 gives one-step errors."""
    max_gradient_norm: float = bounded(0.5, low=1e-6)
    optimizer: OptimizerBuilder = Optimizer()

    def build(self, spec: EnvironmentSpec, context: Context = DEFAULT_CONTEXT) -> Agent:
        model, optimizer = actor_critic.build(self, spec), build_optimizer(self)

        def init(key: jax.Array, num_envs: int) -> LearnerState:
            return LearnerState(optimizer.init(model.network.init(key)))

        def loss(
            params: Params, state: LearnerState, trajectory: Trajectory, reuse: bool
        ) -> tuple[MaskedMean, Metrics]:
            """Return the actor-critic loss with generalized advantages, see `Fused.loss`."""
            policy, values = model.unroll(params, trajectory, reuse)
            baseline = jax.lax.stop_gradient(values)
            rewards, discounts, valid = trajectory.transitions(self.discount)
            advantages = returns.generalized_advantages(
                baseline[:-1], baseline[1:], rewards, discounts, valid, self.gae_lambda
            )
            return actor_critic.loss(
                policy.log_prob(trajectory.steps.extras["sample"]),
                policy.entropy(),
                values[:-1],
                targets=baseline[:-1] + advantages,
                advantages=advantages,
                valid=valid,
                value_cost=self.value_cost,
                entropy_cost=schedules.value_at(self.entropy_cost, state.shared.frames),
            )

        learn = Fused(loss, optimizer.apply_gradients)
        return Agent.of(model, spec, init=init, learn=learn, groups=model.groups)
