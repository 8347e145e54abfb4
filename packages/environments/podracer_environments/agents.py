"""Agents of one environment as rows of the batch, which learn one policy (parameter sharing, IPPO).

Drivers map an environment over rows. `AgentsAsRows` takes that map over: of each group of rows it
steps one game, with the actions of all, and gives every row the timestep of its agent. So each
agent of the library trains one policy from what its rows observe, under every driver.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer.checks import check_spec
from podracer.environment import evaluation_environment, sibling_key, wrap_features
from podracer.errors import WEIGHTED_SUM, ConfigError
from podracer.fields import static, struct
from podracer.types import EnvironmentSpec, EnvState, PyTree, TimeStep, action_mask


@struct
class GameState:
    """State of a game, the same in the rows of all its agents."""

    inner: EnvState
    finished: jax.Array  # bool [n]: agents whose episode has ended before the game's
    timed_out: jax.Array  # bool: the newest timestep was the game's end, so the next step restarts


@struct
class AgentsAsRows:
    """Environment of one agent, see `agents_as_rows`."""

    env: Any
    num_agents: int = static()
    share_rewards: bool = static(default=False)
    by_team: bool = static(default=False)

    def __post_init__(self) -> None:
        if type(self.num_agents) is not int or self.num_agents < 1:
            raise ConfigError(f"num_agents must be 1, 2, 3 and so on, not {self.num_agents!r}.")
        wrap_features(self, self.env, "check_agent", render=self._render)

    @property
    def spec(self) -> EnvironmentSpec:
        return self.env.spec

    def for_evaluation(self) -> AgentsAsRows:
        """Return the environment whose rows get the mean reward of all, to the end of the game."""
        return dataclasses.replace(self, env=evaluation_environment(self.env), by_team=True)

    def _render(self, state: GameState) -> np.ndarray:
        return self.env.render(state.inner)

    def reset(self, key: jax.Array) -> tuple[GameState, TimeStep]:
        return self._by_game(lambda keys: self._reset(keys[0]), key)

    def step(
        self, key: jax.Array, state: GameState, action: jax.Array
    ) -> tuple[GameState, TimeStep]:
        def step(keys: jax.Array, states: GameState, actions: jax.Array) -> Any:
            return self._step(keys[0], jax.tree.map(lambda x: x[0], states), actions)

        return self._by_game(step, key, state, action)

    def _reset(self, key: jax.Array) -> tuple[GameState, TimeStep]:
        inner, timesteps = self.env.reset(key)
        return GameState(inner, jnp.zeros(self.num_agents, bool), jnp.bool_(False)), timesteps

    def _step(self, key: jax.Array, game: GameState, actions: jax.Array) -> Any:
        """Return the game and the timesteps `[n, ...]` after actions `[n]`, with restarts."""
        inner, timesteps = self.env.step(key, game.inner, actions)
        if timesteps.reward.shape != (self.num_agents,):
            raise ConfigError(
                f"{self.spec.name}: rewards must be float32[{self.num_agents}], one for each "
                f"agent, but they are float32{list(timesteps.reward.shape)}: {WEIGHTED_SUM}."
            )
        first_game, first_timesteps = self._reset(sibling_key(key))
        ends = timesteps.last & ~game.finished
        finished = game.finished | ends
        is_terminal = ends & (timesteps.discount == 0)
        is_over, is_timeout = finished.all(), (ends & ~is_terminal).any()
        reward = jnp.where(game.finished, 0.0, timesteps.reward)
        if self.share_rewards or self.by_team:
            reward = jnp.broadcast_to(reward.mean(), reward.shape)
        if self.by_team:  # all rows end with the game
            ends = jnp.broadcast_to(is_over, finished.shape)
            is_terminal = ends & ~is_timeout
            timesteps = _with_actions(timesteps, finished)
        # An agent that is over has no part in the game: its row is cut until the game begins again.
        cut = game.finished & (not self.by_team)
        restarts = game.timed_out | (is_over & ~is_timeout)

        def choose(new: PyTree, old: PyTree) -> PyTree:
            return jax.tree.map(lambda n, o: jnp.where(restarts, n, o), new, old)

        timesteps = TimeStep(
            observation=choose(first_timesteps.observation, timesteps.observation),
            reward=jnp.where(game.timed_out | cut, 0.0, reward),
            discount=jnp.where(is_terminal & ~game.timed_out, 0.0, jnp.ones_like(reward)),
            first=restarts | cut,
            last=(ends | cut) & ~restarts,
        )
        new_game = GameState(inner, finished, is_over)
        return choose(first_game, new_game), timesteps

    def _by_game(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return a game's state and one row's timestep from `function` of all rows of the game."""
        n = self.num_agents

        @jax.custom_batching.custom_vmap
        def row(*args: Any) -> Any:
            """Play alone, as a trace of one row does: its teammates do as it does."""
            rows = jax.tree.map(lambda x: jnp.broadcast_to(x, (n, *x.shape)), args)
            state, timesteps = function(*rows)
            return state, jax.tree.map(lambda x: x[0], timesteps)

        @row.def_vmap
        def _(size: int, is_batched: Any, *args: Any) -> Any:
            if size % n:
                raise ConfigError(
                    f"{self.spec.name}: the {size} rows of a batch cannot be shared by games of "
                    f"{n} agents: take a multiple of {n} environments and evaluation episodes."
                )

            def group(x: jax.Array, is_batched: bool) -> jax.Array:
                x = x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
                return x.reshape(size // n, n, *x.shape[1:])

            states, timesteps = jax.vmap(function)(*jax.tree.map(group, args, tuple(is_batched)))
            states = jax.tree.map(lambda x: jnp.repeat(x, n, axis=0), states)
            timesteps = jax.tree.map(lambda x: x.reshape(size, *x.shape[2:]), timesteps)
            rows = (states, timesteps)
            return rows, jax.tree.map(lambda _: True, rows)

        return row(*args)


def _with_actions(timesteps: TimeStep, rows: jax.Array) -> TimeStep:
    """Allow all actions in the rows `[n]` that a game ignores: their masks may allow none."""
    if (mask := action_mask(timesteps.observation)) is None:
        return timesteps
    allowed = mask | rows[:, None]
    observation = jax.tree.map(lambda x: allowed if x is mask else x, timesteps.observation)
    return dataclasses.replace(timesteps, observation=observation)


def agents_as_rows(env: Any, num_agents: int, *, share_rewards: bool = False) -> AgentsAsRows:
    """Return an environment whose rows are the agents of a game, to be trained as one policy.

    `env` has the methods of a device environment over one game: `reset` returns its state and the
    timesteps `[n, ...]` of its agents, and `step` takes their actions `[n, ...]`; `spec` describes
    one agent. It only marks ends: an agent with `last` set is over, which cuts its row until the
    game ends with its last agent and begins again. Rows `i n` to `i n + n - 1` are one game, so
    numbers of environments and of evaluation episodes are multiples of `num_agents`.

    `share_rewards` gives every agent the mean reward of all. An evaluation always does so, and
    plays to the end of the game, so its returns belong to teams.
    """
    check_spec(env)
    return AgentsAsRows(env, num_agents, share_rewards)
