"""Random play in any environment of the device, as arrays, and checks of suites by it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.checks import check_environment
from podracer.envs import make
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


def check_contract(name: str) -> None:
    """Check an environment of a suite, which is a value and has its name."""
    env = make(name)
    spec = check_environment(env)
    assert spec.name == name
    assert env == make(name)
    assert hash(env) == hash(make(name))


def check_episodes(name: str, steps: int) -> None:
    """Play at random; if there are many steps, an episode must end."""
    env = make(name)
    timesteps, _ = play(env, steps, 16)  # impossible actions, too
    first, last = np.asarray(timesteps.first), np.asarray(timesteps.last)
    discount = np.asarray(timesteps.discount)
    assert first[0].all()
    assert set(np.unique(discount)) <= {0.0, 1.0}
    terminal = discount == 0
    assert (first[1:] == (terminal[1:] | last[:-1])).all()
    assert not (last & terminal).any()
    finite = [np.isfinite(np.asarray(x, np.float64)).all() for x in jax.tree.leaves(timesteps)]
    assert all(finite)
    if steps > 4:
        assert first[1:].any(), "no episode ended"
