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
from walk import slow

from podracer.envs import make
from podracer.envs.pgx import pgx
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


# --- games of two players -------------------------------------------------------------------------


def observed(state: Any) -> Any:
    return {"board": state.observation, ACTION_MASK: state.legal_action_mask}


def first_legal(key: jax.Array, game: Any, state: Any) -> jax.Array:
    return jnp.argmax(state.legal_action_mask).astype(jnp.int32)


@pytest.mark.parametrize("name", ["connect_four", slow("othello")])
def test_self_play_is_the_game_of_pgx(name):
    raw = pytest.importorskip("pgx").make(name)

    def reset(key: jax.Array) -> Any:
        state = raw.init(key)
        return state, observed(state)

    def step(key: jax.Array, state: Any, action: jax.Array) -> Any:
        after = raw.step(state, action, key)
        reward = after.rewards[state.current_player]
        return after, observed(after), reward, after.terminated, after.truncated

    assert compare(make(f"pgx:{name},opponent=self").inner, reset, step, 140) >= B


@pytest.mark.slow
@pytest.mark.parametrize("name", ["connect_four", "othello"])
def test_a_game_against_an_opponent_is_that_of_pgx_with_its_moves(name):
    raw = pytest.importorskip("pgx").make(name)

    def reply(state: Any, reward: jax.Array) -> Any:
        def is_opponents(carry: Any) -> jax.Array:
            return (carry[0].current_player == 1) & ~carry[0].terminated

        def move(carry: Any) -> Any:
            after = raw.step(carry[0], first_legal(carry[0], raw, carry[0]))
            return after, carry[1] + after.rewards[0]

        return jax.lax.while_loop(is_opponents, move, (state, reward))

    def reset(key: jax.Array) -> Any:
        state, _ = reply(raw.init(jax.random.split(key)[0]), jnp.float32(0))
        return state, observed(state)

    def step(key: jax.Array, state: Any, action: jax.Array) -> Any:
        after = raw.step(state, action)
        after, reward = reply(after, after.rewards[0])
        return after, observed(after), reward, after.terminated, after.truncated

    assert compare(pgx(name, first_legal).inner, reset, step, 80) >= B


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
