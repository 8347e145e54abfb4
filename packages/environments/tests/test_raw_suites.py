"""Adapters beside the suites themselves, step by step with equal keys.

Those of suites that are not installed are skipped; JAXtari's is in `test_jaxtari.py`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from parity import B, compare

from podracer.envs import make

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of the suites
    pytest.mark.usefixtures("lenient_ranks"),
]


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
