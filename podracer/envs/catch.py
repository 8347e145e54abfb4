"""Catch: a ball falls down a board, and the paddle in the last row must be under it.

The environment of bsuite (Osband et al. 2020, "Behavior Suite for Reinforcement Learning") and of
the notebook published with Podracer (Hessel et al. 2021). Every episode has 9 steps.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from podracer.environment import restart
from podracer.fields import struct
from podracer.ops.random import random_word
from podracer.types import ArraySpec, Discrete, EnvironmentSpec, TimeStep

ROWS, COLUMNS = 10, 5


@struct
class CatchState:
    """Positions of the ball and the paddle."""

    row: jax.Array  # i32, of the ball
    column: jax.Array  # i32, of the ball
    paddle: jax.Array  # i32, its column


@dataclasses.dataclass(frozen=True)
class Catch:
    """Catch, which restarts by itself.

    Observation: f32 `[10, 5]`, 1 at the ball and at the paddle. Actions: left, stay, right.
    Reward: 1 or -1 when the ball lands, which is a true terminal; it never times out.
    """

    @property
    def spec(self) -> EnvironmentSpec:
        return EnvironmentSpec("catch", ArraySpec((ROWS, COLUMNS)), Discrete(3))

    def reset(self, key: jax.Array) -> tuple[CatchState, TimeStep]:
        state = _initial_state(key)
        return state, restart(_observe(state))

    def step(
        self, key: jax.Array, state: CatchState, action: jax.Array
    ) -> tuple[CatchState, TimeStep]:
        paddle = jnp.clip(state.paddle + action - 1, 0, COLUMNS - 1)
        next_state = CatchState(state.row + 1, state.column, paddle)
        landed = next_state.row == ROWS - 1
        outcome = jnp.where(paddle == state.column, 1.0, -1.0).astype(jnp.float32)
        # The restart is part of the step, because then one observation is computed for each step,
        # where `auto_reset` would compute two.
        state = jax.tree.map(functools.partial(jnp.where, landed), _initial_state(key), next_state)
        return state, TimeStep(
            observation=_observe(state),
            reward=jnp.where(landed, outcome, 0.0),
            discount=1.0 - landed.astype(jnp.float32),
            first=landed,
            last=jnp.bool_(False),
        )

    def render(self, state: CatchState, scale: int = 24) -> np.ndarray:
        """Return an image, u8 `[10 * scale, 5 * scale, 3]`."""
        board = np.zeros((ROWS, COLUMNS, 3), np.uint8)
        board[ROWS - 1, state.paddle] = (90, 160, 250)
        board[state.row, state.column] = (250, 200, 60)
        return board.repeat(scale, axis=0).repeat(scale, axis=1)


def _initial_state(key: jax.Array) -> CatchState:
    # A mixed word of the key: another block of Threefry costs as much as the step (decision 0008).
    column = (random_word(key) % COLUMNS).astype(jnp.int32)
    return CatchState(row=jnp.int32(0), column=column, paddle=jnp.int32(COLUMNS // 2))


def _observe(state: CatchState) -> jax.Array:
    cells = jnp.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS)
    ball = cells == COLUMNS * state.row + state.column
    paddle = cells == COLUMNS * (ROWS - 1) + state.paddle
    return (ball | paddle).astype(jnp.float32)
