"""Learners that an update rule teaches, each in its own lifetime, and the critics that judge them.

Parameters lead with the lifetimes L. Experience is that of a rollout, `[T, B, ...]` with B = L x E:
each E environments, one after another, are those of one life.
Source: Oh et al. 2020, section 3 (arXiv 2007.08794).
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from podracer.agents.common.actor_critic import mask_logits
from podracer.agents.lpg import rule as update_rule
from podracer.agents.lpg.rule import Experience, Outputs, UpdateRule
from podracer.networks import Network
from podracer.ops.distributions import Categorical
from podracer.ops.returns import generalized_advantages
from podracer.types import Metrics, Params, PyTree


@dataclasses.dataclass(frozen=True)
class Students:
    """What all of them have in common; what they are is `{"params", "optimizer"}`, `[L, ...]`."""

    rule: UpdateRule
    network: Network
    critic: Network
    optimizer: optax.GradientTransformation
    critic_optimizer: optax.GradientTransformation
    discount: float | jax.Array
    lambda_: float | jax.Array
    prediction_cost: float | jax.Array

    def fresh(self, keys: jax.Array) -> tuple[PyTree, PyTree]:
        """Learners that know nothing, and their critics, for keys `[L]`."""

        def one(key: jax.Array) -> tuple[PyTree, PyTree]:
            keys = jax.random.split(key)
            params, values = self.network.init(keys[0]), self.critic.init(keys[1])
            return (
                {"params": params, "optimizer": self.optimizer.init(params)},
                {"params": values, "optimizer": self.critic_optimizer.init(values)},
            )

        # On a CPU orthogonal weights of many at once can wait for ever, see population.
        return jax.lax.platform_dependent(
            keys, cpu=partial(jax.lax.map, one), default=jax.vmap(one)
        )

    def reborn(self, born: jax.Array, old: PyTree, key: jax.Array) -> PyTree:
        """`old` with fresh ones where a new life began, bool `[L]`; what that costs is paid only
        where one did."""

        def replace() -> PyTree:
            fresh = self.fresh(jax.random.split(key, born.shape[0]))
            return jax.tree.map(
                lambda new, x: jnp.where(born.reshape(-1, *(1,) * (x.ndim - 1)), new, x), fresh, old
            )

        return jax.lax.cond(jnp.any(born), replace, lambda: old)

    def forward(self, params: Params, data: Experience) -> Outputs:
        """What each learner's network says of its own timesteps, `[T+1, B, n]`."""
        made = each(self.network, params, data.observation, data.first)
        return Outputs(mask_logits(data.observation, made["policy"]), made["prediction"])

    def teach(self, rule: Params, learners: PyTree, data: Experience) -> tuple[PyTree, Metrics]:
        """The learners after an update by the rule, and what regularizes the rule, `[L]` each."""
        params = learners["params"]
        lives = jax.tree.leaves(params)[0].shape[0]
        grads, (outputs, targets) = update_rule.learner_grads(
            self.rule, rule, lambda p: self.forward(p, data), params, data,
            self.discount, self.prediction_cost,
        )  # fmt: skip
        # Of the mean over all lives, of which each learner has its own.
        grads = jax.tree.map(lambda g: lives * g, grads)
        return _stepped(self.optimizer, learners, grads), {
            **entropies(outputs, data, lives),
            "policy_target": _means(data.valid * targets.policy**2, lives),
            "prediction_target": _means(
                data.valid * jnp.sum(targets.prediction**2, axis=-1), lives
            ),
        }

    def judge(self, critics: PyTree, data: Experience) -> tuple[PyTree, jax.Array]:
        """The critics after an update, and normalized advantages `[T, B]` by those before."""
        lives = jax.tree.leaves(critics["params"])[0].shape[0]

        def loss(params: Params) -> tuple[jax.Array, jax.Array]:
            values = each(self.critic, params, data.observation, data.first)["value"][..., 0]
            fixed = jax.lax.stop_gradient(values)
            advantages = generalized_advantages(
                fixed[:-1], fixed[1:], data.reward, self.discount * data.discount, data.valid,
                self.lambda_,
            )  # fmt: skip
            errors = data.valid * (fixed[:-1] + advantages - values[:-1])
            return 0.5 * jnp.sum(_means(errors**2, lives)), advantages

        grads, advantages = jax.grad(loss, has_aux=True)(critics["params"])
        by_life = advantages.reshape(len(advantages), lives, -1)
        mean = jnp.mean(by_life, axis=(0, 2), keepdims=True)
        # The small number is of the size of rewards: what is noise beside them stays small.
        scaled = (by_life - mean) / (jnp.std(by_life, axis=(0, 2), keepdims=True) + 1e-3)
        critics = _stepped(self.critic_optimizer, critics, grads)
        return critics, data.valid * scaled.reshape(advantages.shape)

    def gain(
        self, learners: PyTree, data: Experience, advantages: jax.Array
    ) -> tuple[jax.Array, Metrics]:
        """What the policy gradient of their own rollout ascends on, and entropies, `[L]` each."""
        lives = jax.tree.leaves(learners["params"])[0].shape[0]
        outputs = self.forward(learners["params"], data)
        log_prob = Categorical(outputs.policy[:-1]).log_prob(data.action)
        return _means(advantages * log_prob, lives), entropies(outputs, data, lives)


def each(
    network: Network, params: Params, observation: PyTree, first: jax.Array
) -> dict[str, jax.Array]:
    """The heads of L networks, each over its own environments among B, `[T, B, n]`."""
    lives = jax.tree.leaves(params)[0].shape[0]
    seen = jax.tree.map(
        lambda x: x.reshape(x.shape[0], lives, -1, *x.shape[2:]), (observation, first)
    )

    def one(params: Params, observation: PyTree, first: jax.Array) -> dict[str, jax.Array]:
        return network.apply(params, (), observation, first)[0]

    made = jax.vmap(one, in_axes=(0, 1, 1), out_axes=1)(params, *seen)
    return jax.tree.map(lambda x: x.reshape(x.shape[0], -1, x.shape[-1]), made)


def _stepped(optimizer: optax.GradientTransformation, old: PyTree, grads: Params) -> PyTree:
    def one(old: PyTree, grads: Params) -> PyTree:
        updates, state = optimizer.update(grads, old["optimizer"])
        return {"params": optax.apply_updates(old["params"], updates), "optimizer": state}

    return jax.vmap(one)(old, grads)


def entropies(outputs: Outputs, data: Experience, lives: int) -> dict[str, jax.Array]:
    """Means over each learner's steps, `[L]`."""
    policy, prediction = Categorical(outputs.policy[:-1]), Categorical(outputs.prediction[:-1])
    return {
        "policy_entropy": _means(data.valid * policy.entropy(), lives),
        "prediction_entropy": _means(data.valid * prediction.entropy(), lives),
    }


def _means(x: jax.Array, lives: int) -> jax.Array:
    """Over the steps `[T, B]` of each life, `[L]`."""
    return jnp.mean(x.reshape(x.shape[0], lives, -1), axis=(0, 2))


# --- a window of experience ----------------------------------------------------------------------


def by_life(data: PyTree, envs: int) -> Any:
    """Leaves `[T, B, ...]` as `[L, T, E, ...]`, to be kept with the lives."""
    return jax.tree.map(
        lambda x: jnp.moveaxis(x.reshape(x.shape[0], -1, envs, *x.shape[2:]), 1, 0), data
    )


def in_order(window: PyTree) -> Any:
    """What was kept, `[L, K, T, E, ...]`, as rollouts `[K, T, B, ...]`."""
    moved = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 2), window)
    return jax.tree.map(lambda x: x.reshape(*x.shape[:2], -1, *x.shape[4:]), moved)


def empty(seen: Any, lead: tuple[int, ...], T: int, envs: int) -> Experience:
    """Room for experience, leaves `[*lead, T, E, ...]`."""
    steps, timesteps = (*lead, T, envs), (*lead, T + 1, envs)
    return Experience(
        observation=jax.tree.map(lambda x: jnp.zeros((*timesteps, *x.shape), x.dtype), seen),
        first=jnp.zeros(timesteps, bool),
        action=jnp.zeros(steps, jnp.int32),
        reward=jnp.zeros(steps),
        discount=jnp.zeros(steps),
        valid=jnp.zeros(steps, bool),
        carry=(),
    )
