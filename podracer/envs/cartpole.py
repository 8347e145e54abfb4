"""CartPole: push a cart left or right so that the pole on it stays up.

Barto, Sutton and Anderson 1983, with the constants, the Euler integration and the bounds of
Gymnasium's CartPole-v1.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from podracer.environment import restart, transition
from podracer.fields import struct
from podracer.ops.random import random_word
from podracer.types import ArraySpec, Discrete, EnvironmentSpec, TimeStep

GRAVITY = 9.8  # m/s^2
CART_MASS, POLE_MASS = 1.0, 0.1  # kg
HALF_LENGTH = 0.5  # m, of the pole
FORCE = 10.0  # N
TIME_STEP = 0.02  # s
MAX_POSITION = 2.4  # m
MAX_ANGLE = 12 * np.pi / 180  # rad
MAX_STEPS = 500


@struct
class CartPoleState:
    """State of the cart and the pole."""

    motion: jax.Array  # f32 [4]: position, velocity, angle, angular velocity
    time: jax.Array  # i32, steps since the reset


@dataclasses.dataclass(frozen=True)
class CartPole:
    """CartPole-v1, without restarts: see `auto_reset`.

    Observation: f32 `[4]`, position (m), velocity (m/s), angle (rad), angular velocity (rad/s).
    Actions: 0 left, 1 right. Reward: 1 for each step. Falling over or driving off is terminal, 500
    steps are a time-out.
    """

    @property
    def spec(self) -> EnvironmentSpec:
        return EnvironmentSpec("cartpole", ArraySpec((4,)), Discrete(2))

    def reset(self, key: jax.Array) -> tuple[CartPoleState, TimeStep]:
        # 8 bits of one random word for each coordinate, because four words would cost as much as
        # the whole step (decision 0008).
        levels = random_word(key) >> jnp.arange(0, 32, 8, dtype=jnp.uint32) & 255
        motion = 0.05 * (levels.astype(jnp.float32) / 127.5 - 1)
        return CartPoleState(motion, jnp.int32(0)), restart(motion)

    def step(
        self, key: jax.Array, state: CartPoleState, action: jax.Array
    ) -> tuple[CartPoleState, TimeStep]:
        _, velocity, angle, angular_velocity = state.motion
        force = jnp.where(action == 1, FORCE, -FORCE)
        sin, cos = jnp.sin(angle), jnp.cos(angle)
        mass, moment = CART_MASS + POLE_MASS, POLE_MASS * HALF_LENGTH
        push = (force + moment * angular_velocity**2 * sin) / mass
        angular_acceleration = (GRAVITY * sin - cos * push) / (
            HALF_LENGTH * (4 / 3 - POLE_MASS * cos**2 / mass)
        )
        acceleration = push - moment * angular_acceleration * cos / mass
        derivative = jnp.stack([velocity, acceleration, angular_velocity, angular_acceleration])
        motion = state.motion + TIME_STEP * derivative
        state = CartPoleState(motion, state.time + 1)
        return state, transition(
            motion,
            reward=1.0,
            terminal=(jnp.abs(motion[0]) > MAX_POSITION) | (jnp.abs(motion[2]) > MAX_ANGLE),
            timeout=state.time >= MAX_STEPS,
        )

    def render(self, state: CartPoleState, width: int = 240) -> np.ndarray:
        """Return an image, u8 `[width / 2, width, 3]`."""
        position, _, angle, _ = np.asarray(state.motion)
        x, y, scale = width * (0.5 + position / (2 * MAX_POSITION)), 0.4 * width, 0.4 * width
        tip = (x + scale * np.sin(angle), y - scale * np.cos(angle))
        image = np.full((width // 2, width, 3), 255, np.uint8)
        image[line_mask(image, (0, y), (width, y), 0.5)] = 160
        image[line_mask(image, (x - 16, y), (x + 16, y), 8)] = 40
        image[line_mask(image, (x, y), tip, 4)] = (200, 120, 60)
        return image


def line_mask(
    image: np.ndarray, start: tuple[float, float], end: tuple[float, float], radius: float
) -> np.ndarray:
    """Return the pixels of a thick line from `start` to `end`, both (x, y), as a bool `[H, W]`."""
    y, x = np.mgrid[: image.shape[0], : image.shape[1]]
    pixels = np.stack([x, y], axis=-1) - np.asarray(start)
    line = np.subtract(end, start)
    along = np.clip(pixels @ line / (line @ line), 0, 1)
    return np.linalg.norm(pixels - along[..., None] * line, axis=-1) <= radius
