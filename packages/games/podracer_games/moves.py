"""Trained policies as opponents in games of two players: in matches, and frozen, to train against.

`pgx:GAME,opponent=RUN` names a run, `RUN:POD` a pod of a sweep, `RUN/checkpoints/UPDATES` a
checkpoint; several stand between plus signs. The parameters are constants of the compiled program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from podracer.agent import Blueprint
from podracer.environment import AutoReset, AutoResetState, auto_reset
from podracer_games.model import WithModel
from podracer_games.opponents import find_opponent
from podracer_games.board import SelfPlay, load_game, observe
from podracer.errors import ConfigError
from podracer.io.paths import user_path
from podracer.types import PyTree, TimeStep

Move = Callable[[PyTree, jax.Array, Any, PyTree], jax.Array]
"""A function of parameters, a key, a game of pgx and its state that returns a legal action."""


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
    if not env.spec.name.startswith("pgx:") or load_game(name)[0].num_players != 2:
        raise ConfigError(f"matches need a game of two players of pgx, and not {env.spec.name}.")
    return name


def find_run(name: str) -> tuple[Path | None, int | None]:
    """Return the directory and the pod that a name, `RUN` or `RUN:POD`, means, None for neither."""
    name = str(user_path(name))
    directory, _, pod = name.rpartition(":")
    if not _is_named(name) and Path(name).is_dir():
        return Path(name), None
    if pod.isdecimal() and directory and Path(directory).is_dir():
        return Path(directory), int(pod)
    return None, None


def _is_named(name: str) -> bool:
    try:
        find_opponent(name)
    except ConfigError:
        return False
    return True
