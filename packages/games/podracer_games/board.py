"""Games of pgx (Koyamada et al. 2023): of two players, against an opponent or by self-play."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from podracer.environment import AutoReset, auto_reset, restart, transition
from podracer.envs.common import strongly_typed
from podracer.errors import ConfigError
from podracer.fields import bounded, check_ranges
from podracer.types import EnvironmentSpec, PyTree, TimeStep
from podracer_games import one_player
from podracer_games.one_player import Pgx, observe
from podracer_games.opponents import Opponent, find_opponent, random_move


def game(
    name: str,
    opponent: Opponent | str = "random",
    evaluate_against: Opponent | str | None = None,
    opening_moves: int = 0,
) -> AutoReset:
    """Return a board game of two players of pgx: game:connect_four,opponent=self.

    The agent plays one player, redrawn for each game, and `opponent` the other: `random`,
    `minimax-DEPTH` or a function. With `self` the agent moves for both, after up to `opening_moves`
    random moves. It is evaluated against the opponent `evaluate_against`, by default the one of
    training, and after self-play a random one. Raises `ConfigError` where pgx is not installed, for
    an unknown game or opponent, for a game that has not two players, and for opening moves that are
    not of self-play.
    """
    if opponent == "self":
        evaluation_opponent = find_opponent(evaluate_against or "random", name)
        return auto_reset(SelfPlay(name, evaluation_opponent, opening_moves))
    if opening_moves:
        raise ConfigError("opening_moves are those of self-play: take them with opponent=self.")
    evaluation = None if evaluate_against is None else find_opponent(evaluate_against, name)
    return auto_reset(Game(name, find_opponent(opponent, name), evaluation))


def pgx(name: str, **options: Any) -> AutoReset:
    """Return a game of one player of pgx, such as `pgx:minatar-breakout`.

    One of two players is made as by `game`. Raises `ConfigError` for an unknown game.
    """
    if one_player.load_game(name)[0].num_players == 2:
        return game(name, **options)
    return auto_reset(Pgx(name, **options))


@dataclasses.dataclass(frozen=True)
class Game:
    """One game against an opponent, without restarts.

    The observation is a dictionary of `board` and `action_mask`. `for_evaluation` is the game
    against `evaluation_opponent`, by default the same one.
    """

    name: str
    opponent: Opponent = random_move
    evaluation_opponent: Opponent | None = None

    def __post_init__(self) -> None:
        load_game(self.name)

    @property
    def spec(self) -> EnvironmentSpec:
        return load_game(self.name)[1]

    def for_evaluation(self) -> Game:
        return Game(self.name, self.evaluation_opponent or self.opponent)

    def reset(self, key: jax.Array) -> tuple[PyTree, TimeStep]:
        env, _ = load_game(self.name)
        start_key, move_key = jax.random.split(key)
        state, _ = self._opponent_turn(move_key, strongly_typed(env.init(start_key)), jnp.zeros(()))
        return state, restart(observe(self.name, state))

    def step(self, key: jax.Array, state: PyTree, action: jax.Array) -> tuple[PyTree, TimeStep]:
        env, _ = load_game(self.name)
        move_key, opponent_key = jax.random.split(key)
        state = strongly_typed(env.step(state, action, move_key))
        state, reward = self._opponent_turn(opponent_key, state, state.rewards[0])
        timestep = transition(
            observe(self.name, state), reward, terminal=state.terminated, timeout=state.truncated
        )
        return state, timestep

    def _opponent_turn(
        self, key: jax.Array, state: PyTree, reward: jax.Array
    ) -> tuple[PyTree, jax.Array]:
        """Let the opponent move until it is the agent's turn; add the rewards of its moves."""
        env, _ = load_game(self.name)

        def is_opponent_turn(carry: tuple[Any, ...]) -> jax.Array:
            _, state, _ = carry
            return (state.current_player != 0) & ~(state.terminated | state.truncated)

        def move(carry: tuple[Any, ...]) -> tuple[Any, ...]:
            key, state, reward = carry
            key, choose_key, step_key = jax.random.split(key, 3)
            action = self.opponent(choose_key, env, state)
            state = strongly_typed(env.step(state, action, step_key))
            return key, state, reward + state.rewards[0]

        _, state, reward = jax.lax.while_loop(is_opponent_turn, move, (key, state, reward))
        return state, reward


@dataclasses.dataclass(frozen=True)
class SelfPlay:
    """One game of two players in which the agent moves for both, without restarts.

    Every timestep is seen by the player who is to move, and a reward belongs to the player who has
    just moved. Where the turn passes to the other player the discount is -1: what is good for one
    is as bad for the other, so that every agent's returns, advantages and searches belong to the
    player who moves. The sum of a whole game's rewards mixes both players and means nothing.
    `for_evaluation` is the game against an opponent.

    A game begins with random moves, so that positions differ however certain the policy is; their
    number is drawn uniformly from 0 to `opening_moves`. A move that would end the game is not made.
    """

    name: str
    evaluation_opponent: Opponent = random_move
    opening_moves: int = bounded(0)

    def __post_init__(self) -> None:
        check_ranges(self, "")
        load_game(self.name)

    @property
    def spec(self) -> EnvironmentSpec:
        spec = load_game(self.name)[1]
        alternate = self.name not in ("backgammon", "leduc_holdem")
        return dataclasses.replace(spec, takes_turns=True, turns_alternate=alternate)

    def for_evaluation(self) -> Game:
        return Game(self.name, self.evaluation_opponent)

    def reset(self, key: jax.Array) -> tuple[PyTree, TimeStep]:
        env, _ = load_game(self.name)
        if not self.opening_moves:
            state = strongly_typed(env.init(key))
        else:
            start_key, opening_key = jax.random.split(key)
            state = self._open(opening_key, env, strongly_typed(env.init(start_key)))
        return state, restart(observe(self.name, state))

    def _open(self, key: jax.Array, env: Any, state: PyTree) -> PyTree:
        """Return the state after a random number of random moves."""
        number_key, moves_key = jax.random.split(key)
        number = jax.random.randint(number_key, (), 0, self.opening_moves + 1)

        def move(i: jax.Array, state: PyTree) -> PyTree:
            choose_key, step_key = jax.random.split(jax.random.fold_in(moves_key, i))
            action = random_move(choose_key, env, state)
            next_state = strongly_typed(env.step(state, action, step_key))
            goes_on = (i < number) & ~(next_state.terminated | next_state.truncated)
            return jax.tree.map(lambda new, old: jnp.where(goes_on, new, old), next_state, state)

        return jax.lax.fori_loop(0, self.opening_moves, move, state)

    def step(self, key: jax.Array, state: PyTree, action: jax.Array) -> tuple[PyTree, TimeStep]:
        env, _ = load_game(self.name)
        mover = state.current_player
        state = strongly_typed(env.step(state, action, key))
        timestep = transition(
            observe(self.name, state),
            state.rewards[mover],
            terminal=state.terminated,
            timeout=state.truncated,
        )
        turn = jnp.where(state.current_player == mover, 1.0, -1.0)
        return state, dataclasses.replace(timestep, discount=turn * timestep.discount)


@functools.cache
def load_game(name: str) -> tuple[Any, EnvironmentSpec]:
    """Return a game of pgx and its specification; `ConfigError` if it has not two players."""
    env, spec = one_player.load_game(name)
    if env.num_players == 1:
        raise ConfigError(f"{name} has one player: it is pgx:{name}.")
    if env.num_players > 2:
        raise ConfigError(f"{name} has {env.num_players} players: take a game of two.")
    return env, dataclasses.replace(spec, name=f"game:{name}")
