"""Matches between trained policies and opponents, in the games of two players of pgx."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from podracer.agent import Blueprint, policy_params
from podracer.devices.mesh import fetch
from podracer.environment import AutoReset, AutoResetState, auto_reset
from podracer.envs.common import strongly_typed
from podracer.errors import ConfigError
from podracer.types import PyTree, TimeStep
from podracer_games.board import SelfPlay, load_game
from podracer_games.model import WithModel
from podracer_games.one_player import observe
from podracer_games.opponents import find_opponent
from podracer_games.ratings import Ratings, rate

Move = Callable[[PyTree, jax.Array, Any, PyTree], jax.Array]
"""A function of parameters, a key, a game of pgx and its state that returns a legal action."""


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


def trained_move(name: str, blueprint: Blueprint, env: Any, *, sampled: bool) -> Move:
    """Return the moves of an agent, called `name`, that learned in `env`.

    The first raises `ConfigError` for an agent with memory: a player sees a position only. An agent
    that plans in the game does so for both players, whomever it trained against.
    """
    game_name, shows_state = find_game_name(env), isinstance(env, WithModel)
    if shows_state:
        spec = WithModel(auto_reset(SelfPlay(game_name))).spec
        blueprint = dataclasses.replace(blueprint, spec=spec)
    agent = blueprint.build()

    def move(params: PyTree, key: jax.Array, game: Any, position: PyTree) -> jax.Array:
        observation = observe(game_name, position)
        if shows_state:
            observation = {
                "observation": observation,
                "state": AutoResetState(position, jnp.bool_(False)),
            }
        rows = jax.tree.map(lambda x: x[None], observation)
        no = jnp.zeros(1, bool)
        timestep = TimeStep(rows, jnp.zeros(1), jnp.ones(1), no, no)
        memory = agent.carry(1)
        action, _, new_memory = agent.act(params, memory, timestep, key[None], sampled)
        leaves = map(jax.tree.leaves, (memory, new_memory))
        if any(x is not y for x, y in zip(*leaves, strict=True)):
            raise ConfigError(
                f"{name} remembers the game: take an agent whose network has no memory."
            )
        return action[0]

    return move


def find_game_name(env: Any) -> str:
    """Return the name of an environment's game. Raises `ConfigError` if it has not two players."""
    inner = env.environment if isinstance(env, WithModel) else env
    name = getattr(inner.inner, "name", "") if isinstance(inner, AutoReset) else ""
    if not env.spec.name.startswith("game:"):
        raise ConfigError(f"matches need a board game, and not {env.spec.name}.")
    return name


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
