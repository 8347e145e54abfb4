"""Pendulum: swing a pendulum up with too little torque and hold it there.

The equations and constants of Gymnasium's Pendulum-v1.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from podracer.environment import restart, transition
from podracer.envs.cartpole import stroke
from podracer.types import ArraySpec, Continuous, EnvironmentSpec, TimeStep, struct

GRAVITY = 10.0  # m/s^2
MASS, LENGTH = 1.0, 1.0  # kg, m
SECONDS = 0.05  # for each step
MAX_SPEED = 8.0  # rad/s
MAX_TORQUE = 2.0  # N m
LIMIT = 200  # steps


@struct
class PendulumState:
    """How the pendulum moves, and for how long."""

    angle: jax.Array  # f32, rad, 0 is upright
    speed: jax.Array  # f32, rad/s
    time: jax.Array  # int32, steps since the reset


@dataclasses.dataclass(frozen=True)
class Pendulum:
    """Observation: f32 `[3]`, cosine and sine of the angle, speed. Action: f32 `[1]`, torque,
    clipped to [-2, 2]. Reward: minus the cost of angle, speed and torque before the step. Never
    terminal, 200 steps are a time-out. Marks its ends only: see `auto_reset`."""

    @property
    def spec(self) -> EnvironmentSpec:
        return EnvironmentSpec(
            "pendulum", ArraySpec((3,)), Continuous((-MAX_TORQUE,), (MAX_TORQUE,))
        )

    def reset(self, key: jax.Array) -> tuple[PendulumState, TimeStep]:
        word = jax.random.bits(key)  # 16 bits for each: a second word would double the cost
        angle, speed = (x.astype(jnp.float32) / 32767.5 - 1 for x in (word >> 16, word & 0xFFFF))
        state = PendulumState(np.pi * angle, speed, jnp.int32(0))
        return state, restart(_observe(state))

    def step(
        self, key: jax.Array, state: PendulumState, action: jax.Array
    ) -> tuple[PendulumState, TimeStep]:
        torque = jnp.clip(action[0], -MAX_TORQUE, MAX_TORQUE)
        off = (state.angle + np.pi) % (2 * np.pi) - np.pi
        cost = off**2 + 0.1 * state.speed**2 + 0.001 * torque**2
        gravity = 3 * GRAVITY / (2 * LENGTH) * jnp.sin(state.angle)
        speed = state.speed + (gravity + 3 / (MASS * LENGTH**2) * torque) * SECONDS
        speed = jnp.clip(speed, -MAX_SPEED, MAX_SPEED)
        state = PendulumState(state.angle + speed * SECONDS, speed, state.time + 1)
        return state, transition(_observe(state), -cost, timeout=state.time >= LIMIT)

    def render(self, state: PendulumState, width: int = 160) -> np.ndarray:
        """An image, uint8 `[width, width, 3]`."""
        angle, middle = float(state.angle), width / 2
        tip = (middle + 0.4 * width * np.sin(angle), middle - 0.4 * width * np.cos(angle))
        image = np.full((width, width, 3), 255, np.uint8)
        image[stroke(image, (middle, middle), tip, 6)] = (200, 120, 60)
        image[stroke(image, (middle, middle), (middle + 1, middle), 3)] = 40
        return image


def _observe(state: PendulumState) -> jax.Array:
    return jnp.stack([jnp.cos(state.angle), jnp.sin(state.angle), state.speed])
