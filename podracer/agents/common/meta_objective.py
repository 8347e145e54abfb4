"""The meta-objective of an update rule: how well students do after K updates, and its gradient.

Source: Oh et al. 2020 (arXiv 2007.08794), equations 4 and 5.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from podracer.agents.common.lifetimes import Experience, lifetime_means, to_rollout, to_rollouts
from podracer.agents.common.meta import meta_grad
from podracer.ops.distributions import Categorical
from podracer.types import Metrics, Params, PyTree, struct


class MetaGradient(NamedTuple):
    """Gradient of the meta-objective with respect to the rule, and what comes with it."""

    grads: Params
    loss: jax.Array  # f32 []
    reward: jax.Array  # f32 [tasks], mean over lifetimes of their mean reward
    valid: jax.Array  # f32 [tasks], mean over lifetimes of their share of valid steps


class Students(Protocol):
    """Functions of students that a rule updates; states of L of them have leaves `[L, ...]`.

    Their losses, objectives and regularizers are means over all steps of a lifetime, where those
    that are not valid count as 0: so a rule is learned and used with one scale of updates.
    """

    def init(self, key: jax.Array) -> Any:
        """Return an untrained student, with an attribute `params`."""
        ...

    def policy(self, params: Params, observation: PyTree, first: jax.Array) -> jax.Array:
        """Return the logits `[T, B, A]` of L policies, each in its own of B environments."""
        ...

    def update(self, rule: Params, students: Any, data: Experience) -> tuple[Any, Metrics]:
        """Return the students after one update, and regularizers `[L]` of the meta-objective."""
        ...

    def policy_objective(
        self, students: Any, data: Experience, advantages: jax.Array
    ) -> tuple[jax.Array, Metrics]:
        """Return the policy-gradient objective of each student, and its entropies, `[L]` each.

        The entropies are among the regularizers of `update`, which has them before the update.
        """
        ...


class MetaCosts(NamedTuple):
    """Weights of the regularizers in the meta-objective, by name."""

    entropies: Mapping[str, float | jax.Array]  # which are to be large
    targets: Mapping[str, float | jax.Array]  # penalties on the targets of the rule


@struct
class MetaBatch:
    """Data of one update of the rule, leaves `[L, ...]`."""

    students: PyTree  # before the K updates
    window: Experience  # of the K updates, [L, K, T, E, ...]
    rollout: Experience  # after them, [L, T, E, ...]
    advantages: jax.Array  # of that rollout, f32 [L, T, E]
    is_whole: jax.Array  # bool [L]
    task: jax.Array  # i32 [L]


@dataclasses.dataclass(frozen=True)
class MetaObjective:
    """Policy gradient of students after K updates, with regularizers."""

    students: Students
    num_tasks: int
    costs: MetaCosts
    recompute: bool

    def grad_in_groups(self, rule: Params, batch: MetaBatch, groups: int) -> MetaGradient:
        """Return the mean of `grad` over equal groups of lifetimes, computed one after another."""
        parts = jax.tree.map(lambda x: x.reshape(groups, -1, *x.shape[1:]), batch)

        def add(total: MetaGradient, part: MetaBatch) -> tuple[MetaGradient, None]:
            return jax.tree.map(lambda t, x: t + x / groups, total, self.grad(rule, part)), None

        by_task = jnp.zeros(self.num_tasks)
        no_grads = jax.tree.map(jnp.zeros_like, rule)
        zeros = MetaGradient(no_grads, jnp.float32(0), by_task, by_task)
        return jax.lax.scan(add, zeros, parts)[0]

    def grad(self, rule: Params, batch: MetaBatch) -> MetaGradient:
        """Return the gradient and the loss, and means of rewards and of valid steps by task.

        Lifetimes that ended within the window have weight 0.
        """
        data, advantages = to_rollout((batch.rollout, batch.advantages))
        weights = batch.is_whole.astype(jnp.float32)

        def loss(rule: Params, students: PyTree, aux: Metrics) -> tuple[jax.Array, jax.Array]:
            value = self.loss(students, aux, data, advantages, weights)
            return value, value

        grads, (_, value) = meta_grad(
            self.students.update, loss, rule, batch.students, to_rollouts(batch.window),
            recompute=self.recompute,
        )  # fmt: skip
        by_task = batch.is_whole[:, None] * jax.nn.one_hot(batch.task, self.num_tasks)
        rollout = batch.rollout
        terms = (rollout.valid * rollout.reward, rollout.valid)
        matmul = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)  # no TF32 or bfloat16
        reward, valid = (matmul(jnp.mean(x, axis=(1, 2)), by_task) for x in terms)
        return MetaGradient(grads, value, reward, valid)

    def loss(
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
        objective, final = self.students.policy_objective(students, data, advantages)
        # Entropies count after each update of a student, targets at each update.
        entropies = {name: jnp.concatenate([aux[name][1:], x[None]]) for name, x in final.items()}
        means = {name: jnp.mean(weights[None] * x) for name, x in {**aux, **entropies}.items()}
        total = -jnp.mean(weights * objective)
        for name, cost in self.costs.entropies.items():
            total = total - cost * means[name]
        for name, cost in self.costs.targets.items():
            total = total + cost * means[name]
        return total


def policy_gradient(
    logits: jax.Array, data: Experience, advantages: jax.Array, lifetimes: int
) -> jax.Array:
    """Return the mean of advantages `[T, B]` times log-probabilities of each lifetime, `[L]`."""
    log_prob = Categorical(logits[:-1]).log_prob(data.action)
    return lifetime_means(advantages * log_prob, lifetimes)
