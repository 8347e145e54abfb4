"""Board games beside pgx itself, step by step with equal keys."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pgx
import pytest
from walk import slow

from podracer.envs import make
from podracer.types import ACTION_MASK
from podracer_games.board import game

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
    logits = jnp.where(observation[ACTION_MASK], 0.0, -jnp.inf)
    return jax.random.categorical(key, logits).astype(jnp.int32)


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


def observed(state: Any) -> Any:
    return {"board": state.observation, ACTION_MASK: state.legal_action_mask}


def first_legal(key: jax.Array, game: Any, state: Any) -> jax.Array:
    return jnp.argmax(state.legal_action_mask).astype(jnp.int32)


@pytest.mark.parametrize("name", ["connect_four", slow("othello")])
def test_self_play_is_the_game_of_pgx(name):
    raw = pgx.make(name)

    def reset(key: jax.Array) -> Any:
        state = raw.init(key)
        return state, observed(state)

    def step(key: jax.Array, state: Any, action: jax.Array) -> Any:
        after = raw.step(state, action, key)
        reward = after.rewards[state.current_player]
        return after, observed(after), reward, after.terminated, after.truncated

    assert compare(make(f"game:{name},opponent=self").inner, reset, step, 140) >= B


@pytest.mark.slow
@pytest.mark.parametrize("name", ["connect_four", "othello"])
def test_a_game_against_an_opponent_is_that_of_pgx_with_its_moves(name):
    raw = pgx.make(name)

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

    assert compare(game(name, first_legal).inner, reset, step, 80) >= B
