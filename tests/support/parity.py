"""An adapter beside the package itself, step by step with equal keys."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.types import ACTION_MASK, Continuous

B = 8  # environments

Reset = Callable[[Any], Any]  # key -> (state, observation)
# (key, state, action) -> (state, observation, reward, terminal, timeout)
Step = Callable[[Any, Any, Any], Any]


def equal(got: Any, expected: Any) -> None:
    """Equal but for what two programs round in floats."""
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, 1e-4, 1e-4), got, expected)


def draw_actions(env: Any, key: jax.Array, observation: Any) -> jax.Array:
    space = env.spec.action
    if isinstance(space, Continuous):
        return jax.random.uniform(key, (B, space.size), minval=-1.0)
    mask = jnp.ones((B, space.num_actions), bool)
    mask = observation[ACTION_MASK] if isinstance(observation, dict) else mask
    return jax.random.categorical(key, jnp.where(mask, 0.0, -jnp.inf)).astype(jnp.int32)


@jax.jit
@jax.vmap
def select(done: jax.Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda x, y: jnp.where(done, x, y), new, old)


def compare(env: Any, raw_reset: Reset, raw_step: Step, steps: int) -> int:
    """Step both with equal keys and random actions; return how many episodes have ended."""
    functions = (env.reset, env.step, raw_reset, raw_step)
    reset, step, raw_reset, raw_step = (jax.jit(jax.vmap(f)) for f in functions)

    def begin(key: jax.Array) -> Any:
        keys = jax.random.split(key, B)
        (state, timestep), (raw, observation) = reset(keys), raw_reset(keys)
        equal(timestep.observation, observation)
        assert timestep.first.all()
        return state, raw, observation

    draw = jax.jit(functools.partial(draw_actions, env))
    current, ended = begin(jax.random.key(0)), 0
    for t in range(steps):
        keys = jax.random.split(jax.random.fold_in(jax.random.key(1), t), B + 2)
        state, raw, observation = current
        action = draw(keys[B], observation)
        state, timestep = step(keys[:B], state, action)
        raw, observation, reward, terminal, timeout = raw_step(keys[:B], raw, action)
        equal(timestep.observation, observation)
        equal(timestep.reward, np.asarray(reward, np.float32))
        equal(timestep.discount == 0, np.asarray(terminal, bool))
        equal(timestep.last, np.asarray(terminal, bool) | np.asarray(timeout, bool))
        ended += np.count_nonzero(timestep.last)
        current = state, raw, observation
        if timestep.last.any():
            current = select(timestep.last, begin(keys[B + 1]), current)
    return ended
