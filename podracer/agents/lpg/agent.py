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

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import jax

from podracer.agents.common import meta_training, value_based
from podracer.agents.common.meta_objective import MetaCosts
from podracer.agents.common.meta_training import student_spec
from podracer.agents.lpg.figures import draw_targets
from podracer.agents.lpg.rule import UpdateRule, student_heads, student_optimizer
from podracer.agents.lpg.rule_file import encode_rule
from podracer.agents.lpg.students import LPGStudents
from podracer.networks import NetworkBuilder, Table
from podracer.schedules import Schedule
from podracer.types import (
    ConfigError,
    Derived,
    EnvironmentSpec,
    LearnerState,
    bounded,
    derived,
    static,
    struct,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@struct
class LPG:
    """Learned Policy Gradient: discovers an update rule for students with discrete actions."""

    learning_rate: Schedule = bounded(1e-4)
    """Learning rate of the update rule (Adam)."""
    discount: float = bounded(0.99, high=1.0)
    """Discount factor gamma, in [0, 1]."""
    gae_lambda: float = bounded(0.95, high=1.0)
    """Lambda of the generalized advantages in the meta-objective, in [0, 1]."""
    student_learning_rate: float = bounded(40.0)
    """Learning rate of the students."""
    prediction_cost: float = bounded(0.5)
    """Weight alpha_y of the prediction's loss in a student's loss."""
    critic_learning_rate: float = bounded(0.03)
    """Learning rate of the critics (Adam), whose values give the advantages."""
    policy_entropy_cost: float = bounded(0.05)
    """Weight beta_0 of the students' policy entropy in the meta-objective."""
    prediction_entropy_cost: float = bounded(1e-3)
    """Weight beta_1 of the entropy of the students' predictions in the meta-objective."""
    policy_target_cost: float = bounded(5e-3)
    """Weight beta_2 of the squared policy targets pi-hat, a penalty in the meta-objective."""
    prediction_target_cost: float = bounded(1e-3)
    """Weight beta_3 of the squared prediction targets y-hat, a penalty in the meta-objective."""
    max_gradient_norm: float = bounded(0.5, low=1e-6)
    """Largest global norm of the gradient of the update rule; larger ones are scaled down to it."""
    inner_updates: int = static(default=5, low=1)
    """Number K of a student's updates that the meta-gradient goes back through."""
    optimizer: Literal["sgd", "adam"] = static(default="sgd")
    """Optimizer of the students."""
    lifetime_groups: int = static(default=1, low=1)
    """Number of groups of lifetimes that are differentiated in turn: more groups, less memory."""
    recompute: bool = static(default=False)
    """Compute inner activations again in the backward pass: less memory, a third more time."""
    rule: UpdateRule = static(default=UpdateRule())
    """Network of the update rule."""
    network: NetworkBuilder = static(default=Table())
    """Network of the students and of the critics."""
    rollout_length: Derived[int] = derived()
    """Environment steps T before each update of a student, taken from the driver."""
    spec: EnvironmentSpec | None = static(default=None)

    init = meta_training.init
    carry = meta_training.carry
    actor_params = meta_training.actor_params
    act = meta_training.act
    learn = meta_training.learn

    def export(self, state: LearnerState, about: Mapping[str, Any]) -> bytes:
        return encode_rule(self.rule, state.shared.rule, about)

    def draw(self, state: LearnerState, figure: Figure) -> None:
        draw_targets(figure, self.rule, state.shared.rule, self.discount)

    # --- parts -----------------------------------------------------------------------------------

    @property
    def _students(self) -> LPGStudents:
        spec = student_spec(self)
        num_actions = value_based.require_discrete(value_based.require_for_rule(spec)).num_actions
        heads = student_heads(num_actions, self.rule.predictions)
        network = self.network.build(spec.observation, heads)
        if jax.tree.leaves(network.carry(1)):
            raise ConfigError("students of LPG need a feed-forward network.")
        return LPGStudents(
            self.rule,
            network,
            optimizer=student_optimizer(self.optimizer),
            learning_rate=self.student_learning_rate,
            discount=self.discount,
            prediction_cost=self.prediction_cost,
        )

    @property
    def _costs(self) -> MetaCosts:
        return MetaCosts(
            entropies={
                "policy_entropy": self.policy_entropy_cost,
                "prediction_entropy": self.prediction_entropy_cost,
            },
            targets={
                "policy_target": self.policy_target_cost,
                "prediction_target": self.prediction_target_cost,
            },
        )
