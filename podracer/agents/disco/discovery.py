"""DiscoDiscovery: a rule with the inputs and outputs of Disco103, learned from many lifetimes.

Each group of environments is the lifetime of one student in one task (`environment.TaskGroups`).
The rule updates the students after each rollout; after K updates the next rollout gives the
meta-objective, a policy gradient with the advantages of critics of its own, which is differentiated
through all K updates with respect to the rule (`common/meta_training.py`, as LPG is learned).
Source: Oh et al. 2025, "Discovering state-of-the-art reinforcement learning algorithms" (Nature),
methods, and the published notebook of meta-training.

Differs from both: students have no replay; meta-gradients also flow through what the rule reads of
policies and values, and through the students' Adam, where the published code stops them; the raw
outputs of the rule have no penalty of their own; entropies count after each update of a student,
not in the next rollout alone; that is as long as the others, its advantages are standardized by
themselves and not by moving averages; critics learn by TD(lambda) instead of V-trace; one Adam for
the rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax

from podracer.agent import DEFAULT_CONTEXT, Agent, Context, Rule
from podracer.agents.common.lifetimes import student_spec, task_groups
from podracer.agents.common.meta_training import MetaCosts, MetaTraining, build_critics
from podracer.agents.disco.figures import draw_targets
from podracer.agents.disco.network import build_network
from podracer.agents.disco.new_rule import RuleSize
from podracer.agents.disco.rule_file import encode_rule
from podracer.agents.disco.students import DiscoStudents, build_optimizer
from podracer.networks import NetworkBuilder, Table
from podracer.ops.transforms import evenly_spaced
from podracer.schedules import Schedule
from podracer.types import (
    ConfigError,
    EnvironmentSpec,
    LearnerState,
    bounded,
    static,
    struct,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@struct
class DiscoDiscovery:
    """Discovers a rule of DiscoRL's structure for students with discrete actions."""

    learning_rate: Schedule = bounded(1e-3)
    """Learning rate of the update rule (Adam)."""
    discount: float = bounded(0.99, high=1.0)
    """Discount factor gamma of students and critics, in [0, 1]."""
    gae_lambda: float = bounded(0.95, high=1.0)
    """Lambda of the generalized advantages in the meta-objective, in [0, 1]."""
    trace_lambda: float = bounded(0.95, high=1.0)
    """Parameter lambda of the students' Retrace, in [0, 1]."""
    student_learning_rate: float = bounded(0.05)
    """Learning rate of the students (Adam)."""
    value_cost: float = bounded(0.2)
    """Weight of the action values' loss in a student's loss."""
    critic_learning_rate: float = bounded(0.03)
    """Learning rate of the critics (Adam), whose values give the advantages."""
    policy_entropy_cost: float = bounded(0.01)
    """Weight of the students' policy entropy in the meta-objective."""
    prediction_entropy_cost: float = bounded(1e-3)
    """Weight of the entropies of the students' predictions y and z in the meta-objective."""
    target_divergence_cost: float = bounded(1e-2)
    """Weight of the divergence of the policy's targets from the policy of the target parameters, a
    penalty in the meta-objective."""
    max_gradient_norm: float = bounded(0.5, low=1e-6)
    """Largest global norm of the gradient of the update rule; larger ones are scaled down to it."""
    inner_updates: int = static(default=5, low=1)
    """Number K of a student's updates that the meta-gradient goes back through."""
    lifetime_groups: int = static(default=1, low=1)
    """Number of groups of lifetimes that are differentiated in turn: more groups, less memory."""
    recompute: bool = static(default=False)
    """Compute inner activations again in the backward pass: less memory, a third more time."""
    rule: RuleSize = static(default=RuleSize())
    """Size of the update rule."""
    support_max: float = static(default=3.0, low=1e-6)
    """Largest value of the students after the transform h(x); 3 means 15."""
    support_size: int = static(default=31, low=2)
    """Number of the students' atoms for values, from minus to plus the support's largest value."""
    model_size: int = static(default=16, low=1)
    """Units of the students' model, and of the hidden layer of each of its outputs."""
    network: NetworkBuilder = static(default=Table())
    """Network of the students, before their model, and of the critics."""

    def build(self, spec: EnvironmentSpec, context: Context = DEFAULT_CONTEXT) -> Agent:
        """Return the agent for an environment of lifetimes."""
        groups = task_groups(spec, self.inner_updates, context.rollout_length)
        task = student_spec(spec)
        training = MetaTraining(
            rule=self.rule,
            students=self._build_students(task),
            critics=build_critics(
                self.network,
                task,
                learning_rate=self.critic_learning_rate,
                discount=self.discount,
                gae_lambda=self.gae_lambda,
            ),
            costs=MetaCosts(
                entropies={
                    "policy_entropy": self.policy_entropy_cost,
                    "prediction_entropy": self.prediction_entropy_cost,
                },
                targets={"target_divergence": self.target_divergence_cost},
            ),
            groups=groups,
            observation=task.observation,
            learning_rate=self.learning_rate,
            max_gradient_norm=self.max_gradient_norm,
            inner_updates=self.inner_updates,
            rollout_length=context.rollout_length,
            lifetime_groups=self.lifetime_groups,
            recompute=self.recompute,
        )
        return training.build(type(self).__name__, spec, Rule(_export, self._draw))

    def _build_students(self, task: EnvironmentSpec) -> DiscoStudents:
        network = build_network(
            self.network,
            task,
            predictions=self.rule.predictions,
            support_size=self.support_size,
            model_size=self.model_size,
        )
        if jax.tree.leaves(network.torso.carry(1)):
            raise ConfigError("students of a rule that is discovered need a feed-forward network.")
        return DiscoStudents(
            network,
            # Adam's step has a derivative of up to 1e4 with this constant within its root. With
            # 1e-12 gradients near 0, as of states that are seldom seen, decided the meta-gradient.
            build_optimizer(root_epsilon=1e-8),
            evenly_spaced(-self.support_max, self.support_max, self.support_size),
            learning_rate=self.student_learning_rate,
            discount=self.discount,
            trace_lambda=self.trace_lambda,
            value_cost=self.value_cost,
            memory_units=self.rule.lifetime_units,
        )

    def _draw(self, state: LearnerState, figure: Figure) -> None:
        draw_targets(figure, state.shared.rule, self.discount, self.trace_lambda)


def _export(state: LearnerState, about: Mapping[str, Any]) -> bytes:
    """Return the rule in the published format, which has no place for `about`."""
    return encode_rule(state.shared.rule)
