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

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import optax

from podracer.agent import DEFAULT_CONTEXT, Agent, Context, Rule
from podracer.agents.common.actor_critic import ParamsState
from podracer.agents.common.lifetimes import (
    Experience,
    apply_by_lifetime,
    lifetime_means,
    student_spec,
    task_groups,
)
from podracer.agents.common.meta_training import (
    MetaCosts,
    MetaTraining,
    build_critics,
    descend,
    policy_gradient,
)
from podracer.agents.lpg.figures import draw_targets
from podracer.agents.lpg.rule import (
    Outputs,
    RuleParams,
    UpdateRule,
    build_network,
    student_loss,
    student_optimizer,
    to_outputs,
)
from podracer.agents.lpg.rule_file import encode_rule
from podracer.networks import Network, NetworkBuilder, Table
from podracer.ops.action_masks import mask_logits
from podracer.ops.distributions import Categorical
from podracer.schedules import Schedule
from podracer.types import (
    ConfigError,
    EnvironmentSpec,
    LearnerState,
    Metrics,
    Params,
    PyTree,
    bounded,
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
                targets={
                    "policy_target": self.policy_target_cost,
                    "prediction_target": self.prediction_target_cost,
                },
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
        return training.build(type(self).__name__, spec, Rule(self._export, self._draw))

    def _build_students(self, task: EnvironmentSpec) -> _Students:
        network = build_network(self.network, task, self.rule)
        if jax.tree.leaves(network.carry(1)):
            raise ConfigError("students of LPG need a feed-forward network.")
        return _Students(
            self.rule,
            network,
            student_optimizer(self.optimizer),
            learning_rate=self.student_learning_rate,
            discount=self.discount,
            prediction_cost=self.prediction_cost,
        )

    def _export(self, state: LearnerState, about: Mapping[str, Any]) -> bytes:
        return encode_rule(self.rule, state.shared.rule, about)

    def _draw(self, state: LearnerState, figure: Figure) -> None:
        draw_targets(figure, self.rule, state.shared.rule, self.discount)


@dataclasses.dataclass(frozen=True)
class _Students:
    """Students that the rule trains, one for each lifetime, see `meta_training.Students`."""

    rule: UpdateRule
    network: Network
    optimizer: optax.GradientTransformation
    learning_rate: float | jax.Array
    discount: float | jax.Array
    prediction_cost: float | jax.Array

    def init(self, key: jax.Array) -> ParamsState:
        """Return an untrained student."""
        params = self.network.init(key)
        return ParamsState(params, self.optimizer.init(params))

    def policy(self, params: Params, observation: PyTree, first: jax.Array) -> jax.Array:
        """Return the logits `[T, B, A]` of L policies, each in its own of B environments."""
        heads = apply_by_lifetime(self.network, params, observation, first)
        return mask_logits(observation, heads["policy"])

    def outputs(self, params: Params, data: Experience) -> Outputs:
        """Return each student's outputs on its own timesteps, `[T+1, B, n]`."""
        heads = apply_by_lifetime(self.network, params, data.observation, data.first)
        return to_outputs(data.observation, heads)

    def update(
        self, rule: RuleParams, students: ParamsState, data: Experience
    ) -> tuple[ParamsState, Metrics]:
        """Return the students after one update by the rule, and the rule's regularizers `[L]`."""
        params = students.params
        lifetimes = jax.tree.leaves(params)[0].shape[0]
        outputs, pullback = jax.vjp(partial(self.outputs, data=data), params)
        # Constants for the student's gradient; meta-gradients go through rule and outputs.
        targets = self.rule.apply(rule, data, outputs, self.discount)
        (grads,) = pullback(jax.grad(student_loss)(outputs, targets, data, self.prediction_cost))
        # The loss is a mean over all lifetimes; each student's own has a gradient L times as large.
        grads = jax.tree.map(lambda g: lifetimes * g, grads)
        prediction_size = jnp.sum(targets.prediction**2, axis=-1)
        return descend(self.optimizer, students, grads, self.learning_rate), {
            **_entropies(outputs, data, lifetimes),
            "policy_target": lifetime_means(data.valid * targets.policy**2, lifetimes),
            "prediction_target": lifetime_means(data.valid * prediction_size, lifetimes),
        }

    def policy_objective(
        self, students: ParamsState, data: Experience, advantages: jax.Array
    ) -> tuple[jax.Array, Metrics]:
        """Return the policy-gradient objective and the entropies of each student, `[L]` each."""
        lifetimes = jax.tree.leaves(students.params)[0].shape[0]
        outputs = self.outputs(students.params, data)
        objective = policy_gradient(outputs.policy, data, advantages, lifetimes)
        return objective, _entropies(outputs, data, lifetimes)


def _entropies(outputs: Outputs, data: Experience, lifetimes: int) -> dict[str, jax.Array]:
    """Return mean entropies of policy and prediction over the steps of each lifetime, `[L]`."""
    policy, prediction = Categorical(outputs.policy[:-1]), Categorical(outputs.prediction[:-1])
    return {
        "policy_entropy": lifetime_means(data.valid * policy.entropy(), lifetimes),
        "prediction_entropy": lifetime_means(data.valid * prediction.entropy(), lifetimes),
    }
