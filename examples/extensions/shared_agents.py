"""Several agents that share one policy: each is a row of the batch, beside its teammates.

Drivers map an environment over the rows. `Team` takes that map over: of each group of rows it
steps the game once, with all their actions, and hands every row its own timestep. So any agent of
the library trains one policy for all, from what each of them observes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import podracer

SIZE, LIMIT, AGENTS = 7, 20, 2


@podracer.struct
class MeetingState:
    """State of the game."""

    positions: jax.Array  # i32 [n]
    time: jax.Array  # i32


@dataclasses.dataclass(frozen=True)
class Meeting:
    """Game of n agents on a line, who are paid when they meet: 1 each, less 0.02 for a step."""

    num_agents: int = AGENTS

    @property
    def spec(self) -> podracer.EnvironmentSpec:
        observation = podracer.ArraySpec((2 * SIZE,))
        return podracer.EnvironmentSpec("meeting", observation, podracer.Discrete(3))

    def reset(self, key: jax.Array) -> tuple[MeetingState, podracer.TimeStep]:
        """Return the state of the game, and the timesteps `[n, ...]` of its agents."""
        positions = jax.random.randint(key, (self.num_agents,), 0, SIZE)
        state = MeetingState(positions, jnp.int32(0))
        return state, jax.vmap(podracer.restart)(self.observe(state))

    def step(
        self, key: jax.Array, state: MeetingState, actions: jax.Array
    ) -> tuple[MeetingState, podracer.TimeStep]:
        """Return the same after the actions `[n]`: left, stay, right."""
        positions = jnp.clip(state.positions + actions - 1, 0, SIZE - 1)
        state = MeetingState(positions, state.time + 1)
        have_met = jnp.all(positions == positions[0])

        def transition(observation: jax.Array) -> podracer.TimeStep:
            return podracer.transition(
                observation,
                reward=jnp.where(have_met, 1.0, -0.02),
                terminal=have_met,
                timeout=state.time >= LIMIT,
            )

        return state, jax.vmap(transition)(self.observe(state))

    def observe(self, state: MeetingState) -> jax.Array:
        """Return where each agent is and where its teammates are, `[n, 2 SIZE]`."""
        places = jax.nn.one_hot(state.positions, SIZE)
        return jnp.concatenate([places, jnp.sum(places, axis=0, keepdims=True) - places], axis=-1)


@dataclasses.dataclass(frozen=True)
class Team:
    """Environment of one row; rows `i n` to `i n + n - 1` of a batch are the agents of a game."""

    game: Any
    num_agents: int = AGENTS

    @property
    def spec(self) -> podracer.EnvironmentSpec:
        return self.game.spec

    def reset(self, key: jax.Array) -> tuple[Any, podracer.TimeStep]:
        return self._by_game(lambda keys: self.game.reset(keys[0]), key)

    def step(self, key: jax.Array, state: Any, action: jax.Array) -> tuple[Any, podracer.TimeStep]:
        def step(keys: jax.Array, states: Any, actions: jax.Array) -> Any:
            return self.game.step(keys[0], jax.tree.map(lambda x: x[0], states), actions)

        return self._by_game(step, key, state, action)

    def _by_game(self, function: Callable[..., Any], *args: Any) -> Any:
        """Return a game's state and one row's timestep from `function` of all rows of the game."""
        n = self.num_agents

        @jax.custom_batching.custom_vmap
        def row(*args: Any) -> Any:
            """Play alone: its teammates do as it does."""
            rows = jax.tree.map(lambda x: jnp.broadcast_to(x, (n, *x.shape)), args)
            state, timesteps = function(*rows)
            return state, jax.tree.map(lambda x: x[0], timesteps)

        @row.def_vmap
        def _(size: int, is_batched: Any, *args: Any) -> Any:
            if size % n:
                raise podracer.ConfigError(f"a batch of {size} has no equal teams of {n} agents.")

            def group(x: jax.Array, is_batched: bool) -> jax.Array:
                x = x if is_batched else jnp.broadcast_to(x, (size, *x.shape))
                return x.reshape(size // n, n, *x.shape[1:])

            states, timesteps = jax.vmap(function)(*jax.tree.map(group, args, tuple(is_batched)))
            states = jax.tree.map(lambda x: jnp.repeat(x, n, axis=0), states)
            timesteps = jax.tree.map(lambda x: x.reshape(size, *x.shape[2:]), timesteps)
            rows = (states, timesteps)
            return rows, jax.tree.map(lambda _: True, rows)

        return row(*args)


def main(**overrides: Any) -> float:
    """Train both agents of a game as one policy; return the mean return of the last evaluation."""
    experiment = podracer.Experiment(
        recipe="meeting_ppo",
        environment=podracer.auto_reset(Team(Meeting())),
        agent=podracer.PPO(learning_rate=1e-3),
        driver=podracer.AnakinConfig(num_envs=64, rollout_length=32, updates_per_chunk=10),
        frames=204_800,
    )
    result = podracer.train(experiment, **overrides)
    assert result.evaluation is not None
    return float(result.evaluation.returns.mean())


if __name__ == "__main__":
    print(f"mean return {main():.2f}; the best possible is about 0.97")
