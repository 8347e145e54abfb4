"""The games of one player of pgx (Koyamada et al. 2023): MinAtar and 2048."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from podracer.environment import restart, transition
from podracer.envs.common import array_specs, check_known, import_optional, strongly_typed
from podracer.errors import ConfigError
from podracer.types import ACTION_MASK, Discrete, EnvironmentSpec, PyTree, TimeStep


@dataclasses.dataclass(frozen=True)
class Pgx:
    """One game, without restarts.

    The observation is a dictionary of `board` and `action_mask`; in MinAtar, where every action is
    legal, it is an array.
    """

    name: str

    def __post_init__(self) -> None:
        if (players := load_game(self.name)[0].num_players) != 1:
            raise ConfigError(f"pgx:{self.name} has {players} players: take a game of one or two.")

    @property
    def spec(self) -> EnvironmentSpec:
        return load_game(self.name)[1]

    def reset(self, key: jax.Array) -> tuple[PyTree, TimeStep]:
        env, _ = load_game(self.name)
        start_key, _ = jax.random.split(key)
        state = strongly_typed(env.init(start_key))
        return state, restart(observe(self.name, state))

    def step(self, key: jax.Array, state: PyTree, action: jax.Array) -> tuple[PyTree, TimeStep]:
        env, _ = load_game(self.name)
        move_key, _ = jax.random.split(key)
        state = strongly_typed(env.step(state, action, move_key))
        timestep = transition(
            observe(self.name, state),
            state.rewards[0],
            terminal=state.terminated,
            timeout=state.truncated,
        )
        return state, timestep


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
    state = jax.eval_shape(env.init, jax.random.key(0))
    observation = array_specs(observe(name, state))
    return env, EnvironmentSpec(f"pgx:{name}", observation, Discrete(int(env.num_actions)))
