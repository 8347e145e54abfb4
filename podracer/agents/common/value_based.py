"""What value-based agents share: a network of action values, how it explores, its target copy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax

from podracer.agents.common import actor_critic
from podracer.networks import Head, Network, NetworkBuilder
from podracer.ops.random import random_uniform
from podracer.types import (
    ConfigError,
    Discrete,
    EnvironmentSpec,
    Metrics,
    Params,
    PyTree,
)


def discrete(spec: EnvironmentSpec | None) -> Discrete:
    """Its discrete actions, or `ConfigError`."""
    spec = actor_critic.require_spec(spec)
    if not isinstance(spec.action, Discrete):
        raise ConfigError(f"the agent needs discrete actions; {spec.name} has continuous ones.")
    return spec.action


def build(
    network: NetworkBuilder, spec: EnvironmentSpec | None, size: int, dueling: bool, noisy: bool
) -> Network:
    """Heads of `size` numbers for each action; and of the state alone, for dueling networks."""
    heads = {"advantage": Head(discrete(spec).num_actions * size, noisy=noisy)}
    if dueling:
        heads["value"] = Head(size, noisy=noisy)
    return network.build(actor_critic.require_spec(spec).observation, heads)


def combined(outputs: dict[str, jax.Array], size: int) -> jax.Array:
    """The outputs of the heads as `[T, B, A, Z]`. Source: Wang et al. 2016, equation 9."""
    advantage = outputs["advantage"]
    advantage = advantage.reshape(*advantage.shape[:-1], -1, size)
    if "value" not in outputs:
        return advantage
    return outputs["value"][..., None, :] + advantage - advantage.mean(-2, keepdims=True)


def of_action(values: jax.Array, action: jax.Array) -> jax.Array:
    """Those `[*b, Z]` of one action out of `[*b, A, Z]`."""
    # A one-hot product: its gradient is a product too, where a gather's is a slow scatter.
    chosen = jax.nn.one_hot(action, values.shape[-2])
    return jnp.sum(values * chosen[..., None], axis=-2)


# --- exploration ---------------------------------------------------------------------------------


def exponents(ladder: float | jax.Array, num_envs: int) -> jax.Array:
    """What each environment raises epsilon to, `[B]`. Source: Horgan et al. 2018, section 4.1."""
    return 1.0 + ladder * jnp.arange(num_envs) / max(1, num_envs - 1)


def epsilon(last: float | jax.Array, explored: jax.Array) -> jax.Array:
    """From 1 down to `last`, linearly."""
    return 1.0 + (last - 1.0) * explored


def epsilon_greedy(values: jax.Array, keys: jax.Array, epsilon: jax.Array) -> jax.Array:
    """Actions i32 `[B]` from values `[B, A]`: the best, or with probability `epsilon` any that is
    allowed, see `actor_critic.mask_logits`."""
    possible = jnp.cumsum(values > -1e8, axis=-1)  # how many, up to each action
    uniform = random_uniform(keys)
    # Where it is below epsilon it is evenly spread there, and chooses the action as well.
    within = uniform / jnp.maximum(epsilon, 1e-6)
    number = jnp.minimum(jnp.int32(within * possible[:, -1]), possible[:, -1] - 1)
    anything = jnp.sum(possible <= number[:, None], axis=-1, dtype=jnp.int32)
    best = jnp.argmax(values, axis=-1).astype(jnp.int32)
    return jnp.where(uniform < epsilon, anything, best)


def noise_keys(keys: jax.Array) -> jax.Array:
    """Keys for noisy heads, apart from those that choose actions."""
    return jax.vmap(lambda key: jax.random.fold_in(key, 1))(keys)


# --- parameters and their copy -------------------------------------------------------------------


def init(params: Params, optimizer: optax.GradientTransformation) -> PyTree:
    """Parameters, their optimizer's state, their copy that targets are made with, and a counter."""
    return {
        "params": params,
        "optimizer": optimizer.init(params),
        "target": jax.tree.map(jnp.copy, params),
        "updates": jnp.int32(0),
    }


def apply_gradients(
    optimizer: optax.GradientTransformation, shared: PyTree, grads: Params, period: int
) -> tuple[PyTree, Metrics]:
    """One optimizer step, and a copy to the target every `period` updates."""
    learner = actor_critic.ParamsState(shared["params"], shared["optimizer"])
    learner, metrics = actor_critic.optimizer_step(optimizer, learner, grads)
    updates = shared["updates"] + 1
    target = optax.periodic_update(learner.params, shared["target"], updates, period)
    new = {"params": learner.params, "optimizer": learner.optimizer_state, "target": target}
    return {**shared, **new, "updates": updates}, metrics
