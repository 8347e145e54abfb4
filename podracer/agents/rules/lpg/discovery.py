"""LPG: an update rule, learned from many lifetimes of students that it trains.

Each group of environments is the lifetime of one student in one task (`environment.TaskGroups`).
The rule updates the student after each rollout. After K updates the next rollout gives the
meta-objective, the student's policy gradient, which is differentiated through all K updates with
respect to the rule's parameters.
Source: Oh et al. 2020 (arXiv 2007.08794); hyperparameters of Jackson et al. 2023 (2310.02782), the
authors of GROOVE. Differs from GROOVE: the rule is an LSTM, whose forget gates begin without a bias
of 1, instead of a GRU; and meta-gradients also flow through the rule's inputs, the policy and the
prediction of the student, where GROOVE stops them. That is the exact gradient, and costs more.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp

from podracer.agent import DEFAULT_CONTEXT, Agent, Context
from podracer.agents.common.optimizers import ParamsState, take_step
from podracer.agents.rules.lifetimes import Experience, lifetime_means, map_lifetimes, student_spec
from podracer.agents.rules.lpg.rule import (
    Outputs,
    RuleParams,
    UpdateRule,
    build_network,
    student_loss,
    student_optimizer,
    to_outputs,
)
from podracer.agents.rules.lpg.rule_file import encode_rule
from podracer.agents.rules.meta_training import MetaSettings, MetaTraining
from podracer.errors import ConfigError
from podracer.fields import bounded, static, struct
from podracer.ops.distributions import Categorical
from podracer.schedules import Schedule
from podracer.types import EnvironmentSpec, Params, PyTree


@struct
class LPG(MetaSettings):
    """Learned Policy Gradient: discovers an update rule for students with discrete actions."""

    learning_rate: Schedule = bounded(1e-4)
    prediction_cost: float = bounded(0.5)
    """Weight alpha_y of the prediction's loss in a student's loss."""
    policy_target_cost: float = bounded(5e-3)
    """Weight beta_2 of the squared policy targets pi-hat, a penalty in the meta-objective."""
    prediction_target_cost: float = bounded(1e-3)
    """Weight beta_3 of the squared prediction targets y-hat, a penalty in the meta-objective."""
    optimizer: Literal["sgd", "adam"] = static(default="sgd")
    """Optimizer of the students."""
    rule: UpdateRule = static(default=UpdateRule())
    """Network of the update rule."""

    def build(self, spec: EnvironmentSpec, context: Context = DEFAULT_CONTEXT) -> Agent:
        """Return the agent for an environment of lifetimes."""
        task = student_spec(spec, self.inner_updates, context.rollout_length)
        network = build_network(self.network, task, self.rule)
        if jax.tree.leaves(network.carry(1)):
            raise ConfigError("students of LPG need a feed-forward network.")
        optimizer = student_optimizer(self.optimizer)
        training = _LPG(self, spec, context.rollout_length, network, optimizer)
        return training.agent(
            lambda state, origin: encode_rule(self.rule, state.shared.rule, origin)
        )


class _LPG(MetaTraining):
    """Students that the rule trains, one for each lifetime."""

    settings: LPG

    def init_student(self, key: jax.Array) -> ParamsState:
        params = self.network.init(key)
        return ParamsState(params, self.optimizer.init(params))

    def outputs(self, params: Params, observation: PyTree, first: jax.Array) -> Outputs:
        def apply(params: Params, observation: PyTree, first: jax.Array) -> Outputs:
            heads, _ = self.network.apply(params, (), observation, first)
            return to_outputs(observation, heads)

        return map_lifetimes(apply, params, (observation, first))

    def update_students(
        self, rule: RuleParams, students: ParamsState, data: Experience
    ) -> tuple[ParamsState, dict[str, jax.Array]]:
        """Take one step on the loss of equation 3, with targets pi-hat and y-hat of the rule."""
        settings, lifetimes = self.settings, jax.tree.leaves(students.params)[0].shape[0]
        outputs, pullback = jax.vjp(
            lambda params: self.outputs(params, data.observation, data.first), students.params
        )
        # Constants for the student's gradient; meta-gradients go through rule and outputs.
        targets = settings.rule.apply(rule, data, outputs, settings.discount)
        output_grads = jax.grad(student_loss)(outputs, targets, data, settings.prediction_cost)
        (grads,) = pullback(output_grads)
        # The loss is a mean over all lifetimes; each student's own has a gradient L times as large.
        grads = jax.tree.map(lambda g: lifetimes * g, grads)
        prediction_size = jnp.sum(targets.prediction**2, axis=-1)
        step = jax.vmap(partial(take_step, self.optimizer, settings.student_learning_rate))
        return step(students, grads), {
            **self.entropies(outputs, data, lifetimes),
            "policy_target": lifetime_means(data.valid * targets.policy**2, lifetimes),
            "prediction_target": lifetime_means(data.valid * prediction_size, lifetimes),
        }

    def entropies(self, outputs: Outputs, data: Experience, lifetimes: int) -> dict[str, jax.Array]:
        policy, prediction = Categorical(outputs.policy[:-1]), Categorical(outputs.prediction[:-1])
        return {
            "policy_entropy": lifetime_means(data.valid * policy.entropy(), lifetimes),
            "prediction_entropy": lifetime_means(data.valid * prediction.entropy(), lifetimes),
        }
