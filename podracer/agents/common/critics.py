"""Critics of students in lifetimes: values that only the meta-objective's advantages come from."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import optax

from podracer.agents.common.actor_critic import ParamsState
from podracer.agents.common.lifetimes import Experience, apply_by_lifetime, lifetime_means
from podracer.agents.common.optimizers import take_step
from podracer.networks import Network
from podracer.ops.returns import generalized_advantages
from podracer.types import Params


@dataclasses.dataclass(frozen=True)
class Critics:
    """Network, optimizer and hyperparameters that the critics of L lifetimes share."""

    network: Network
    optimizer: optax.GradientTransformation
    learning_rate: float | jax.Array
    discount: float | jax.Array
    gae_lambda: float | jax.Array

    def init(self, key: jax.Array) -> ParamsState:
        """Return an untrained critic."""
        params = self.network.init(key)
        return ParamsState(params, self.optimizer.init(params))

    def update(self, critics: ParamsState, data: Experience) -> tuple[ParamsState, jax.Array]:
        """Return the critics after one update, and normalized advantages `[T, B]` before it."""
        lifetimes = jax.tree.leaves(critics.params)[0].shape[0]

        def loss(params: Params) -> tuple[jax.Array, jax.Array]:
            heads = apply_by_lifetime(self.network, params, data.observation, data.first)
            values = heads["value"][..., 0]
            constants = jax.lax.stop_gradient(values)
            advantages = generalized_advantages(
                constants[:-1], constants[1:], data.reward, self.discount * data.discount,
                data.valid, self.gae_lambda,
            )  # fmt: skip
            errors = data.valid * (constants[:-1] + advantages - values[:-1])
            return 0.5 * jnp.sum(lifetime_means(errors**2, lifetimes)), advantages

        grads, advantages = jax.grad(loss, has_aux=True)(critics.params)
        normalized = _standardized(advantages, data.valid, lifetimes)
        critics = descend(self.optimizer, critics, grads, self.learning_rate)
        return critics, normalized


def _standardized(advantages: jax.Array, valid: jax.Array, lifetimes: int) -> jax.Array:
    """Return advantages `[T, B]` with zero mean and unit variance over each lifetime.

    Invalid ones do not count and become 0.
    """
    mask = valid.reshape(len(valid), lifetimes, -1)
    grouped = advantages.reshape(mask.shape)
    count = jnp.maximum(jnp.sum(mask, axis=(0, 2), keepdims=True), 1)
    mean = jnp.sum(mask * grouped, axis=(0, 2), keepdims=True) / count
    centered = mask * (grouped - mean)
    deviation = jnp.sqrt(jnp.sum(centered**2, axis=(0, 2), keepdims=True) / count)
    # The constant is of the size of rewards, so that noise well below them is not magnified.
    return (centered / (deviation + 1e-3)).reshape(advantages.shape)


def descend(
    optimizer: optax.GradientTransformation,
    states: ParamsState,
    grads: Params,
    learning_rate: float | jax.Array,
) -> ParamsState:
    """Return the states of L networks after one step of their optimizers each."""

    def descend_one(state: ParamsState, grads: Params) -> ParamsState:
        return ParamsState(
            *take_step(optimizer, state.params, state.optimizer_state, grads, learning_rate)
        )

    return jax.vmap(descend_one)(states, grads)
