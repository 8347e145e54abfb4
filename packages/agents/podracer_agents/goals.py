"""Environments with goals: flipping bits, and a point that reaches a place.

Observations are dictionaries with the keys of Gymnasium-Robotics: `observation`, `achieved_goal`
and `desired_goal`. `EnvironmentSpec.extension` is the environment, whose reward is a function of
the two goals.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp

from podracer.environment import AutoReset, auto_reset, restart, transition
from podracer.fields import bounded, check_ranges, struct
from podracer.types import ArraySpec, Continuous, Discrete, EnvironmentSpec, PyTree, TimeStep

ACHIEVED, DESIRED = "achieved_goal", "desired_goal"


@runtime_checkable
class GoalEnvironment(Protocol):
    """Functions of goals, pure, over any leading shape `[*b]`."""

    def compute_reward(self, achieved: PyTree, desired: PyTree) -> jax.Array:
        """Return the reward f32 `[*b]` of a step to an achieved goal where another is desired."""
        ...

    def compute_terminated(self, achieved: PyTree, desired: PyTree) -> jax.Array:
        """Return whether an episode ends because of the goal achieved, bool `[*b]`."""
        ...


@struct
class GoalState:
    """State of an episode."""

    position: jax.Array
    goal: jax.Array
    time: jax.Array  # i32, steps since the reset


def goal_observation(observation: PyTree, achieved: PyTree, desired: PyTree) -> dict[str, PyTree]:
    """Return an observation with its goals."""
    return {"observation": observation, ACHIEVED: achieved, DESIRED: desired}


@dataclasses.dataclass(frozen=True)
class BitFlipping:
    """Flip one of n bits at a time until they are the goal (Andrychowicz et al. 2017, section 3.1).

    Observation and goals: f32 `[n]` of 0 and 1, uniformly random at first. Action: the bit to flip.
    Reward: 0 for the goal, which ends an episode, and otherwise -1. n steps are a time-out, so an
    episode returns -n if and only if it fails.
    """

    bits: int = bounded(20, low=1)

    def __post_init__(self) -> None:
        check_ranges(self, "bit_flipping")

    @property
    def spec(self) -> EnvironmentSpec:
        bits = ArraySpec((self.bits,))
        observation = goal_observation(bits, bits, bits)
        return EnvironmentSpec("bit_flipping", observation, Discrete(self.bits), extension=self)

    def reset(self, key: jax.Array) -> tuple[GoalState, TimeStep]:
        position, goal = jax.random.bernoulli(key, 0.5, (2, self.bits)).astype(jnp.float32)
        return GoalState(position, goal, jnp.int32(0)), restart(
            goal_observation(position, position, goal)
        )

    def step(
        self, key: jax.Array, state: GoalState, action: jax.Array
    ) -> tuple[GoalState, TimeStep]:
        position = state.position.at[action].set(1 - state.position[action])
        state = GoalState(position, state.goal, state.time + 1)
        return state, transition(
            goal_observation(position, position, state.goal),
            self.compute_reward(position, state.goal),
            terminal=self.compute_terminated(position, state.goal),
            timeout=state.time >= self.bits,
        )

    def compute_reward(self, achieved: jax.Array, desired: jax.Array) -> jax.Array:
        return jnp.where(self.compute_terminated(achieved, desired), 0.0, -1.0)

    def compute_terminated(self, achieved: jax.Array, desired: jax.Array) -> jax.Array:
        return jnp.all(achieved == desired, axis=-1)


@dataclasses.dataclass(frozen=True)
class Reach:
    """Move a point with inertia to a place and stay there, in two dimensions.

    Observation: f32 `[4]`, position in [-1, 1] and velocity. Goals: f32 `[2]`, positions. Action:
    f32 `[2]`, acceleration. Reward: 0 within 0.1 of the goal, and otherwise -1. Never terminal; 50
    steps are a time-out.
    """

    tolerance: float = bounded(0.1)
    max_steps: int = bounded(50, low=1)

    def __post_init__(self) -> None:
        check_ranges(self, "point_reach")

    @property
    def spec(self) -> EnvironmentSpec:
        place = ArraySpec((2,))
        observation = goal_observation(ArraySpec((4,)), place, place)
        action = Continuous((-1.0, -1.0), (1.0, 1.0))
        return EnvironmentSpec("point_reach", observation, action, extension=self)

    def reset(self, key: jax.Array) -> tuple[GoalState, TimeStep]:
        start, goal = jax.random.uniform(key, (2, 2), minval=-1.0)
        state = GoalState(jnp.concatenate([start, jnp.zeros(2)]), goal, jnp.int32(0))
        return state, restart(self._observe(state))

    def step(
        self, key: jax.Array, state: GoalState, action: jax.Array
    ) -> tuple[GoalState, TimeStep]:
        velocity = 0.8 * state.position[2:] + 0.05 * jnp.clip(action, -1.0, 1.0)
        place = jnp.clip(state.position[:2] + velocity, -1.0, 1.0)
        state = GoalState(jnp.concatenate([place, velocity]), state.goal, state.time + 1)
        return state, transition(
            self._observe(state),
            self.compute_reward(place, state.goal),
            timeout=state.time >= self.max_steps,
        )

    def _observe(self, state: GoalState) -> dict[str, PyTree]:
        return goal_observation(state.position, state.position[:2], state.goal)

    def compute_reward(self, achieved: jax.Array, desired: jax.Array) -> jax.Array:
        distance = jnp.sqrt(jnp.sum((achieved - desired) ** 2, axis=-1))
        return jnp.where(distance < self.tolerance, 0.0, -1.0)

    def compute_terminated(self, achieved: jax.Array, desired: jax.Array) -> jax.Array:
        return jnp.zeros(achieved.shape[:-1], bool)


def bit_flipping(*, bits: int = 20) -> AutoReset:
    """Flip bits one at a time to those of a goal: bit_flipping,bits=20."""
    return auto_reset(BitFlipping(bits), show_terminals=True)


def point_reach() -> AutoReset:
    """Move a point with inertia to a goal in two dimensions, for a reward of 0 or -1."""
    return auto_reset(Reach())
