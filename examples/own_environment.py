"""An environment of your own: reach the goal on a 5x5 board, trained with PPO in a few seconds.

An environment is a specification and two pure functions over one instance. It marks its ends only,
a true terminal at the goal and a time-out after 20 steps; `auto_reset` makes it restart by itself.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import podracer

SIZE, LIMIT = 5, 20
MOVES = ((0, 1), (0, -1), (1, 0), (-1, 0))


@podracer.struct
class BoardState:
    """Everything that the next step depends on. No random key: `step` is given one."""

    position: jax.Array  # i32 [2]
    goal: jax.Array  # i32 [2]
    time: jax.Array  # i32, steps since the reset


@dataclasses.dataclass(frozen=True)
class Board:
    """Observation: f32 `[4]`, where the piece and the goal are. Actions: four directions.
    Reward 1 at the goal, and -0.02 for each step before."""

    @property
    def spec(self) -> podracer.EnvironmentSpec:
        return podracer.EnvironmentSpec("board", podracer.ArraySpec((4,)), podracer.Discrete(4))

    def reset(self, key: jax.Array) -> tuple[BoardState, podracer.TimeStep]:
        cells = SIZE * SIZE
        draws = jax.random.randint(key, (2,), 0, jnp.asarray([cells, cells - 1]))
        goal = (draws[0] + 1 + draws[1]) % cells  # any cell but that of the piece
        state = BoardState(_place(draws[0]), _place(goal), time=jnp.int32(0))
        return state, podracer.restart(_observe(state))

    def step(
        self, key: jax.Array, state: BoardState, action: jax.Array
    ) -> tuple[BoardState, podracer.TimeStep]:
        position = jnp.clip(state.position + jnp.asarray(MOVES)[action], 0, SIZE - 1)
        state = BoardState(position, state.goal, state.time + 1)
        arrived = jnp.all(position == state.goal)
        return state, podracer.transition(
            _observe(state),
            reward=jnp.where(arrived, 1.0, -0.02),
            terminal=arrived,
            timeout=state.time >= LIMIT,
        )


def _place(cell: jax.Array) -> jax.Array:
    return jnp.stack([cell // SIZE, cell % SIZE])


def _observe(state: BoardState) -> jax.Array:
    return jnp.concatenate([state.position, state.goal]) / (SIZE - 1)


def main(**overrides: Any) -> float:
    """Train on the board; return the mean return of the last evaluation."""
    podracer.check_environment(Board())  # `train` does it too; in your own tests, call it
    experiment = podracer.Experiment(
        recipe="board_ppo",
        environment=podracer.auto_reset(Board()),
        agent=podracer.PPO(learning_rate=2e-3),
        driver=podracer.AnakinConfig(num_envs=64, rollout_length=32, updates_per_chunk=20),
        frames=163_840,
        evaluations=4,
    )
    result = podracer.train(experiment, **overrides)
    assert result.evaluation is not None
    return float(result.evaluation.returns.mean())


if __name__ == "__main__":
    print(f"mean return {main():.3f}; the best possible is about 0.95")
