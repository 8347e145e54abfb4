"""Students that a DiscoRL rule trains, and their update: one student, or L students in lifetimes.

Leaves of the states of L students are `[L, ...]`, and each has its own of B environments. Those in
lifetimes learn from their newest rollout, which their own policy made, without a replay.
Source: Oh et al. 2025, "Discovering state-of-the-art reinforcement learning algorithms", methods.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
import optax

from podracer.agents.common.lifetimes import Experience, lifetime_means, map_lifetimes
from podracer.agents.common.meta_training import policy_gradient
from podracer.agents.common.optimizers import take_step
from podracer.agents.common.value_based import gather_action
from podracer.agents.disco.loss import student_loss
from podracer.agents.disco.network import Outputs, StudentNetwork, StudentParams
from podracer.agents.disco.rule import (
    Memory,
    RuleParams,
    Targets,
    apply_rule,
    init_memory,
    remember,
)
from podracer.agents.disco.values import AdvantageMoments, Values, estimate_values, init_moments
from podracer.mesh import global_mean
from podracer.ops.distributions import Categorical
from podracer.types import Metrics, Params, PyTree, struct

# Constants with which the published rules were discovered.
_TARGET_DECAY = 0.9  # of the target parameters, an exponential moving average
_MAX_UPDATE = 1.0  # of a parameter, before the learning rate


@struct
class StudentState:
    """State of a student, or of L: parameters, and what the rule knows of the lifetime."""

    params: Params  # `StudentParams`
    target_params: Params
    optimizer_state: optax.OptState
    moments: AdvantageMoments
    memory: Memory


State = TypeVar("State", bound=StudentState)


def build_optimizer(root_epsilon: float = 0.0) -> optax.GradientTransformation:
    """Return the unscaled optimizer of a student."""
    return optax.chain(optax.scale_by_adam(eps_root=root_epsilon), optax.clip(_MAX_UPDATE))


@dataclasses.dataclass(frozen=True)
class DiscoStudents:
    """Network, optimizer and hyperparameters that all students share."""

    network: StudentNetwork
    optimizer: optax.GradientTransformation
    support: jax.Array
    learning_rate: float | jax.Array
    discount: float | jax.Array
    trace_lambda: float | jax.Array
    value_cost: float | jax.Array
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
        """Return the students after one update by the rule, and the rule's regularizers `[L]`."""
        lifetimes, forward = students.memory[0].shape[0], partial(self.outputs, data=data)
        students, _, (outputs, target_outputs, targets) = self.step(rule, students, data, forward)
        target_policy = Categorical(target_outputs.policy[:-1])
        divergence = target_policy.divergence(Categorical(targets.policy))
        return students, {
            **_entropies(outputs, data, lifetimes),
            "target_divergence": lifetime_means(data.valid * divergence, lifetimes),
        }

    def step(
        self,
        rule: RuleParams,
        students: State,
        data: Experience,
        forward: Callable[[Params], Outputs],
        axis: str | None = None,
    ) -> tuple[State, Metrics, tuple[Outputs, Outputs, Targets]]:
        """Return the state after one update by the rule, metrics, and what the update came from.

        That is outputs, those of the target parameters, and the rule's targets; `forward` returns
        outputs for parameters. A single student's leaves have no axis L. Where `data` has no
        behavior, the students themselves acted. Targets and all that the rule reads stay functions
        of rule and students, through which meta-gradients are taken; the student's own gradient
        takes the targets as constants.
        """
        outputs, pullback = jax.vjp(forward, students.params)
        target_outputs = forward(students.target_params)
        if not jax.tree.leaves(data.behavior):
            data = dataclasses.replace(data, behavior=outputs.policy[:-1])
        values = estimate_values(
            outputs, target_outputs, data, self.support, self.discount, self.trace_lambda
        )
        lead, mask = students.moments.mean.shape, data.valid.astype(jnp.float32)
        moments, weights = _moments_and_weights(students.moments, mask, values.advantages, axis)

        normalized, step = Values.normalized, self._descend
        if lead:
            normalized = jax.vmap(normalized, in_axes=(1, 0), out_axes=1)
            step = jax.vmap(step)
        by_env = partial(_by_env, lead, mask.shape[1])
        env_moments, memory = jax.tree.map(by_env, (moments, students.memory))
        targets, memory_inputs = apply_rule(
            rule, memory, data, outputs, target_outputs, normalized(values, env_moments)
        )
        output_grads, metrics = jax.grad(student_loss, has_aux=True)(
            outputs, outputs.policy[1:], targets, values.targets, data, weights, self.support,
            self.value_cost,
        )  # fmt: skip
        (grads,) = pullback(output_grads)
        # The loss is a mean over all lifetimes; each student's own has a gradient L times as large.
        grads = jax.tree.map(lambda g: moments.mean.size * g, grads)
        memory_input = _means(lead, weights[..., None] * memory_inputs)
        grads, memory_input = global_mean((grads, memory_input), axis)
        params, optimizer_state = step(students.params, students.optimizer_state, grads)
        students = dataclasses.replace(
            students,
            params=params,
            target_params=optax.incremental_update(
                students.params, students.target_params, 1.0 - _TARGET_DECAY
            ),
            optimizer_state=optimizer_state,
            moments=moments,
            memory=remember(rule, students.memory, memory_input),
        )
        metrics = {**metrics, "gradient_norm": optax.tree.norm(grads)}
        return students, metrics, (outputs, target_outputs, targets)

    def _descend(
        self, params: Params, optimizer_state: optax.OptState, grads: Params
    ) -> tuple[Params, optax.OptState]:
        return take_step(self.optimizer, params, optimizer_state, grads, self.learning_rate)

    def policy_objective(
        self, students: StudentState, data: Experience, advantages: jax.Array
    ) -> tuple[jax.Array, Metrics]:
        """Return the policy-gradient objective and the entropies of each student, `[L]` each."""
        lifetimes = students.memory[0].shape[0]
        outputs = self.outputs(students.params, data)
        objective = policy_gradient(outputs.policy, data, advantages, lifetimes)
        return objective, _entropies(outputs, data, lifetimes)


def _moments_and_weights(
    moments: AdvantageMoments, mask: jax.Array, advantages: jax.Array, axis: str | None
) -> tuple[AdvantageMoments, jax.Array]:
    """Return moments after a batch, and weights `[T, B]` for means over its valid transitions."""
    lead, advantages = moments.mean.shape, mask * advantages
    means = [_means(lead, x) for x in (mask, advantages, advantages**2)]
    share, mean, mean_square = global_mean(means, axis)
    share = jnp.maximum(share, 1e-8)
    weights = mask / _by_env(lead, mask.shape[1], share).reshape(1, -1)
    return moments.update(mean / share, mean_square / share), weights


def _means(lead: tuple[int, ...], x: jax.Array) -> jax.Array:
    """Return means over transitions `[T, B, ...]`, `[*lead, ...]`: `lead` is `(L,)` or `()`."""
    return lifetime_means(x, *lead) if lead else jnp.mean(x, axis=(0, 1))


def _by_env(lead: tuple[int, ...], num_envs: int, x: jax.Array) -> jax.Array:
    """Return for each environment what is its student's, `[B, ...]` of `[L, ...]`."""
    return jnp.repeat(x, num_envs // lead[0], axis=0) if lead else x


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
