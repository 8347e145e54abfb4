"""The games of pgx (Koyamada et al. 2023): MinAtar, 2048, and board games against an opponent."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from podracer.environment import AutoReset, auto_reset, restart, transition
from podracer.envs.common import array_specs, import_optional, strongly_typed
from podracer.io.names import nearest
from podracer.types import ACTION_MASK, ConfigError, Discrete, EnvironmentSpec, PyTree, TimeStep

# A function of a key, an observation [...] and a mask [A] of legal moves that returns an action.
Opponent = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def random_opponent(key: jax.Array, observation: jax.Array, legal: jax.Array) -> jax.Array:
    """Return a legal move, drawn uniformly."""
    return jax.random.categorical(key, jnp.where(legal, 0.0, -jnp.inf)).astype(jnp.int32)


def pgx(name: str, opponent: Opponent = random_opponent) -> AutoReset:
    """Return the pgx game `name`, such as `minatar-breakout`, restarting by itself.

    In a game of two players the agent plays one, redrawn for each game, and `opponent` the
    other. Raises `ConfigError` where pgx is not installed, for an unknown game and for more than
    two players.
    """
    return auto_reset(Pgx(name, opponent))


@dataclasses.dataclass(frozen=True)
class Pgx:
    """One game, without restarts.

    The observation is a dictionary of `board` and `action_mask`; in MinAtar, where every action is
    legal, it is an array.
    """

    name: str
    opponent: Opponent = random_opponent

    def __post_init__(self) -> None:
        _load(self.name)

    @property
    def spec(self) -> EnvironmentSpec:
        return _load(self.name)[1]

    def reset(self, key: jax.Array) -> tuple[PyTree, TimeStep]:
        env, _ = _load(self.name)
        start_key, move_key = jax.random.split(key)
        state, _ = self._opponent_turn(move_key, strongly_typed(env.init(start_key)), jnp.zeros(()))
        return state, restart(_observe(self.name, state))

    def step(self, key: jax.Array, state: PyTree, action: jax.Array) -> tuple[PyTree, TimeStep]:
        env, _ = _load(self.name)
        move_key, opponent_key = jax.random.split(key)
        state = strongly_typed(env.step(state, action, move_key))
        state, reward = self._opponent_turn(opponent_key, state, state.rewards[0])
        timestep = transition(
            _observe(self.name, state), reward, terminal=state.terminated, timeout=state.truncated
        )
        return state, timestep

    def _opponent_turn(
        self, key: jax.Array, state: PyTree, reward: jax.Array
    ) -> tuple[PyTree, jax.Array]:
        """Let the opponent move until it is the agent's turn; add the rewards of its moves."""
        env, _ = _load(self.name)
        if env.num_players == 1:
            return state, reward

        def is_opponent_turn(carry: tuple[Any, ...]) -> jax.Array:
            _, state, _ = carry
            return (state.current_player != 0) & ~(state.terminated | state.truncated)

        def move(carry: tuple[Any, ...]) -> tuple[Any, ...]:
            key, state, reward = carry
            key, choose_key, step_key = jax.random.split(key, 3)
            legal = state.legal_action_mask
            action = self.opponent(choose_key, state.observation, legal)
            state = strongly_typed(env.step(state, action, step_key))
            return key, state, reward + state.rewards[0]

        _, state, reward = jax.lax.while_loop(is_opponent_turn, move, (key, state, reward))
        return state, reward


def _observe(name: str, state: PyTree) -> PyTree:
    if name.startswith("minatar"):
        return state.observation
    return {"board": state.observation, ACTION_MASK: state.legal_action_mask}


@functools.cache
def _load(name: str) -> tuple[Any, EnvironmentSpec]:
    library = import_optional("pgx", f"pgx:{name}", "pgx")
    if name not in library.available_envs():
        raise ConfigError(f"pgx has no game {name!r}: {nearest(name, library.available_envs())}")
    with jax.ensure_compile_time_eval():
        env = library.make(name)
    if env.num_players > 2:
        raise ConfigError(f"pgx:{name} has {env.num_players} players; one or two are possible.")
    state = jax.eval_shape(env.init, jax.random.key(0))
    observation = array_specs(_observe(name, state))
    return env, EnvironmentSpec(f"pgx:{name}", observation, Discrete(int(env.num_actions)))
