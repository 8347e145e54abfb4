"""The games of pgx (Koyamada et al. 2023): MinAtar, 2048, and board games of two players."""

from __future__ import annotations

import dataclasses
import functools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from podracer.environment import AutoReset, auto_reset, restart, transition
from podracer.envs.common import array_specs, check_known, import_optional, strongly_typed
from podracer_games.opponents import Opponent, find_opponent, find_opponents, random_move
from podracer.errors import ConfigError
from podracer.fields import struct
from podracer.types import ACTION_MASK, Discrete, EnvironmentSpec, PyTree, TimeStep


def pgx(
    name: str,
    opponent: Opponent | str | tuple[Opponent | str, ...] = "random",
    evaluate_against: Opponent | str | None = None,
    opening_moves: int = 0,
) -> AutoReset:
    """Return the pgx game `name`, such as `minatar-breakout`, restarting by itself.

    In a game of two players the agent plays one, redrawn for each game, and `opponent` the other:
    `random`, `minimax-DEPTH` or a function. Of several, a tuple or names between plus signs, each
    game draws one. With `self` the agent moves for both, after up to `opening_moves` random moves.
    It is evaluated against the opponent `evaluate_against`, by default the one of training, and
    after self-play a random one. Raises `ConfigError` where pgx is not installed, for an unknown
    game or opponent, for more than two players, and for opening moves that are not of self-play.
    """
    if opponent == "self":
        evaluation_opponent = find_opponent(evaluate_against or "random", name)
        return auto_reset(SelfPlay(name, evaluation_opponent, opening_moves))
    if opening_moves:
        raise ConfigError("opening_moves are those of self-play: take them with opponent=self.")
    opponents = find_opponents(opponent, name)
    if opponents != (random_move,):
        require_two_players(name)
    if len(opponents) == 1 and evaluate_against is None:
        return auto_reset(Pgx(name, opponents[0]))
    evaluation = () if evaluate_against is None else (find_opponent(evaluate_against, name),)
    return auto_reset(PoolPlay(name, opponents, evaluation))


@dataclasses.dataclass(frozen=True)
class Pgx:
    """One game, without restarts.

    The observation is a dictionary of `board` and `action_mask`; in MinAtar, where every action is
    legal, it is an array.
    """

    name: str
    opponent: Opponent = random_move

    def __post_init__(self) -> None:
        load_game(self.name)

    @property
    def spec(self) -> EnvironmentSpec:
        return load_game(self.name)[1]

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
        if env.num_players == 1:
            return state, reward

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
    opening_moves: int = 0

    def __post_init__(self) -> None:
        require_two_players(self.name)
        if not (isinstance(self.opening_moves, int) and self.opening_moves >= 0):
            raise ConfigError(f"opening_moves must be at least 0, but it is {self.opening_moves}.")

    @property
    def spec(self) -> EnvironmentSpec:
        spec = load_game(self.name)[1]
        alternate = self.name not in ("backgammon", "leduc_holdem")
        return dataclasses.replace(spec, takes_turns=True, turns_alternate=alternate)

    def for_evaluation(self) -> Pgx:
        return Pgx(self.name, self.evaluation_opponent)

    def reset(self, key: jax.Array) -> tuple[PyTree, TimeStep]:
        env, _ = load_game(self.name)
        state = strongly_typed(env.init(key))
        if self.opening_moves:
            state = self._open(key, env, state)
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


@struct
class PoolState:
    """State of `PoolPlay`."""

    game: PyTree
    opponent: jax.Array  # i32 [], which of the opponents plays this game


@dataclasses.dataclass(frozen=True)
class PoolPlay:
    """One game of two players against one of several opponents, without restarts.

    Each game draws one, uniformly. `for_evaluation` is the game against `evaluation_opponents`, by
    default the same ones. Under `vmap` all opponents move in all games, and one move is taken.
    """

    name: str
    opponents: tuple[Opponent, ...]
    evaluation_opponents: tuple[Opponent, ...] = ()

    def __post_init__(self) -> None:
        require_two_players(self.name)

    @property
    def spec(self) -> EnvironmentSpec:
        return load_game(self.name)[1]

    def for_evaluation(self) -> PoolPlay:
        return PoolPlay(self.name, self.evaluation_opponents or self.opponents)

    def reset(self, key: jax.Array) -> tuple[PoolState, TimeStep]:
        draw_key, start_key = jax.random.split(key)
        opponent = jax.random.randint(draw_key, (), 0, len(self.opponents), jnp.int32)
        game, timestep = self._against(opponent).reset(start_key)
        return PoolState(game, opponent), timestep

    def step(
        self, key: jax.Array, state: PoolState, action: jax.Array
    ) -> tuple[PoolState, TimeStep]:
        game, timestep = self._against(state.opponent).step(key, state.game, action)
        return PoolState(game, state.opponent), timestep

    def _against(self, number: jax.Array) -> Pgx:
        """Return the game against the opponent of a number, i32 []."""

        def move(key: jax.Array, game: Any, state: PyTree) -> jax.Array:
            moves = [partial(opponent, key, game) for opponent in self.opponents]
            return jax.lax.switch(number, moves, state)

        return Pgx(self.name, move)


def require_two_players(name: str) -> None:
    """Raise `ConfigError` for a game of one player."""
    if load_game(name)[0].num_players != 2:
        raise ConfigError(f"pgx:{name} has one player: it needs no opponent.")


def observe(name: str, state: PyTree) -> PyTree:
    """Return what the player who is to move observes in a state of a game."""
    if name.startswith("minatar"):
        return state.observation
    return {"board": state.observation, ACTION_MASK: state.legal_action_mask}


@functools.cache
def load_game(name: str) -> tuple[Any, EnvironmentSpec]:
    """Return a game of pgx by name and its specification; `ConfigError` if there is none."""
    library = import_optional("pgx", f"pgx:{name}", "pgx")
    check_known(name, library.available_envs(), "pgx has no game")
    with jax.ensure_compile_time_eval():
        env = library.make(name)
    if env.num_players > 2:
        raise ConfigError(f"pgx:{name} has {env.num_players} players; one or two are possible.")
    state = jax.eval_shape(env.init, jax.random.key(0))
    observation = array_specs(observe(name, state))
    return env, EnvironmentSpec(f"pgx:{name}", observation, Discrete(int(env.num_actions)))
