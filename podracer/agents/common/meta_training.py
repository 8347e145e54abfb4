"""Meta-training: a rule learns from L lifetimes of students, whose last K rollouts are kept.

The rule updates the students after each rollout. After K updates the next rollout gives the
meta-objective, which is differentiated through all K updates with respect to the rule.
The agents that learn rules differ in their rule, its students (`meta_objective.Students`) and the
weights of its regularizers.

Functions whose first parameter is `agent` also serve as methods:

    class LPG:
        init = meta_training.init
        act = meta_training.act
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

from podracer import schedules
from podracer.agent import NeedsRolloutLength, require_rollout_length, require_spec
from podracer.agents.common.actor_critic import ParamsState
from podracer.agents.common.critics import Critics
from podracer.agents.common.lifetimes import (
    Experience,
    empty_window,
    group_by_lifetime,
    lifetime_experience,
    num_lifetimes,
    task_groups,
)
from podracer.agents.common.meta_objective import MetaBatch, MetaCosts, MetaObjective, Students
from podracer.agents.common.optimizers import take_step
from podracer.environment import TaskGroups
from podracer.means import with_share
from podracer.mesh import global_mean
from podracer.networks import Head, NetworkBuilder
from podracer.ops.distributions import Categorical
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
    struct,
)


class RuleLearner(NeedsRolloutLength, Protocol):
    """Agent that learns a rule, the attributes that the functions below use."""

    @property
    def learning_rate(self) -> Schedule: ...

    @property
    def max_gradient_norm(self) -> float: ...

    @property
    def critic_learning_rate(self) -> float: ...

    @property
    def discount(self) -> float: ...

    @property
    def gae_lambda(self) -> float: ...

    @property
    def inner_updates(self) -> int: ...

    @property
    def lifetime_groups(self) -> int: ...

    @property
    def recompute(self) -> bool: ...

    @property
    def rule(self) -> Any: ...  # with a function `init(key)`

    @property
    def network(self) -> NetworkBuilder: ...

    @property
    def spec(self) -> EnvironmentSpec | None: ...

    @property
    def _students(self) -> Students: ...

    @property
    def _costs(self) -> MetaCosts: ...


def student_spec(agent: RuleLearner) -> EnvironmentSpec:
    """Return what a student sees of the environment: one task."""
    spec = require_spec(agent.spec)
    observation = spec.observation["observation"]
    return dataclasses.replace(spec, observation=observation, extension=None)


def build(agent: RuleLearner) -> MetaTraining:
    """Return the training of an agent's rule, or raise `ConfigError` if nothing teaches it one."""
    rollout_length = require_rollout_length(agent)
    groups = task_groups(agent.spec, agent.inner_updates, rollout_length)
    observation = student_spec(agent).observation
    critics = Critics(
        agent.network.build(observation, {"value": Head(1)}),
        optax.scale_by_adam(),
        learning_rate=agent.critic_learning_rate,
        discount=agent.discount,
        gae_lambda=agent.gae_lambda,
    )
    return MetaTraining(
        critics,
        MetaObjective(agent._students, len(groups.tasks), agent._costs, agent.recompute),
        groups,
        observation,
        learning_rate=agent.learning_rate,
        max_gradient_norm=agent.max_gradient_norm,
        inner_updates=agent.inner_updates,
        rollout_length=rollout_length,
        lifetime_groups=agent.lifetime_groups,
    )


def init(agent: RuleLearner, key: jax.Array, num_envs: int) -> LearnerState:
    """Return the state before the first update."""
    training = build(agent)
    rule: Params = agent.rule.init(jax.random.fold_in(key, 0))
    return training.init(jax.random.fold_in(key, 1), num_envs, rule)


def carry(agent: RuleLearner, num_envs: int) -> Carry:
    """Return the recurrent state of the students, who have none."""
    return ()


def actor_params(agent: RuleLearner, state: LearnerState) -> Params:
    """Return the parameters of the students."""
    return state.local.students.params


def act(
    agent: RuleLearner,
    params: Params,
    carry: Carry,
    timestep: TimeStep,
    keys: jax.Array,
    explore: bool,
) -> tuple[jax.Array, PyTree, Carry]:
    """Choose actions `[B]`, each student in its own environments."""
    observation = timestep.observation["observation"]
    time_major = jax.tree.map(lambda x: x[None], observation)
    policy = Categorical(agent._students.policy(params, time_major, timestep.first[None])[0])
    return policy.sample(keys) if explore else policy.mode(), (), carry


def learn(
    agent: RuleLearner,
    state: LearnerState,
    trajectory: Trajectory,
    key: jax.Array,
    axis: str | None,
) -> tuple[LearnerState, Metrics]:
    """Update the students, and the rule where the window is full."""
    return build(agent).learn(state, trajectory, key, axis)


@struct
class RuleState:
    """State of the update rule, the same on all devices."""

    rule: Params
    optimizer_state: optax.OptState
    frames: jax.Array  # uint32 [], of all lifetimes, see `schedules`
    num_rollouts: jax.Array  # i32, rollouts in the window, at most K
    metrics: Metrics  # of the last update of the rule


@struct
class LifetimeStates:
    """State of L lifetimes, leaves `[L, ...]`."""

    students: Any  # with an attribute `params`
    critics: ParamsState
    initial_students: Any  # before the first update of the window
    window: Experience  # the rollouts of the last updates, [L, K, T, E, ...]
    lifetime: jax.Array  # i32 [L], number of each lifetime within its group of environments
    is_whole: jax.Array  # bool [L], whether the window lies within one lifetime


@dataclasses.dataclass(frozen=True)
class MetaTraining:
    """Functions of an agent that learns a rule."""

    critics: Critics
    objective: MetaObjective
    groups: TaskGroups
    observation_spec: PyTree
    learning_rate: Schedule
    max_gradient_norm: float | jax.Array
    inner_updates: int
    rollout_length: int
    lifetime_groups: int

    def init(self, key: jax.Array, num_envs: int, rule: Params) -> LearnerState:
        """Return the state before the first update of a rule."""
        lifetimes = num_lifetimes(self.groups, num_envs, self.lifetime_groups)
        students, critics = self._untrained(jax.random.split(key, lifetimes))
        names = ("loss", "gradient_norm", *self._reward_names)
        metrics = {name: jnp.float32(0) for name in names}
        optimizer_state = self._optimizer.init(rule)
        frames = schedules.init_frames()
        shared = RuleState(rule, optimizer_state, frames, jnp.int32(0), metrics)
        local = LifetimeStates(
            students,
            critics,
            initial_students=jax.tree.map(jnp.copy, students),
            window=empty_window(
                self.observation_spec, (lifetimes, self.inner_updates), self.rollout_length,
                self.groups.num_envs,
            ),
            lifetime=jnp.zeros(lifetimes, jnp.int32),
            is_whole=jnp.ones(lifetimes, bool),
        )  # fmt: skip
        return LearnerState(shared, local)

    def learn(
        self, state: LearnerState, trajectory: Trajectory, key: jax.Array, axis: str | None
    ) -> tuple[LearnerState, Metrics]:
        """Update the students, and the rule where the window is full."""
        shared, local = state.shared, state.local
        num_frames = schedules.count_frames(trajectory, axis)
        data, lifetime, task = lifetime_experience(trajectory, self.groups, self.rollout_length)
        is_new = lifetime != local.lifetime
        # A window across two lifetimes does not show the effect of the rule's updates.
        is_whole = local.is_whole & ~is_new
        critics, advantages = self.critics.update(local.critics, data)
        rollout = group_by_lifetime(data, self.groups.num_envs)
        advantages = group_by_lifetime(advantages, self.groups.num_envs)

        is_full = shared.num_rollouts == self.inner_updates
        shared = jax.lax.cond(
            is_full,
            partial(self.update_rule, axis=axis),
            lambda shared, _: shared,
            shared,
            MetaBatch(local.initial_students, local.window, rollout, advantages, is_whole, task),
        )
        index = jnp.where(is_full, 0, shared.num_rollouts)
        updated, regularizers = self.objective.students.update(shared.rule, local.students, data)
        updated, critics = self._reset_where(is_new, (updated, critics), key)
        initial = jax.lax.cond(is_full, lambda: local.students, lambda: local.initial_students)
        local = LifetimeStates(
            updated,
            critics,
            initial_students=initial,
            window=jax.tree.map(lambda w, x: w.at[:, index].set(x), local.window, rollout),
            lifetime=lifetime,
            is_whole=jnp.where(is_full, ~is_new, is_whole),
        )
        totals = {name: jnp.mean(x) for name, x in regularizers.items()}
        metrics = {**shared.metrics, **with_share(totals, schedules.valid_share(trajectory))}
        frames = schedules.add_frames(shared.frames, num_frames)
        shared = dataclasses.replace(shared, num_rollouts=index + 1, frames=frames)
        return LearnerState(shared, local), metrics

    def update_rule(self, shared: RuleState, batch: MetaBatch, axis: str | None) -> RuleState:
        """Return the rule after one step on the meta-gradient of all lifetimes."""
        gradients = self.objective.grad_in_groups(shared.rule, batch, self.lifetime_groups)
        grads, loss, reward, valid = global_mean(gradients, axis)
        rate = schedules.value_at(self.learning_rate, shared.frames)
        rule, optimizer_state = take_step(
            self._optimizer, shared.rule, shared.optimizer_state, grads, rate
        )
        metrics = {"loss": loss, "gradient_norm": optax.tree.norm(grads)}
        for name, total, count in zip(self._reward_names, reward, valid, strict=True):
            mean = total / jnp.maximum(count, 1e-8)
            metrics[name] = jnp.where(count > 0, mean, shared.metrics[name])
        return dataclasses.replace(
            shared, rule=rule, optimizer_state=optimizer_state, metrics=metrics
        )

    def _untrained(self, keys: jax.Array) -> Any:
        """Return students and critics that have learned nothing, for keys `[L]`."""

        def init_one(key: jax.Array) -> tuple[PyTree, ParamsState]:
            keys = jax.random.split(key)
            return self.objective.students.init(keys[0]), self.critics.init(keys[1])

        return jax.vmap(init_one)(keys)

    def _reset_where(self, is_new: jax.Array, states: PyTree, key: jax.Array) -> PyTree:
        """Return students and critics, untrained ones where a lifetime is new, bool `[L]`.

        New ones are computed only if any lifetime is new.
        """

        def reset() -> PyTree:
            untrained = self._untrained(jax.random.split(key, is_new.shape[0]))
            return jax.tree.map(
                lambda new, old: jnp.where(is_new.reshape(-1, *(1,) * (old.ndim - 1)), new, old),
                untrained,
                states,
            )

        return jax.lax.cond(jnp.any(is_new), reset, lambda: states)

    @property
    def _reward_names(self) -> list[str]:
        return [f"reward_{task}" for task in self.groups.tasks]

    @property
    def _optimizer(self) -> optax.GradientTransformation:
        return optax.chain(optax.clip_by_global_norm(self.max_gradient_norm), optax.scale_by_adam())
