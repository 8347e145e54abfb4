"""The environment: reach the goal on a board, in as few steps as possible."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import podracer

MOVES = np.asarray([(0, 1), (0, -1), (1, 0), (-1, 0)], np.int32)


@podracer.struct
class State:
    """Everything that the next step depends on, arrays only. `step` gets a random key itself."""

    position: jax.Array  # i32 [2]
    goal: jax.Array  # i32 [2]
    time: jax.Array  # i32, steps since the reset


@dataclasses.dataclass(frozen=True)
class Board:
    """Reward 1 at the goal, -0.02 for each step before it.

    The functions act on one instance and contain no loop: drivers run thousands of instances side
    by side. Branch on data with `jnp.where`, as `if` cannot read a traced array.
    """

    width: int = 6
    limit: int = 30
    """Steps after which an episode is cut."""

    @property
    def spec(self) -> podracer.EnvironmentSpec:
        # An image would be ArraySpec((height, width, channels)), continuous actions
        # Continuous((-1.0,), (1.0,)).
        observation, action = podracer.ArraySpec((4,)), podracer.Discrete(len(MOVES))
        return podracer.EnvironmentSpec("my_project", observation, action)

    def reset(self, key: jax.Array) -> tuple[State, podracer.TimeStep]:
        """Return a random start: the goal is anywhere but at the piece."""
        cells = self.width**2
        cell, offset = jax.random.randint(key, (2,), jnp.asarray([0, 1]), cells)
        state = State(self._place(cell), self._place((cell + offset) % cells), jnp.int32(0))
        return state, podracer.restart(self._observe(state))

    def step(
        self, key: jax.Array, state: State, action: jax.Array
    ) -> tuple[State, podracer.TimeStep]:
        """Return the next state, and what the agent sees and earns there."""
        position = jnp.clip(state.position + jnp.asarray(MOVES)[action], 0, self.width - 1)
        state = State(position, state.goal, state.time + 1)
        arrived = jnp.all(position == state.goal)
        # A terminal ends the task: nothing can be earned after it. A time-out only cuts the
        # episode, so agents still count on what would have come.
        return state, podracer.transition(
            self._observe(state),
            reward=jnp.where(arrived, 1.0, -0.02),
            terminal=arrived,
            timeout=state.time >= self.limit,
        )

    def render(self, state: State) -> np.ndarray:
        """Return a picture, u8 `[H, W, 3]`; optional, for `podracer play`."""
        picture = np.full((self.width, self.width, 3), 24, np.uint8)
        picture[tuple(state.goal)] = (255, 140, 0)
        picture[tuple(state.position)] = (230, 230, 230)
        return picture.repeat(24, axis=0).repeat(24, axis=1)

    def _place(self, cell: jax.Array) -> jax.Array:
        return jnp.stack([cell // self.width, cell % self.width])

    def _observe(self, state: State) -> jax.Array:
        """Return both places in [-1, 1]: networks learn best from small values."""
        places = jnp.concatenate([state.position, state.goal]).astype(jnp.float32)
        return places * (2 / (self.width - 1)) - 1


def make(width: int = 6) -> podracer.Environment:
    """Reach the goal on a board."""  # `podracer list` shows this line
    return podracer.auto_reset(Board(width))  # restarts where an episode ends
