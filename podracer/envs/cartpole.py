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
from podracer.ops.random import random_word
from podracer.types import ArraySpec, Discrete, EnvironmentSpec, TimeStep, struct

GRAVITY = 9.8  # m/s^2
CART, POLE = 1.0, 0.1  # kg
HALF_LENGTH = 0.5  # m, of the pole
FORCE = 10.0  # N
SECONDS = 0.02  # for each step
EDGE = 2.4  # m
TILT = 12 * np.pi / 180  # rad
LIMIT = 500  # steps


@struct
class CartPoleState:
    """How the cart and the pole move, and for how long."""

    motion: jax.Array  # f32 [4]: position, speed, angle, angular speed
    time: jax.Array  # int32, steps since the reset


@dataclasses.dataclass(frozen=True)
class CartPole:
    """Observation: f32 `[4]`, position (m), speed, angle (rad), angular speed. Actions: left,
    right. Reward 1 for each step. Falling over or driving off is terminal, 500 steps are a
    time-out. Marks its ends only: see `auto_reset`."""

    @property
    def spec(self) -> EnvironmentSpec:
        return EnvironmentSpec("cartpole", ArraySpec((4,)), Discrete(2))

    def reset(self, key: jax.Array) -> tuple[CartPoleState, TimeStep]:
        # One random word, 8 bits for each coordinate: four words would cost as much as the step.
        levels = random_word(key) >> jnp.arange(0, 32, 8, dtype=jnp.uint32) & 255
        motion = 0.05 * (levels.astype(jnp.float32) / 127.5 - 1)
        return CartPoleState(motion, jnp.int32(0)), restart(motion)

    def step(
        self, key: jax.Array, state: CartPoleState, action: jax.Array
    ) -> tuple[CartPoleState, TimeStep]:
        _, speed, angle, spin = state.motion
        force = jnp.where(action == 1, FORCE, -FORCE)
        sin, cos = jnp.sin(angle), jnp.cos(angle)
        mass, moment = CART + POLE, POLE * HALF_LENGTH
        push = (force + moment * spin**2 * sin) / mass
        turn = (GRAVITY * sin - cos * push) / (HALF_LENGTH * (4 / 3 - POLE * cos**2 / mass))
        change = jnp.stack([speed, push - moment * turn * cos / mass, spin, turn])
        motion = state.motion + SECONDS * change
        state = CartPoleState(motion, state.time + 1)
        return state, transition(
            motion,
            reward=1.0,
            terminal=(jnp.abs(motion[0]) > EDGE) | (jnp.abs(motion[2]) > TILT),
            timeout=state.time >= LIMIT,
        )

    def render(self, state: CartPoleState, width: int = 240) -> np.ndarray:
        """An image, uint8 `[width / 2, width, 3]`."""
        position, _, angle, _ = np.asarray(state.motion)
        x, y, scale = width * (0.5 + position / (2 * EDGE)), 0.4 * width, 0.4 * width
        tip = (x + scale * np.sin(angle), y - scale * np.cos(angle))
        image = np.full((width // 2, width, 3), 255, np.uint8)
        image[stroke(image, (0, y), (width, y), 0.5)] = 160
        image[stroke(image, (x - 16, y), (x + 16, y), 8)] = 40
        image[stroke(image, (x, y), tip, 4)] = (200, 120, 60)
        return image


def stroke(
    image: np.ndarray, start: tuple[float, float], end: tuple[float, float], radius: float
) -> np.ndarray:
    """Which pixels a thick line from `start` to `end`, both (x, y), covers: bool `[H, W]`."""
    y, x = np.mgrid[: image.shape[0], : image.shape[1]]
    pixels = np.stack([x, y], axis=-1) - np.asarray(start)
    line = np.subtract(end, start)
    along = np.clip(pixels @ line / (line @ line), 0, 1)
    return np.linalg.norm(pixels - along[..., None] * line, axis=-1) <= radius
