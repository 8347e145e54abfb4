"""Board games beside pgx itself, step by step with equal keys."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pgx
import pytest
from parity import B, compare
from walk import slow

from podracer.envs import make
from podracer.types import ACTION_MASK
from podracer_games.board import game

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # of the packages
    pytest.mark.usefixtures("lenient_ranks"),
]


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
