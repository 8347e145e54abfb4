"""Behavior cloning: the policy of an actor-critic, fitted to the actions of a data set.

It maximizes the likelihood of the actions, for any network and any actions: of recurrent networks
over whole rollouts, from the state that the episode before them has led to. A continuous action at
a bound has the likelihood of all samples that are clipped to it. Where the data set has the
distributions of a teacher it minimizes the divergence from them instead: distillation. Network and
optimizer are PPO's and A2C's, so that these can start from its weights; the value is not learned.
Source: Pomerleau 1988, "ALVINN"; Bain and Sammut 1995, "A Framework for Behavioural Cloning"; Tobin
1958, "Estimation of Relationships for Limited Dependent Variables"; Rusu et al. 2016, "Policy
Distillation" (arXiv 1511.06295).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from podracer.agent import DEFAULT_CONTEXT, Agent, Context, Fused
from podracer.agents.common import actor_critic
from podracer.agents.common.actor_critic import ActorCritic
from podracer.agents.common.optimizers import ScheduledOptimizer
from podracer.agents.common.settings import ClippedSettings, GaussianSettings, build_optimizer
from podracer.devices.reductions import MaskedMean, mean_of
from podracer.fields import bounded, static, struct
from podracer.networks import MLP, NetworkBuilder, TorsoNetwork
from podracer.ops import distributions
from podracer.ops.distributions import Normal, from_bounds
from podracer.schedules import Schedule
from podracer.types import EnvironmentSpec, LearnerState, Metrics, Params, Trajectory
from podracer_offline.likelihood import clipped_log_prob
from podracer_offline.records import Record, as_recorded, require_records, without_records


@struct
class Cloning(ClippedSettings, GaussianSettings):
    """Behavior cloning of discrete or continuous actions."""

    learning_rate: Schedule = bounded(1e-3)
    max_gradient_norm: float = bounded(0.5, low=1e-6)
    network: NetworkBuilder = static(default=TorsoNetwork(MLP((64, 64), "tanh"), shared=False))

    def build(self, spec: EnvironmentSpec, context: Context = DEFAULT_CONTEXT) -> Agent:
        """Return the agent for an environment."""
        return as_recorded(self.method_for(require_records(spec, "Cloning")).agent, spec)

    def method_for(self, spec: EnvironmentSpec) -> Method:
        """Return the functions of a clone for the environment that records come from."""
        std = self.state_dependent_std
        network = actor_critic.build_network(self.network, spec, state_dependent_std=std)
        return Method(spec, ActorCritic(network, spec.action), build_optimizer(self))


@dataclasses.dataclass(frozen=True)
class Method:
    """Functions of an agent that learns recorded actions, or distributions."""

    spec: EnvironmentSpec
    model: ActorCritic
    optimizer: ScheduledOptimizer

    @property
    def agent(self) -> Agent:
        """Agent that acts by itself, and whose loss sees the records."""
        return Agent(
            spec=self.spec,
            init=self.init,
            act=self.model.act,
            learn=Fused(self.loss, self.optimizer.apply_gradients),
            carry=self.model.network.carry,
            distribution=self.model.distribution,
        )

    def init(self, key: jax.Array, num_envs: int) -> LearnerState:
        return LearnerState(self.optimizer.init(self.model.network.init(key)))

    def loss(
        self, params: Params, state: LearnerState, trajectory: Trajectory, reuse: bool
    ) -> tuple[MaskedMean, Metrics]:
        """Return -E[log π(a|s)], or E[KL(teacher || π)], of the valid steps, see `Fused.loss`.

        Metrics compare the policy's modes with the actions, or with the teacher's modes.
        """
        records: Record = trajectory.steps.timestep.observation
        trajectory = without_records(trajectory)
        policy, _ = self.model.unroll(params, trajectory, reuse)
        action, valid = from_bounds(self.model.space, records.action), trajectory.valid()
        loss = -clipped_log_prob(policy, action)
        if records.distribution is not None:
            teacher: Any = distributions.policy(self.model.space, records.distribution)
            loss, action = teacher.divergence(policy), teacher.mode()
        if isinstance(policy, Normal):
            mode, action = (jnp.clip(x, -1.0, 1.0) for x in (policy.mode(), action))
            fit = {"squared_error": mean_of(jnp.sum((mode - action) ** 2, axis=-1), valid)}
        else:
            matches = (policy.mode() == action).reshape(*valid.shape, -1).all(axis=-1)
            fit = {"accuracy": mean_of(matches, valid)}
        total = mean_of(loss, valid)
        return total, {"loss": total, "entropy": mean_of(policy.entropy(), valid), **fit}
