"""Pendulum: swing a pendulum up with too little torque and hold it there.

The equations and constants of Gymnasium's Pendulum-v1.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from podracer.environment import restart, transition
from podracer.envs.cartpole import line_mask
from podracer.fields import struct
from podracer.types import ArraySpec, Continuous, EnvironmentSpec, TimeStep

GRAVITY = 10.0  # m/s^2
MASS, LENGTH = 1.0, 1.0  # kg, m
TIME_STEP = 0.05  # s
MAX_VELOCITY = 8.0  # rad/s
MAX_TORQUE = 2.0  # N m
MAX_STEPS = 200


@struct
class PendulumState:
    """State of the pendulum."""

    angle: jax.Array  # f32, rad, 0 is upright
    velocity: jax.Array  # f32, rad/s
    time: jax.Array  # i32, steps since the reset


@dataclasses.dataclass(frozen=True)
class Pendulum:
    """Pendulum-v1, without restarts: see `auto_reset`.

    Observation: f32 `[3]`, cosine and sine of the angle, angular velocity (rad/s). Action: f32
    `[1]`, the torque (N m), clipped to [-2, 2]. Reward: minus the cost of angle and velocity before
    the step and of the torque. Never terminal; 200 steps are a time-out.
    """

    @property
    def spec(self) -> EnvironmentSpec:
        torque = Continuous((-MAX_TORQUE,), (MAX_TORQUE,))
        return EnvironmentSpec("pendulum", ArraySpec((3,)), torque)

    def reset(self, key: jax.Array) -> tuple[PendulumState, TimeStep]:
        word = jax.random.bits(key)  # 16 bits for each: a second word would double the cost
        angle, velocity = (x.astype(jnp.float32) / 32767.5 - 1 for x in (word >> 16, word & 0xFFFF))
        state = PendulumState(np.pi * angle, velocity, jnp.int32(0))
        return state, restart(_observe(state))

    def step(
        self, key: jax.Array, state: PendulumState, action: jax.Array
    ) -> tuple[PendulumState, TimeStep]:
        torque = jnp.clip(action[0], -MAX_TORQUE, MAX_TORQUE)
        angle = (state.angle + np.pi) % (2 * np.pi) - np.pi
        cost = angle**2 + 0.1 * state.velocity**2 + 0.001 * torque**2
        gravity = 3 * GRAVITY / (2 * LENGTH) * jnp.sin(state.angle)
        velocity = state.velocity + (gravity + 3 / (MASS * LENGTH**2) * torque) * TIME_STEP
        velocity = jnp.clip(velocity, -MAX_VELOCITY, MAX_VELOCITY)
        state = PendulumState(state.angle + velocity * TIME_STEP, velocity, state.time + 1)
        return state, transition(_observe(state), -cost, timeout=state.time >= MAX_STEPS)

    def render(self, state: PendulumState, width: int = 160) -> np.ndarray:
        """Return an image, u8 `[width, width, 3]`."""
        angle, center = float(state.angle), width / 2
        tip = (center + 0.4 * width * np.sin(angle), center - 0.4 * width * np.cos(angle))
        image = np.full((width, width, 3), 255, np.uint8)
        image[line_mask(image, (center, center), tip, 6)] = (200, 120, 60)
        image[line_mask(image, (center, center), (center + 1, center), 3)] = 40
        return image


def _observe(state: PendulumState) -> jax.Array:
    return jnp.stack([jnp.cos(state.angle), jnp.sin(state.angle), state.velocity])
