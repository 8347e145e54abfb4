"""IMPALA: an actor-critic that corrects for acting with older parameters, by V-trace.

Source: Espeholt et al. 2018 (arXiv 1802.01561), section 4.2. The defaults are those of its table
G.1: the loss here is a mean, there a sum over 32 x 20 = 640 steps, so the largest gradient norm 40
and RMSProp's epsilon 0.01 are divided by 640. Differs from the paper as TorchBeast and Cleanba do:
RMSProp's epsilon stands outside of the root, and its mean squares begin at 0 instead of 1.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from podracer import schedules
from podracer.agent import DEFAULT_CONTEXT, Agent, Context
from podracer.agents.common import actor_critic
from podracer.agents.common.actor_critic import ActorCritic
from podracer.agents.common.optimizers import CountedState
from podracer.agents.common.settings import VtraceSettings, build_optimizer
from podracer.devices.reductions import MaskedMean, global_grad, mean_of
from podracer.fields import struct
from podracer.ops import returns
from podracer.types import EnvironmentSpec, LearnerState, Metrics, Params, Trajectory


@struct
class Impala(VtraceSettings):
    """V-trace actor-critic for discrete or continuous actions."""

    def build(self, spec: EnvironmentSpec, context: Context = DEFAULT_CONTEXT) -> Agent:
        model, optimizer = actor_critic.build(self, spec), build_optimizer(self)

        def init(key: jax.Array, num_envs: int) -> LearnerState:
            return LearnerState(optimizer.init(model.network.init(key)))

        def learn(
            state: LearnerState, trajectory: Trajectory, key: jax.Array, axis: str | None
        ) -> tuple[LearnerState, Metrics]:
            """Update once from the rollout, which older parameters may have acted in."""
            learner: CountedState = state.shared

            def loss(params: Params) -> tuple[MaskedMean, Metrics]:
                return self.loss(model, params, trajectory, learner.frames)

            grads, metrics = global_grad(loss, learner.params, axis=axis)
            num_frames = schedules.count_frames(trajectory, axis)
            state, update_metrics = optimizer.apply_gradients(state, grads, num_frames)
            return state, {**metrics, **update_metrics}

        act = model.act_with_log_prob
        return Agent.of(model, spec, init=init, act=act, learn=learn, groups=model.groups)

    def loss(
        self, model: ActorCritic, params: Params, trajectory: Trajectory, frames: jax.Array
    ) -> tuple[MaskedMean, Metrics]:
        """Return V-trace's actor-critic loss, and metrics.

        `frames` (uint32 scalar) is the frame counter that schedules are evaluated at.
        """
        policy, values = model.unroll(params, trajectory)
        behavior = trajectory.steps.extras
        log_prob = policy.log_prob(behavior["sample"])
        ratio = jnp.exp(log_prob - behavior["log_prob"])
        baseline, ratio = jax.lax.stop_gradient((values, ratio))
        rewards, discounts, valid = trajectory.transitions(self.discount)
        corrected = returns.vtrace(
            baseline[:-1],
            baseline[1:],
            rewards,
            discounts,
            valid,
            ratio,
            lambda_=self.trace_lambda,
            clip_rho=self.clip_rho,
            clip_c=self.clip_c,
            clip_pg_rho=self.clip_rho,
        )
        loss, metrics = actor_critic.loss(
            log_prob,
            policy.entropy(),
            values[:-1],
            targets=corrected.targets,
            advantages=corrected.advantages,
            valid=valid,
            value_cost=self.value_cost,
            entropy_cost=schedules.value_at(self.entropy_cost, frames),
        )
        return loss, {**metrics, "importance_ratio": mean_of(ratio, valid)}
