"""Students in lifetimes that a DiscoRL rule trains while it is being discovered.

Leaves of their states are `[L, ...]` for L lifetimes, and each has its own of B environments. They
learn from their newest rollout, which their own policy made, without a replay.
Source: Oh et al. 2025, "Discovering state-of-the-art reinforcement learning algorithms", methods.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax

from podracer.agents.common.actor_critic import ParamsState
from podracer.agents.common.critics import descend
from podracer.agents.common.lifetimes import Experience, lifetime_means, map_lifetimes
from podracer.agents.common.meta_objective import policy_gradient
from podracer.agents.common.value_based import gather_action
from podracer.agents.disco.experience import Experience as RuleExperience
from podracer.agents.disco.loss import student_loss
from podracer.agents.disco.network import Outputs, StudentNetwork, StudentParams
from podracer.agents.disco.rule import Memory, RuleParams, apply_rule, init_memory, remember
from podracer.agents.disco.values import AdvantageMoments, Values, estimate_values, init_moments
from podracer.ops.distributions import Categorical
from podracer.types import Metrics, Params, PyTree, struct


@struct
class StudentState:
    """State of students; see `Disco`, which keeps the same for one."""

    params: Params  # `StudentParams`
    target_params: Params
    optimizer_state: optax.OptState
    moments: AdvantageMoments
    memory: Memory


@dataclasses.dataclass(frozen=True)
class DiscoStudents:
    """Network, optimizer and hyperparameters that all students share."""

    network: StudentNetwork
    support: jax.Array
    optimizer: optax.GradientTransformation
    learning_rate: float | jax.Array
    discount: float | jax.Array
    trace_lambda: float | jax.Array
    value_cost: float | jax.Array
    target_decay: float
    memory_units: int

    def init(self, key: jax.Array) -> StudentState:
        """Return an untrained student."""
        params: Params = self.network.init(key)
        return StudentState(
            params,
            target_params=jax.tree.map(jnp.copy, params),
            optimizer_state=self.optimizer.init(params),
            moments=init_moments(),
            memory=init_memory(self.memory_units),
        )

    def policy(self, params: Params, observation: PyTree, first: jax.Array) -> jax.Array:
        """Return the logits `[T, B, A]` of L policies, each in its own of B environments."""

        def logits(params: StudentParams, observation: PyTree, first: jax.Array) -> jax.Array:
            return self.network.policy(params, (), observation, first)[0]

        return map_lifetimes(logits, params, (observation, first))

    def outputs(self, params: Params, data: Experience) -> Outputs:
        """Return each student's outputs on its own timesteps, `[T+1, B, ...]`."""

        def apply(params: StudentParams, observation: PyTree, first: jax.Array) -> Outputs:
            return self.network.apply(params, (), observation, first)

        return map_lifetimes(apply, params, (data.observation, data.first))

    def update(
        self, rule: RuleParams, students: StudentState, data: Experience
    ) -> tuple[StudentState, Metrics]:
        """Return the students after one update by the rule, and the rule's regularizers `[L]`.

        Targets and all that the rule reads stay functions of rule and students, through which
        meta-gradients are taken; the student's own gradient takes the targets as constants.
        """
        lifetimes = students.memory[0].shape[0]
        outputs, pullback = jax.vjp(lambda p: self.outputs(p, data), students.params)
        target_outputs = self.outputs(students.target_params, data)
        experience = _rule_experience(data, outputs)
        values = estimate_values(
            outputs, target_outputs, experience, self.support, self.discount, self.trace_lambda
        )
        mask = data.valid.astype(jnp.float32)
        moments, weights = _moments_and_weights(students.moments, mask, values.advantages)

        def by_env(x: jax.Array) -> jax.Array:
            return jnp.repeat(x, mask.shape[1] // lifetimes, axis=0)

        normalized = jax.vmap(Values.normalized, in_axes=(1, 0), out_axes=1)
        values = normalized(values, jax.tree.map(by_env, moments))
        memory = (by_env(students.memory[0]), by_env(students.memory[1]))
        targets, memory_inputs = apply_rule(
            rule, memory, experience, outputs, target_outputs, values
        )
        output_grads, _ = jax.grad(student_loss, has_aux=True)(
            outputs, outputs.policy[1:], targets, values.targets, experience, weights,
            self.support, self.value_cost,
        )  # fmt: skip
        (grads,) = pullback(output_grads)
        # The loss is a mean over all lifetimes; each student's own has a gradient L times as large.
        grads = jax.tree.map(lambda g: lifetimes * g, grads)
        old = ParamsState(students.params, students.optimizer_state)
        stepped = descend(self.optimizer, old, grads, self.learning_rate)
        target_policy = Categorical(target_outputs.policy[:-1])
        divergence = target_policy.divergence(Categorical(targets.policy))
        return StudentState(
            stepped.params,
            target_params=optax.incremental_update(
                students.params, students.target_params, 1.0 - self.target_decay
            ),
            optimizer_state=stepped.optimizer_state,
            moments=moments,
            memory=remember(
                rule,
                students.memory,
                lifetime_means(weights[..., None] * memory_inputs, lifetimes),
            ),
        ), {
            **_entropies(outputs, data, lifetimes),
            "target_divergence": lifetime_means(mask * divergence, lifetimes),
        }

    def policy_objective(
        self, students: StudentState, data: Experience, advantages: jax.Array
    ) -> tuple[jax.Array, Metrics]:
        """Return the policy-gradient objective and the entropies of each student, `[L]` each."""
        lifetimes = students.memory[0].shape[0]
        outputs = self.outputs(students.params, data)
        objective = policy_gradient(outputs.policy, data, advantages, lifetimes)
        return objective, _entropies(outputs, data, lifetimes)


def _rule_experience(data: Experience, outputs: Outputs) -> RuleExperience:
    """Return experience as a rule reads it, where the policies themselves acted."""
    return RuleExperience(
        data.observation, data.action, data.reward, data.discount, data.valid,
        behavior=outputs.policy[:-1],
    )  # fmt: skip


def _moments_and_weights(
    moments: AdvantageMoments, mask: jax.Array, advantages: jax.Array
) -> tuple[AdvantageMoments, jax.Array]:
    """Return moments `[L]` after a batch, and weights `[T, B]` for means over valid steps."""
    lifetimes = moments.mean.shape[0]
    share = jnp.maximum(lifetime_means(mask, lifetimes), 1e-8)
    mean, mean_square = (
        lifetime_means(mask * x, lifetimes) / share for x in (advantages, advantages**2)
    )
    weights = mask / jnp.repeat(share, mask.shape[1] // lifetimes)[None]
    return moments.update(mean, mean_square), weights


def _entropies(outputs: Outputs, data: Experience, lifetimes: int) -> dict[str, jax.Array]:
    """Return mean entropies of policy and of both predictions over each lifetime's steps, `[L]`."""
    before = jax.tree.map(lambda x: x[:-1], outputs)
    of_action = Categorical(gather_action(before.action_prediction, data.action))
    prediction = Categorical(before.prediction).entropy() + of_action.entropy()
    return {
        "policy_entropy": lifetime_means(
            data.valid * Categorical(before.policy).entropy(), lifetimes
        ),
        "prediction_entropy": lifetime_means(data.valid * prediction, lifetimes),
    }
