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

from podracer import schedules
from podracer.agents.common import actor_critic, value_based
from podracer.agents.common.optimizers import take_step
from podracer.agents.lpg.figures import draw_targets
from podracer.agents.lpg.lifetimes import lifetime_experience, num_lifetimes, task_groups
from podracer.agents.lpg.objective import MetaObjective
from podracer.agents.lpg.rule import UpdateRule, student_heads, student_optimizer
from podracer.agents.lpg.rule_file import encode_rule
from podracer.agents.lpg.state import (
    LifetimeStates,
    MetaBatch,
    RuleState,
    empty_window,
    group_by_lifetime,
)
from podracer.agents.lpg.students import Students, apply_by_lifetime
from podracer.environment import TaskGroups
from podracer.mesh import global_mean
from podracer.networks import Head, NetworkBuilder, Table
from podracer.ops.distributions import Categorical
from podracer.schedules import Schedule
from podracer.types import (
    Carry,
    ConfigError,
    Derived,
    EnvironmentSpec,
    LearnerState,
    Metrics,
    Params,
    PyTree,
    TimeStep,
    Trajectory,
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
    max_gradient_norm: float = bounded(0.5)
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

    def init(self, key: jax.Array, num_envs: int) -> LearnerState:
        groups = self._task_groups
        assert self.rollout_length is not None, "or the line above would have raised"
        lifetimes = num_lifetimes(groups, num_envs, self.lifetime_groups)
        rule: Params = self.rule.init(jax.random.fold_in(key, 0))
        keys = jax.random.split(jax.random.fold_in(key, 1), lifetimes)
        students, critics = self._students.init(keys)
        names = ("loss", "gradient_norm", *self._reward_names)
        metrics = {name: jnp.float32(0) for name in names}
        optimizer_state = self._rule_optimizer.init(rule)
        frames = schedules.init_frames()
        shared = RuleState(rule, optimizer_state, frames, jnp.int32(0), metrics)
        local = LifetimeStates(
            students,
            critics,
            initial_students=jax.tree.map(jnp.copy, students),
            window=empty_window(
                self._observation_spec, (lifetimes, self.inner_updates), self.rollout_length,
                groups.num_envs,
            ),
            lifetime=jnp.zeros(lifetimes, jnp.int32),
            is_whole=jnp.ones(lifetimes, bool),
        )  # fmt: skip
        return LearnerState(shared, local)

    def carry(self, num_envs: int) -> Carry:
        return ()

    def actor_params(self, state: LearnerState) -> Params:
        return state.local.students.params

    def act(
        self, params: Params, carry: Carry, timestep: TimeStep, keys: jax.Array, explore: bool
    ) -> tuple[jax.Array, PyTree, Carry]:
        observation = timestep.observation["observation"]
        time_major = jax.tree.map(lambda x: x[None], observation)
        network = self._students.network
        heads = apply_by_lifetime(network, params, time_major, timestep.first[None])
        policy = Categorical(actor_critic.mask_logits(observation, heads["policy"][0]))
        return policy.sample(keys) if explore else policy.mode(), (), carry

    def learn(
        self, state: LearnerState, trajectory: Trajectory, key: jax.Array, axis: str | None
    ) -> tuple[LearnerState, Metrics]:
        shared, local, students = state.shared, state.local, self._students
        groups = self._task_groups
        data, lifetime, task = lifetime_experience(trajectory, groups, self.rollout_length)
        is_new = lifetime != local.lifetime
        # A window across two lifetimes does not show the effect of the rule's updates.
        is_whole = local.is_whole & ~is_new
        critics, advantages = students.update_critics(local.critics, data)
        rollout = group_by_lifetime(data, groups.num_envs)
        advantages = group_by_lifetime(advantages, groups.num_envs)

        is_full = shared.num_rollouts == self.inner_updates
        shared = jax.lax.cond(
            is_full,
            partial(self._update_rule, axis=axis),
            lambda shared, _: shared,
            shared,
            MetaBatch(local.initial_students, local.window, rollout, advantages, is_whole, task),
        )
        index = jnp.where(is_full, 0, shared.num_rollouts)
        updated, regularizers = students.update(shared.rule, local.students, data)
        updated, critics = students.reset_where(is_new, (updated, critics), key)
        initial = jax.lax.cond(is_full, lambda: local.students, lambda: local.initial_students)
        local = LifetimeStates(
            updated,
            critics,
            initial_students=initial,
            window=jax.tree.map(lambda w, x: w.at[:, index].set(x), local.window, rollout),
            lifetime=lifetime,
            is_whole=jnp.where(is_full, ~is_new, is_whole),
        )
        metrics = {**shared.metrics, **{name: jnp.mean(x) for name, x in regularizers.items()}}
        frames = schedules.add_frames(shared.frames, schedules.frames_of(trajectory, axis))
        shared = dataclasses.replace(shared, num_rollouts=index + 1, frames=frames)
        return LearnerState(shared, local), metrics

    def export(self, state: LearnerState, about: Mapping[str, Any]) -> bytes:
        return encode_rule(self.rule, state.shared.rule, about)

    def draw(self, state: LearnerState, figure: Figure) -> None:
        draw_targets(figure, self.rule, state.shared.rule, self.discount)

    def _update_rule(self, shared: RuleState, batch: MetaBatch, axis: str | None) -> RuleState:
        """One step of the rule on the meta-gradient of all lifetimes."""
        gradients = self._objective.grad_in_groups(shared.rule, batch, self.lifetime_groups)
        grads, loss, rewards = global_mean(gradients, axis)
        rate = schedules.value_at(self.learning_rate, shared.frames)
        rule, optimizer_state = take_step(
            self._rule_optimizer, shared.rule, shared.optimizer_state, grads, rate
        )
        metrics = {"loss": loss, "gradient_norm": optax.tree.norm(grads)}
        for name, total, count in zip(self._reward_names, *rewards, strict=True):
            mean = total / jnp.maximum(count, 1e-8)
            metrics[name] = jnp.where(count > 0, mean, shared.metrics[name])
        return dataclasses.replace(
            shared, rule=rule, optimizer_state=optimizer_state, metrics=metrics
        )

    # --- parts -----------------------------------------------------------------------------------

    @property
    def _task_groups(self) -> TaskGroups:
        return task_groups(self.spec, self.inner_updates, self.rollout_length)

    @property
    def _reward_names(self) -> list[str]:
        return [f"reward_{task}" for task in self._task_groups.tasks]

    @property
    def _observation_spec(self) -> PyTree:
        return actor_critic.require_spec(self.spec).observation["observation"]

    @property
    def _students(self) -> Students:
        num_actions = value_based.require_discrete(self.spec).num_actions
        heads = student_heads(num_actions, self.rule.predictions)
        network = self.network.build(self._observation_spec, heads)
        if network.carry(1) != ():
            raise ConfigError("students of LPG need a feed-forward network.")
        return Students(
            self.rule,
            network,
            critic=self.network.build(self._observation_spec, {"value": Head(1)}),
            optimizer=student_optimizer(self.optimizer),
            critic_optimizer=optax.scale_by_adam(),
            learning_rate=self.student_learning_rate,
            critic_learning_rate=self.critic_learning_rate,
            discount=self.discount,
            gae_lambda=self.gae_lambda,
            prediction_cost=self.prediction_cost,
        )

    @property
    def _objective(self) -> MetaObjective:
        return MetaObjective(
            self._students,
            len(self._task_groups.tasks),
            self.policy_entropy_cost,
            self.prediction_entropy_cost,
            self.policy_target_cost,
            self.prediction_target_cost,
            self.recompute,
        )

    @property
    def _rule_optimizer(self) -> optax.GradientTransformation:
        return optax.chain(optax.clip_by_global_norm(self.max_gradient_norm), optax.scale_by_adam())
