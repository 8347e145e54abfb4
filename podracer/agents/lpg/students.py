"""Students that an update rule trains, one for each lifetime, and the critics that assess them.

Leaves of parameters are `[L, ...]` for L lifetimes. Experience is that of a rollout, `[T, B, ...]`
with B = L x E: each E consecutive environments belong to one lifetime.
Source: Oh et al. 2020, section 3 (arXiv 2007.08794).
"""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import optax

from podracer.agents.common.actor_critic import ParamsState, mask_logits
from podracer.agents.common.optimizers import take_step
from podracer.agents.lpg.rule import (
    Experience,
    Outputs,
    RuleParams,
    UpdateRule,
    student_grads,
)
from podracer.networks import Network
from podracer.ops.distributions import Categorical
from podracer.ops.returns import generalized_advantages
from podracer.types import Metrics, Params, PyTree


@dataclasses.dataclass(frozen=True)
class Students:
    """Networks, optimizers and hyperparameters that all students and critics share."""

    rule: UpdateRule
    network: Network
    critic: Network
    optimizer: optax.GradientTransformation
    critic_optimizer: optax.GradientTransformation
    learning_rate: float | jax.Array
    critic_learning_rate: float | jax.Array
    discount: float | jax.Array
    gae_lambda: float | jax.Array
    prediction_cost: float | jax.Array

    def init(self, keys: jax.Array) -> tuple[ParamsState, ParamsState]:
        """Return untrained students and critics for keys `[L]`."""

        def init_one(key: jax.Array) -> tuple[ParamsState, ParamsState]:
            keys = jax.random.split(key)
            student, critic = self.network.init(keys[0]), self.critic.init(keys[1])
            return (
                ParamsState(student, self.optimizer.init(student)),
                ParamsState(critic, self.critic_optimizer.init(critic)),
            )

        # On a CPU vmapped orthogonal initialization can deadlock, see `drivers/population.py`.
        return jax.lax.platform_dependent(
            keys, cpu=partial(jax.lax.map, init_one), default=jax.vmap(init_one)
        )

    def reset_where(self, is_new: jax.Array, states: PyTree, key: jax.Array) -> PyTree:
        """Return `(students, critics)`, untrained ones where a lifetime is new, bool `[L]`.

        New ones are computed only if any lifetime is new.
        """

        def reset() -> PyTree:
            untrained = self.init(jax.random.split(key, is_new.shape[0]))
            return jax.tree.map(
                lambda new, old: jnp.where(is_new.reshape(-1, *(1,) * (old.ndim - 1)), new, old),
                untrained,
                states,
            )

        return jax.lax.cond(jnp.any(is_new), reset, lambda: states)

    def outputs(self, params: Params, data: Experience) -> Outputs:
        """Return each student's outputs on its own timesteps, `[T+1, B, n]`."""
        heads = apply_by_lifetime(self.network, params, data.observation, data.first)
        return Outputs(mask_logits(data.observation, heads["policy"]), heads["prediction"])

    def update(
        self, rule_params: RuleParams, students: ParamsState, data: Experience
    ) -> tuple[ParamsState, Metrics]:
        """Return the students after one update by the rule, and the rule's regularizers `[L]`."""
        params = students.params
        lifetimes = jax.tree.leaves(params)[0].shape[0]
        grads, (outputs, targets) = student_grads(
            self.rule, rule_params, lambda p: self.outputs(p, data), params, data,
            self.discount, self.prediction_cost,
        )  # fmt: skip
        # The loss is a mean over all lifetimes; each student's own has a gradient L times as large.
        grads = jax.tree.map(lambda g: lifetimes * g, grads)
        prediction_size = jnp.sum(targets.prediction**2, axis=-1)
        return _descend(self.optimizer, students, grads, self.learning_rate), {
            **entropies(outputs, data, lifetimes),
            "policy_target": _lifetime_means(data.valid * targets.policy**2, lifetimes),
            "prediction_target": _lifetime_means(data.valid * prediction_size, lifetimes),
        }

    def update_critics(
        self, critics: ParamsState, data: Experience
    ) -> tuple[ParamsState, jax.Array]:
        """Return the critics after one update, and normalized advantages `[T, B]` before it."""
        lifetimes = jax.tree.leaves(critics.params)[0].shape[0]

        def loss(params: Params) -> tuple[jax.Array, jax.Array]:
            heads = apply_by_lifetime(self.critic, params, data.observation, data.first)
            values = heads["value"][..., 0]
            constants = jax.lax.stop_gradient(values)
            advantages = generalized_advantages(
                constants[:-1], constants[1:], data.reward, self.discount * data.discount,
                data.valid, self.gae_lambda,
            )  # fmt: skip
            errors = data.valid * (constants[:-1] + advantages - values[:-1])
            return 0.5 * jnp.sum(_lifetime_means(errors**2, lifetimes)), advantages

        grads, advantages = jax.grad(loss, has_aux=True)(critics.params)
        grouped = advantages.reshape(len(advantages), lifetimes, -1)
        mean = jnp.mean(grouped, axis=(0, 2), keepdims=True)
        # The constant is of the size of rewards, so that noise well below them is not magnified.
        normalized = (grouped - mean) / (jnp.std(grouped, axis=(0, 2), keepdims=True) + 1e-3)
        critics = _descend(self.critic_optimizer, critics, grads, self.critic_learning_rate)
        return critics, data.valid * normalized.reshape(advantages.shape)

    def policy_objective(
        self, students: ParamsState, data: Experience, advantages: jax.Array
    ) -> tuple[jax.Array, Metrics]:
        """Return the policy-gradient objective and the entropies of each student, `[L]` each."""
        lifetimes = jax.tree.leaves(students.params)[0].shape[0]
        outputs = self.outputs(students.params, data)
        log_prob = Categorical(outputs.policy[:-1]).log_prob(data.action)
        objective = _lifetime_means(advantages * log_prob, lifetimes)
        return objective, entropies(outputs, data, lifetimes)


def apply_by_lifetime(
    network: Network, params: Params, observation: PyTree, first: jax.Array
) -> dict[str, jax.Array]:
    """Return the heads of L networks, each applied to its own of B environments, `[T, B, n]`."""
    lifetimes = jax.tree.leaves(params)[0].shape[0]
    grouped = jax.tree.map(
        lambda x: x.reshape(x.shape[0], lifetimes, -1, *x.shape[2:]), (observation, first)
    )

    def apply(params: Params, observation: PyTree, first: jax.Array) -> dict[str, jax.Array]:
        return network.apply(params, (), observation, first)[0]

    heads = jax.vmap(apply, in_axes=(0, 1, 1), out_axes=1)(params, *grouped)
    return jax.tree.map(lambda x: x.reshape(x.shape[0], -1, x.shape[-1]), heads)


def entropies(outputs: Outputs, data: Experience, lifetimes: int) -> dict[str, jax.Array]:
    """Return mean entropies of policy and prediction over the steps of each lifetime, `[L]`."""
    policy, prediction = Categorical(outputs.policy[:-1]), Categorical(outputs.prediction[:-1])
    return {
        "policy_entropy": _lifetime_means(data.valid * policy.entropy(), lifetimes),
        "prediction_entropy": _lifetime_means(data.valid * prediction.entropy(), lifetimes),
    }


def _descend(
    optimizer: optax.GradientTransformation,
    states: ParamsState,
    grads: Params,
    learning_rate: float | jax.Array,
) -> ParamsState:
    def descend_one(state: ParamsState, grads: Params) -> ParamsState:
        return ParamsState(
            *take_step(optimizer, state.params, state.optimizer_state, grads, learning_rate)
        )

    return jax.vmap(descend_one)(states, grads)


def _lifetime_means(x: jax.Array, lifetimes: int) -> jax.Array:
    """Means over the steps `[T, B]` of each lifetime, `[L]`."""
    return jnp.mean(x.reshape(x.shape[0], lifetimes, -1), axis=(0, 2))
