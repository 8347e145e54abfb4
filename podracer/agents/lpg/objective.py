"""The meta-objective of LPG: how well students do after K updates by the rule, and its gradient.

Source: Oh et al. 2020 (arXiv 2007.08794), equations 4 and 5.
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp

from podracer.agents.common.actor_critic import ParamsState
from podracer.agents.common.meta import meta_grad
from podracer.agents.lpg.rule import Experience, RuleParams
from podracer.agents.lpg.state import MetaBatch, to_rollout, to_rollouts
from podracer.agents.lpg.students import Students
from podracer.types import Metrics

# Gradient, loss, and for each task the mean reward and the mean number of valid steps.
Grads = tuple[RuleParams, jax.Array, list[jax.Array]]


@dataclasses.dataclass(frozen=True)
class MetaObjective:
    """Policy gradient of students after K updates, with regularizers; costs are those of `LPG`."""

    students: Students
    num_tasks: int
    policy_entropy_cost: float | jax.Array
    prediction_entropy_cost: float | jax.Array
    policy_target_cost: float | jax.Array
    prediction_target_cost: float | jax.Array
    recompute: bool

    def grad_in_groups(self, rule: RuleParams, batch: MetaBatch, groups: int) -> Grads:
        """Return the mean of `grad` over equal groups of lifetimes, computed one after another."""
        parts = jax.tree.map(lambda x: x.reshape(groups, -1, *x.shape[1:]), batch)

        def add(total: Grads, part: MetaBatch) -> tuple[Grads, None]:
            return jax.tree.map(lambda t, x: t + x / groups, total, self.grad(rule, part)), None

        shapes = jax.eval_shape(self.grad, rule, jax.tree.map(lambda x: x[0], parts))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return jax.lax.scan(add, zeros, parts)[0]

    def grad(self, rule: RuleParams, batch: MetaBatch) -> Grads:
        """Return the gradient and the loss, and means of rewards and of valid steps by task.

        Lifetimes that ended within the window have weight 0.
        """
        data, advantages = to_rollout((batch.rollout, batch.advantages))
        weights = batch.is_whole.astype(jnp.float32)

        def loss(
            rule: RuleParams, students: ParamsState, aux: Metrics
        ) -> tuple[jax.Array, jax.Array]:
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
        return grads, value, [matmul(jnp.mean(x, axis=(1, 2)), by_task) for x in terms]

    def loss(
        self,
        students: ParamsState,
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
        return (
            -jnp.mean(weights * objective)
            - self.policy_entropy_cost * means["policy_entropy"]
            - self.prediction_entropy_cost * means["prediction_entropy"]
            + self.policy_target_cost * means["policy_target"]
            + self.prediction_target_cost * means["prediction_target"]
        )
