"""Random play in any environment of the device, as arrays."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from podracer.types import Discrete, EnvironmentSpec, MultiDiscrete


def random_actions(spec: EnvironmentSpec, key: jax.Array, num: int) -> jax.Array:
    if isinstance(spec.action, Discrete):
        return jax.random.randint(key, (num,), 0, spec.action.num_actions)
    if isinstance(spec.action, MultiDiscrete):
        sizes = jnp.array(spec.action.num_actions)
        return jax.random.randint(key, (num, spec.action.size), 0, sizes[None])
    low, high = jnp.array(spec.action.low), jnp.array(spec.action.high)
    return jax.random.uniform(key, (num, spec.action.size), minval=low[None], maxval=high[None])


def play(env: Any, steps: int, num: int, policy: Any = None, seed: int = 0) -> Any:
    """Timesteps `[steps + 1, num]` and the actions between them `[steps, num]`, in numpy."""

    def act(key: jax.Array, timestep: Any) -> jax.Array:
        if policy is None:
            return random_actions(env.spec, key, num)
        return jax.vmap(policy)(timestep)

    def body(carry: Any, key: jax.Array) -> Any:
        state, timestep = carry
        act_key, step_key = jax.random.split(key)
        action = act(act_key, timestep)
        state, timestep = jax.vmap(env.step)(jax.random.split(step_key, num), state, action)
        return (state, timestep), (timestep, action)

    def run(key: jax.Array) -> Any:
        state, opening = jax.vmap(env.reset)(jax.random.split(key, num))
        keys = jax.random.split(jax.random.fold_in(key, 1), steps)
        _, (rest, actions) = jax.lax.scan(body, (state, opening), keys)
        return jax.tree.map(lambda x, y: jnp.concatenate([x[None], y]), opening, rest), actions

    return jax.device_get(jax.jit(run)(jax.random.key(seed)))
