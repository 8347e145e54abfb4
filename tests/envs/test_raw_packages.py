"""Adapters of device suites beside the packages themselves, step by step with equal keys.

Those of packages that are not installed are skipped; JAXtari's is in `test_jaxtari.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer.envs import make
from podracer.types import ACTION_MASK, Continuous

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of the packages
    pytest.mark.usefixtures("lenient_ranks"),
]

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


# --- suites ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_octax_is_stepped_as_it_is():
    library = pytest.importorskip("octax.environments")
    raw, _ = library.create_environment("brix", render_mode="rgb_array")

    def reset(key: jax.Array) -> Any:
        state, frames, _ = raw.reset(key)
        return state, jnp.moveaxis(frames, 0, -1).swapaxes(0, 1)

    def step(key: jax.Array, state: Any, action: jax.Array) -> Any:
        state, frames, reward, terminal, timeout, _ = raw.step(state.replace(rng=key), action)
        return state, jnp.moveaxis(frames, 0, -1).swapaxes(0, 1), reward, terminal, timeout

    assert compare(make("octax:brix").inner, reset, step, 80) > 0


@pytest.mark.slow
@pytest.mark.timeout(900)  # its world takes long to compile
def test_craftax_is_stepped_as_it_is():
    library = pytest.importorskip("craftax.craftax_env")
    name = "Craftax-Classic-Symbolic-v1"
    raw = library.make_craftax_env_from_name(name, auto_reset=False)
    params = raw.default_params

    def reset(key: jax.Array) -> Any:
        observation, state = raw.reset_env(key, params)
        return state, observation

    def step(key: jax.Array, state: Any, action: jax.Array) -> Any:
        state = state.replace(state_rng=key)
        observation, state, reward, done, _ = raw.step_env(key, state, action, params)
        timeout = state.timestep >= params.max_timesteps
        return state, observation, reward, done & ~timeout, timeout

    compare(make(f"craftax:{name}").inner, reset, step, 100)


@pytest.mark.slow
def test_brax_is_stepped_as_it_is():
    name = "inverted_pendulum"  # others amplify what two programs round
    raw = pytest.importorskip("brax.envs").get_environment(name, backend="spring")

    def reset(key: jax.Array) -> Any:
        state = raw.reset(key)
        return (state, jnp.int32(0)), state.obs

    def step(key: jax.Array, state: Any, action: jax.Array) -> Any:
        inner, time = raw.step(state[0], action), state[1] + 1
        return (inner, time), inner.obs, inner.reward, inner.done == 1, time >= 30

    env = make(f"brax:{name},episode_length=30").inner
    assert compare(env, reset, step, 100) >= B
