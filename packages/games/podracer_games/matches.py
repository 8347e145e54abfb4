"""Matches between trained policies and opponents, in the games of two players of pgx."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracer.agent import Blueprint, policy_params
from podracer.devices.mesh import fetch
from podracer.envs.common import strongly_typed
from podracer_games.opponents import find_opponent
from podracer_games.board import load_game
from podracer.errors import ConfigError
from podracer_games.moves import Move, find_game_name, trained_move
from podracer_games.ratings import Ratings, rate
from podracer.types import PyTree


class Player(NamedTuple):
    """A player of a game: a trained policy, or an opponent with a name."""

    name: str
    move: Move
    params: PyTree = ()
    """Arguments of the compiled games, so that equal networks share one program."""


class MatchResults(NamedTuple):
    """Results of matches between all pairs of players, arrays `[players, players]`."""

    players: tuple[str, ...]
    games: np.ndarray
    """Number of games of each pair."""
    wins: np.ndarray
    """Number of games that the player of the row won against that of the column."""
    draws: np.ndarray
    ratings: Ratings

    @property
    def scores(self) -> np.ndarray:
        """Points of the player of the row: 1 for a win, 1/2 for a draw."""
        return self.wins + 0.5 * self.draws


def trained_player(
    name: str, blueprint: Blueprint, env: Any, state: Any, *, sampled: bool
) -> Player:
    """Return the player of an agent at a learner's state, which it learned in `env`.

    Its first move raises `ConfigError` for an agent with memory: a player sees a position only.
    """
    move = trained_move(name, blueprint, env, sampled=sampled)
    return Player(name, move, policy_params(blueprint.build(), state))


def check_player(name: str, blueprint: Blueprint, env: Any) -> None:
    """Raise `ConfigError` if an agent that learns in `env` cannot play matches; compute nothing."""
    game, _ = load_game(find_game_name(env))

    def first_move(key: jax.Array) -> jax.Array:
        state = blueprint.build().init(key, 1)
        player = trained_player(name, blueprint, env, state, sampled=True)
        return player.move(player.params, key, game, game.init(key))

    jax.eval_shape(first_move, jax.random.key(0))


def opponent_player(name: str) -> Player:
    """Return the player of an opponent, `random` or `minimax-DEPTH`."""
    opponent = find_opponent(name)
    return Player(name, lambda params, key, game, position: opponent(key, game, position))


def common_game(environments: Sequence[Any]) -> str:
    """Return the game that all environments have in common.

    Raises `ConfigError` if they are of several games, or of something else.
    """
    names = sorted({find_game_name(env) for env in environments})
    if len(names) > 1:
        raise ConfigError(f"players of one match must know the same game, not {', '.join(names)}.")
    return names[0]


def play_matches(game_name: str, players: Sequence[Player], games: int, seed: int) -> MatchResults:
    """Let each pair of players play so many games, and rate the players.

    Who moves first is drawn for each game. Equal arguments give the same games.
    """
    num = len(players)
    wins, draws = np.zeros((num, num), int), np.zeros((num, num), int)
    play = make_play_games(game_name, players, games)
    for i, j in itertools.combinations(range(num), 2):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), i), j)
        outcomes = fetch(play(i, j, key))
        wins[i, j], wins[j, i] = (outcomes > 0).sum(), (outcomes < 0).sum()
        draws[i, j] = draws[j, i] = (outcomes == 0).sum()
    counts = games * (1 - np.eye(num, dtype=int))
    ratings = rate(wins + 0.5 * draws, counts)
    return MatchResults(tuple(player.name for player in players), counts, wins, draws, ratings)


def make_play_games(
    game_name: str, players: Sequence[Player], games: int
) -> Callable[[int, int, jax.Array], jax.Array]:
    """Return the function of two players' numbers and a key that plays their games.

    It returns the outcomes for the first of them, f32 `[games]`: 1, 0 or -1, however large the
    game's rewards are. One program plays all pairs.
    """
    game, _ = load_game(game_name)
    params = [player.params for player in players]
    moves = [
        lambda params, key, position, i=i: players[i].move(params[i], key, game, position)
        for i in range(len(players))
    ]

    def play(first: jax.Array, second: jax.Array, params: PyTree, key: jax.Array) -> jax.Array:
        start_key, key = jax.random.split(key)

        def move(carry: tuple[Any, ...]) -> tuple[Any, ...]:
            position, outcome, key = carry
            key, move_key, step_key = jax.random.split(key, 3)
            actions = [
                jax.lax.switch(player, moves, params, move_key, position)
                for player in (first, second)
            ]
            action = jnp.stack(actions)[position.current_player]
            position = strongly_typed(game.step(position, action, step_key))
            return position, outcome + position.rewards[0], key

        def goes_on(carry: tuple[Any, ...]) -> jax.Array:
            return ~(carry[0].terminated | carry[0].truncated)

        position = strongly_typed(game.init(start_key))  # draws who begins
        _, outcome, _ = jax.lax.while_loop(goes_on, move, (position, jnp.zeros(()), key))
        return jnp.sign(outcome)

    @jax.jit
    def play_all(first: jax.Array, second: jax.Array, params: PyTree, key: jax.Array) -> jax.Array:
        # Not under vmap, so that the two players alone are computed.
        return jax.vmap(partial(play, first, second, params))(jax.random.split(key, games))

    return lambda first, second, key: play_all(first, second, params, key)
