"""Meta-training: a rule learns from L lifetimes of students, whose last K rollouts are kept.

After each rollout the rule η updates the parameters θ of the students, and after K updates the next
rollout judges them, with advantages A of critics:

    θ_k+1 = θ_k - α ∇_θ L(θ_k, η)                         `update_students`
    J(η)  = E[A log π_θK(a|s)] + β_0 H(π) + β_1 H(y) - penalties of the targets    `meta_loss`
    η    <- η + Adam(∇_η J(η)), through all K updates      `update_rule`

The agents that learn rules differ in their rule, its students and the weights of its regularizers.
Source: Oh et al. 2020 (arXiv 2007.08794), algorithm 1, equations 4 and 5.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from podracer import schedules
from podracer.agent import Agent, Rule
from podracer.agents.common.meta import meta_grad
from podracer.agents.common.optimizers import ParamsState, global_norm, take_step
from podracer.agents.rules.lifetimes import (
    Experience,
    empty_window,
    group_by_lifetime,
    lifetime_experience,
    lifetime_means,
    map_lifetimes,
    num_lifetimes,
    standardize,
    to_rollout,
    to_rollouts,
)
from podracer.devices.reductions import MaskedMean, global_mean
from podracer.environment import TaskGroups
from podracer.fields import bounded, reset_on_warm_start, static, struct
from podracer.networks import Head, Network, NetworkBuilder, Table
from podracer.ops.distributions import Categorical
from podracer.ops.returns import generalized_advantages
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

CRITIC_OPTIMIZER = optax.scale_by_adam()


@struct
class MetaSettings:
    """Settings that all agents have that learn a rule."""

    learning_rate: Schedule = bounded(1e-3)
    """Learning rate of the update rule (Adam)."""
    discount: float = bounded(0.99, high=1.0)
    """Discount factor gamma of students and critics, in [0, 1]."""
    gae_lambda: float = bounded(0.95, high=1.0)
    """Lambda of the generalized advantages in the meta-objective, in [0, 1]."""
    critic_learning_rate: float = bounded(0.03)
    """Learning rate of the critics (Adam), whose values give the advantages."""
    max_gradient_norm: float = bounded(0.5, low=1e-6)
    """Largest global norm of the gradient of the update rule; larger ones are scaled down to it."""
    student_learning_rate: float = bounded(40.0)
    """Learning rate of the students."""
    policy_entropy_cost: float = bounded(0.05)
    """Weight beta_0 of the students' policy entropy in the meta-objective."""
    prediction_entropy_cost: float = bounded(1e-3)
    """Weight beta_1 of the entropy of the students' predictions in the meta-objective."""
    inner_updates: int = static(default=5, low=1)
    """Number K of a student's updates that the meta-gradient goes back through."""
    lifetime_groups: int = static(default=1, low=1)
    """Number of groups of lifetimes that are differentiated in turn: more groups, less memory."""
    recompute: bool = static(default=False)
    """Compute inner activations again in the backward pass: less memory, a third more time."""
    network: NetworkBuilder = static(default=Table())
    """Network of the students, without the outputs that the rule asks for, and of the critics."""


@struct
class RuleState:
    """State of the update rule, the same on all devices."""

    rule: Params
    optimizer_state: optax.OptState
    frames: jax.Array = reset_on_warm_start()
    """Frames of all lifetimes, uint32 [], see `schedules`."""
    num_rollouts: jax.Array = reset_on_warm_start()
    """Rollouts in the window, at most K, i32 []."""
    metrics: Metrics = reset_on_warm_start()
    """Metrics of the last update of the rule, some of them by task."""


@struct
class LifetimeStates:
    """State of L lifetimes, leaves `[L, ...]`."""

    students: Any  # with an attribute `params`
    critics: ParamsState
    initial_students: Any  # before the first update of the window
    window: Experience  # the rollouts of the last updates, [L, K, T, E, ...]
    lifetime: jax.Array  # i32 [L], number of each lifetime within its group of environments
    is_whole: jax.Array  # bool [L], whether the window lies within one lifetime


@struct
class MetaBatch:
    """Data of one update of the rule, leaves `[L, ...]`."""

    students: PyTree  # before the K updates
    window: Experience  # for the K updates, [L, K, T, E, ...]
    rollout: Experience  # after them, [L, T, E, ...]
    advantages: jax.Array  # in that rollout, f32 [L, T, E]
    is_whole: jax.Array  # bool [L]
    task: jax.Array  # i32 [L]


@dataclasses.dataclass(frozen=True)
class MetaTraining(abc.ABC):
    """Functions of an agent that learns a rule; a subclass has those of the rule's students.

    Leaves of L students are `[L, ...]`. Their losses, objectives and regularizers are means over
    all steps of a lifetime, where those that are not valid count as 0: so a rule is learned and
    used with one scale of updates.
    """

    settings: Any
    """`MetaSettings` with the `rule`, and the weight `NAME_cost` of each regularizer."""
    spec: EnvironmentSpec
    rollout_length: int
    network: Any
    """Network of the students, see `student_spec`."""
    optimizer: optax.GradientTransformation
    """Unscaled optimizer of the students."""

    def agent(self, export: Callable[[LearnerState, Mapping[str, Any]], bytes]) -> Agent:
        """Return the agent; `export` goes into its `Rule`."""
        name = type(self.settings).__name__
        return Agent.of(self, self.spec, name=name, rule=Rule(export))

    # --- students ---------------------------------------------------------------------------------

    @abc.abstractmethod
    def init_student(self, key: jax.Array) -> Any:
        """Return one untrained student, with an attribute `params`."""

    @abc.abstractmethod
    def outputs(self, params: Params, observation: PyTree, first: jax.Array) -> Any:
        """Return each student's outputs on its own timesteps `[T, B, ...]`, such as `policy`."""

    def policy(self, params: Params, observation: PyTree, first: jax.Array) -> jax.Array:
        """Return the logits `[T, B, A]` of L policies, each in its own of B environments."""
        return self.outputs(params, observation, first).policy

    @abc.abstractmethod
    def update_students(
        self, rule: Any, students: Any, data: Experience
    ) -> tuple[Any, dict[str, jax.Array]]:
        """Return the students after one update, and the regularizers `[L]` of the meta-objective.

        They are `entropies` before the update, rewards, and penalties of the targets.
        """

    @abc.abstractmethod
    def entropies(self, outputs: Any, data: Experience, lifetimes: int) -> dict[str, jax.Array]:
        """Return `policy_entropy` and `prediction_entropy` `[L]`."""

    # --- updates ----------------------------------------------------------------------------------

    def init(self, key: jax.Array, num_envs: int) -> LearnerState:
        rule = self.settings.rule.init(jax.random.fold_in(key, 0))
        key = jax.random.fold_in(key, 1)
        lifetimes = num_lifetimes(self.groups, num_envs, self.settings.lifetime_groups)
        students, critics = self.untrained(jax.random.split(key, lifetimes))
        names = ("loss", "gradient_norm", *self.reward_names)
        shared = RuleState(
            rule,
            self.rule_optimizer.init(rule),
            frames=schedules.init_frames(),
            num_rollouts=jnp.int32(0),
            metrics={name: jnp.float32(0) for name in names},
        )
        local = LifetimeStates(
            students,
            critics,
            initial_students=jax.tree.map(jnp.copy, students),
            window=empty_window(
                self.spec.observation["observation"],
                (lifetimes, self.settings.inner_updates),
                self.rollout_length,
                self.groups.num_envs,
            ),
            lifetime=jnp.zeros(lifetimes, jnp.int32),
            is_whole=jnp.ones(lifetimes, bool),
        )
        return LearnerState(shared, local)

    def actor_params(self, state: LearnerState) -> Params:
        return state.local.students.params

    def act(
        self, params: Params, carry: Carry, timestep: TimeStep, keys: jax.Array, explore: bool
    ) -> tuple[jax.Array, PyTree, Carry]:
        """Choose actions `[B]`, each student in its own environments."""
        observation = timestep.observation["observation"]
        time_major = jax.tree.map(lambda x: x[None], observation)
        policy = Categorical(self.policy(params, time_major, timestep.first[None])[0])
        return policy.sample(keys) if explore else policy.mode(), (), carry

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
        critics, advantages = self.update_critics(local.critics, data)
        rollout, advantages = group_by_lifetime((data, advantages), self.groups.num_envs)

        is_full = shared.num_rollouts == self.settings.inner_updates
        shared = jax.lax.cond(
            is_full,
            partial(self.update_rule, axis=axis),
            lambda shared, _: shared,
            shared,
            MetaBatch(local.initial_students, local.window, rollout, advantages, is_whole, task),
        )
        index = jnp.where(is_full, 0, shared.num_rollouts)
        updated, regularizers = self.update_students(shared.rule, local.students, data)
        updated, critics = self.reset_where(is_new, (updated, critics), key)
        initial = jax.lax.cond(is_full, lambda: local.students, lambda: local.initial_students)
        local = LifetimeStates(
            updated,
            critics,
            initial_students=initial,
            window=jax.tree.map(lambda w, x: w.at[:, index].set(x), local.window, rollout),
            lifetime=lifetime,
            is_whole=jnp.where(is_full, ~is_new, is_whole),
        )
        share = schedules.valid_share(trajectory)
        means = {name: MaskedMean(jnp.mean(x), share) for name, x in regularizers.items()}
        metrics = {**shared.metrics, **means}
        frames = schedules.add_frames(shared.frames, num_frames)
        shared = dataclasses.replace(shared, num_rollouts=index + 1, frames=frames)
        return LearnerState(shared, local), metrics

    def update_rule(self, shared: RuleState, batch: MetaBatch, axis: str | None) -> RuleState:
        """Return the rule after one step on the meta-gradient of all lifetimes."""
        gradients = self.meta_grad_in_groups(shared.rule, batch)
        grads, loss, reward, valid = global_mean(gradients, axis)
        rate = schedules.value_at(self.settings.learning_rate, shared.frames)
        state = ParamsState(shared.rule, shared.optimizer_state)
        state = take_step(self.rule_optimizer, rate, state, grads)
        metrics = {"loss": loss, "gradient_norm": global_norm(grads)}
        for name, total, count in zip(self.reward_names, reward, valid, strict=True):
            mean = total / jnp.maximum(count, 1e-8)
            metrics[name] = jnp.where(count > 0, mean, shared.metrics[name])
        return dataclasses.replace(
            shared, rule=state.params, optimizer_state=state.optimizer_state, metrics=metrics
        )

    # --- meta-objective ---------------------------------------------------------------------------

    def meta_grad_in_groups(self, rule: Params, batch: MetaBatch) -> tuple[Params, ...]:
        """Return the mean of `meta_grad` over equal groups of lifetimes, one after another."""
        groups = self.settings.lifetime_groups
        parts = jax.tree.map(lambda x: x.reshape(groups, -1, *x.shape[1:]), batch)

        def add(total: PyTree, part: MetaBatch) -> tuple[PyTree, None]:
            new = self.meta_grad(rule, part)
            return jax.tree.map(lambda t, x: t + x / groups, total, new), None

        by_task = jnp.zeros(len(self.groups.tasks))
        no_grads = jax.tree.map(jnp.zeros_like, rule)
        zeros = (no_grads, jnp.float32(0), by_task, by_task)
        return jax.lax.scan(add, zeros, parts)[0]

    def meta_grad(self, rule: Params, batch: MetaBatch) -> tuple[Params, ...]:
        """Return the gradient with respect to the rule, and the loss, f32 `[]`.

        Also returns means over lifetimes, f32 `[tasks]`, of their mean reward and of their share of
        valid steps. Lifetimes that ended within the window have weight 0.
        """
        data, advantages = to_rollout((batch.rollout, batch.advantages))
        weights = batch.is_whole.astype(jnp.float32)

        def loss(rule: Params, students: PyTree, aux: Metrics) -> tuple[jax.Array, jax.Array]:
            value = self.meta_loss(students, aux, data, advantages, weights)
            return value, value

        grads, (_, value) = meta_grad(
            self.update_students,
            loss,
            rule,
            batch.students,
            to_rollouts(batch.window),
            recompute=self.settings.recompute,
        )
        by_task = batch.is_whole[:, None] * jax.nn.one_hot(batch.task, len(self.groups.tasks))
        rollout = batch.rollout
        terms = (rollout.valid * rollout.reward, rollout.valid)
        matmul = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)  # no TF32 or bfloat16
        reward, valid = (matmul(jnp.mean(x, axis=(1, 2)), by_task) for x in terms)
        return grads, value, reward, valid

    def meta_loss(
        self,
        students: PyTree,
        aux: Metrics,
        data: Experience,
        advantages: jax.Array,
        weights: jax.Array,
    ) -> jax.Array:
        """Return the negative meta-objective of students after K updates.

        `aux` has the regularizers of each update, `[K, L]`; `weights` of lifetimes are `[L]`.
        """
        lifetimes = weights.shape[0]
        outputs = self.outputs(students.params, data.observation, data.first)
        log_prob = Categorical(outputs.policy[:-1]).log_prob(data.action)
        objective = lifetime_means(advantages * log_prob, lifetimes)
        final = self.entropies(outputs, data, lifetimes)
        # Entropies count after each update of a student, targets at each update.
        entropies = {name: jnp.concatenate([aux[name][1:], x[None]]) for name, x in final.items()}
        means = {name: jnp.mean(weights[None] * x) for name, x in {**aux, **entropies}.items()}
        total = -jnp.mean(weights * objective)
        total = total - self.settings.policy_entropy_cost * means["policy_entropy"]
        total = total - self.settings.prediction_entropy_cost * means["prediction_entropy"]
        for name in (x for x in aux if x not in final):
            total = total + getattr(self.settings, f"{name}_cost") * means[name]
        return total

    def update_critics(
        self, critics: ParamsState, data: Experience
    ) -> tuple[ParamsState, jax.Array]:
        """Return the critics after one update, and standardized advantages `[T, B]` before it.

        One critic under `vmap` would sum the steps of a lifetime in another order.
        """
        settings, lifetimes = self.settings, jax.tree.leaves(critics.params)[0].shape[0]

        def apply(params: Params, observation: PyTree, first: jax.Array) -> jax.Array:
            return self.critic.apply(params, (), observation, first)[0]["value"]

        def loss(params: Params) -> tuple[jax.Array, jax.Array]:
            values = map_lifetimes(apply, params, (data.observation, data.first))[..., 0]
            constants = jax.lax.stop_gradient(values)
            advantages = generalized_advantages(
                constants[:-1],
                constants[1:],
                data.reward,
                settings.discount * data.discount,
                data.valid,
                settings.gae_lambda,
            )
            errors = data.valid * (constants[:-1] + advantages - values[:-1])
            return 0.5 * jnp.sum(lifetime_means(errors**2, lifetimes)), advantages

        grads, advantages = jax.grad(loss, has_aux=True)(critics.params)
        standardized = standardize(advantages, data.valid, lifetimes)
        step = jax.vmap(partial(take_step, CRITIC_OPTIMIZER, settings.critic_learning_rate))
        return step(critics, grads), standardized

    # --- new lifetimes ----------------------------------------------------------------------------

    def untrained(self, keys: jax.Array) -> Any:
        """Return students and critics that have learned nothing, for keys `[L]`."""

        def init_one(key: jax.Array) -> tuple[PyTree, ParamsState]:
            keys = jax.random.split(key)
            params = self.critic.init(keys[1])
            critic = ParamsState(params, CRITIC_OPTIMIZER.init(params))
            return self.init_student(keys[0]), critic

        return jax.vmap(init_one)(keys)

    def reset_where(self, is_new: jax.Array, states: PyTree, key: jax.Array) -> PyTree:
        """Return students and critics, untrained ones where a lifetime is new, bool `[L]`.

        New ones are computed only if any lifetime is new.
        """

        def reset() -> PyTree:
            untrained = self.untrained(jax.random.split(key, is_new.shape[0]))
            return jax.tree.map(
                lambda new, old: jnp.where(is_new.reshape(-1, *(1,) * (old.ndim - 1)), new, old),
                untrained,
                states,
            )

        return jax.lax.cond(jnp.any(is_new), reset, lambda: states)

    @property
    def groups(self) -> TaskGroups:
        return self.spec.extension

    @functools.cached_property
    def critic(self) -> Network:
        return self.settings.network.build(self.spec.observation["observation"], {"value": Head(1)})

    @property
    def reward_names(self) -> list[str]:
        return [f"reward_{task}" for task in self.groups.tasks]

    @property
    def rule_optimizer(self) -> optax.GradientTransformation:
        """Unscaled optimizer of the rule."""
        clip = optax.clip_by_global_norm(self.settings.max_gradient_norm)
        return optax.chain(clip, optax.scale_by_adam())
