"""Opponents in games of two players that take turns."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from podracer.errors import ConfigError
from podracer.types import PyTree

HIDDEN_CARDS = ("kuhn_poker", "leduc_holdem")  # games whose state has what a player must not see
# A function of a key, a game of pgx and its state that returns a legal action, i32 [].
Opponent = Callable[[jax.Array, Any, PyTree], jax.Array]


def find_opponent(opponent: Opponent | str, game: str = "") -> Opponent:
    """Return an opponent by name, `random` or `minimax-DEPTH`; a function is returned as it is.

    Raises `ConfigError` for another name, and for a search where the `game` has dice or hidden
    cards.
    """
    if callable(opponent):
        return opponent
    name = str(opponent)  # an environment's option may be a number
    if name == "random":
        return random_move
    if match := re.fullmatch(r"minimax-([1-6])", name):
        _require_no_chance(game)
        return minimax_move(int(match[1]))
    raise ConfigError(
        f"there is no opponent {opponent!r}: take `random`, `minimax-1` to `minimax-6`, or for "
        "self-play the environment's `opponent=self`."
    )


def random_move(key: jax.Array, game: Any, state: PyTree) -> jax.Array:
    """Return a legal action, drawn uniformly."""
    logits = jnp.where(state.legal_action_mask, 0.0, -jnp.inf)
    return jax.random.categorical(key, logits).astype(jnp.int32)


@functools.cache
def minimax_move(plies: int) -> Opponent:
    """Return the opponent that searches `plies` moves ahead and draws among the best actions.

    Only rewards of these moves count: positions at its horizon are worth 0. It visits about
    A ** plies positions for A actions.
    """

    def move(key: jax.Array, game: Any, state: PyTree) -> jax.Array:
        values = action_values(game, state, plies)
        best = state.legal_action_mask & (values >= jnp.max(values))
        return jax.random.categorical(key, jnp.where(best, 0.0, -jnp.inf)).astype(jnp.int32)

    return move


def action_values(game: Any, state: PyTree, plies: int) -> jax.Array:
    """Return the minimax values `[A]` of all actions for the player who moves, -inf if illegal.

    Rewards of `plies` moves count, without a discount. Raises `ConfigError` for a game with dice or
    hidden cards.
    """
    _require_no_chance(game.id)
    key = jax.random.key(0)  # unused: a deterministic game draws nothing
    mover = state.current_player

    def value(action: jax.Array) -> jax.Array:
        next_state = game.step(state, action, key)
        reward = next_state.rewards[mover]
        if plies == 1:
            return reward
        best = jnp.max(action_values(game, next_state, plies - 1))
        turn = jnp.where(next_state.current_player == mover, 1.0, -1.0)
        return reward + jnp.where(next_state.terminated | next_state.truncated, 0.0, turn * best)

    values = jax.vmap(value)(jnp.arange(game.num_actions))
    return jnp.where(state.legal_action_mask, values, -jnp.inf)


def _require_no_chance(game: str) -> None:
    if game in ("backgammon", *HIDDEN_CARDS):
        raise ConfigError(
            f"minimax cannot look ahead in {game}, where dice or hidden cards decide: take "
            "`random`."
        )
