"""HER: hindsight experience replay, for any agent with a replay of transitions.

    DQN(replay=HindsightReplay(num_goals=4))

A sample keeps the goal of its episode, or gets one that was achieved later in it (the strategy
`future`), with the reward and the end that belong to that goal.
Source: Andrychowicz et al. 2017, "Hindsight Experience Replay" (arXiv 1707.01495). Different from
the paper: goals are drawn when a sample is, not when it is stored, as in the authors' code; and at
most `horizon` steps later.

The goal that a transition achieved stands in the observation after it. Where a terminal restarts in
the same step that observation is lost, so the last transition of such an episode keeps its goal:
take `auto_reset(environment, show_terminals=True)`.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool

from podracer.errors import ConfigError
from podracer.fields import bounded
from podracer.replay import Buffer, Replay, ReplayState, Sample
from podracer.types import EnvironmentSpec, PyTree, Trajectory
from podracer_agents.goals import ACHIEVED, DESIRED, GoalEnvironment


@dataclasses.dataclass(frozen=True)
class HindsightReplay(Replay):
    """Replay whose samples have goals that were achieved later in their episodes."""

    num_goals: int = bounded(4)
    """Goals k in hindsight for each original one; 0 for none."""
    horizon: int = bounded(50, low=1)
    """Largest number of steps after a transition in which its goal was achieved."""

    def build(
        self, spec: EnvironmentSpec, length: int, stride: int = 1, *, every_step: bool = False
    ) -> HindsightBuffer:
        """Return the buffer of an agent. Raises `ConfigError` where there are no goals."""
        observation = spec.observation
        has_goals = isinstance(observation, dict) and {ACHIEVED, DESIRED} <= observation.keys()
        if not (has_goals and isinstance(spec.extension, GoalEnvironment)):
            raise ConfigError(
                f"HindsightReplay needs goals, and {spec.name} has none: its observations must be "
                f"dictionaries with the keys {ACHIEVED} and {DESIRED}, and its specification's "
                "`extension` must have the functions of `podracer_agents.goals.GoalEnvironment`."
            )
        if every_step:
            raise ConfigError(
                "HindsightReplay changes transitions, and the agent learns sequences, which may "
                "have several episodes: take a feed-forward network."
            )
        return HindsightBuffer(self, spec, length, stride)


class HindsightBuffer(Buffer):
    """Buffer that relabels samples."""

    config: HindsightReplay

    def sample(
        self, state: ReplayState, key: Array, N: int, frames: ArrayLike = 0, axis: str | None = None
    ) -> Sample:
        """Sample N sequences; k of k + 1 get the goal that a later timestep achieved, if any.

        Raises `ConfigError` for agents that keep more than actions.
        """
        if jax.tree.leaves(state.steps.extras):
            raise ConfigError(
                "HindsightReplay changes goals, and the agent learns what it found when it acted "
                "for another goal, as MuZero its searches: take DQN, DDPG or SAC."
            )
        sample_key, step_key, choice_key = jax.random.split(key, 3)
        sample = super().sample(state, sample_key, N, frames, axis)
        num_later = self._num_later(state, sample)
        steps = jax.random.randint(step_key, (N,), 1, jnp.maximum(num_later, 1) + 1)
        later = dataclasses.replace(self, length=1)
        starts = (sample.starts + steps) % _ring_size(state)
        goal = later.trajectory_at(state, sample.rows, starts).final.observation[ACHIEVED]

        share = self.config.num_goals / (self.config.num_goals + 1)
        is_changed = (jax.random.uniform(choice_key, (N,)) < share) & (num_later > 0)
        trajectory = self._relabel(sample.trajectory, goal, is_changed)
        return dataclasses.replace(sample, trajectory=trajectory)

    def _num_later(self, state: ReplayState, sample: Sample) -> jax.Array:
        """Return the number of timesteps, i32 `[N]`, after each start in the same episode.

        Later than the horizon none counts.
        """
        horizon = self.config.horizon
        window = dataclasses.replace(self, length=horizon + 1)
        timesteps = window.trajectory_at(state, sample.rows, sample.starts).timesteps()
        num_newer = (state.num_added[0] - 1 - sample.starts) % _ring_size(state)
        steps = jnp.arange(1, horizon + 1)[:, None]
        goes_on = ~timesteps.first[1:] & (steps <= num_newer[None])
        return jnp.sum(jnp.cumprod(goes_on.astype(jnp.int32), axis=0), axis=0)

    def _relabel(
        self, trajectory: Trajectory, goal: PyTree, is_changed: Bool[Array, "N"]
    ) -> Trajectory:
        """Return samples of which some have other goals, and rewards and ends of these."""
        goals: GoalEnvironment = self.spec.extension
        timesteps = trajectory.timesteps()
        observation = timesteps.observation
        achieved, desired = observation[ACHIEVED], observation[DESIRED]
        is_changed &= ~jnp.any(timesteps.first[1:] & ~timesteps.last[:-1], axis=0)

        def choose(new: jax.Array, old: jax.Array) -> jax.Array:
            return jnp.where(is_changed.reshape(1, -1, *[1] * (old.ndim - 2)), new[None], old)

        goal = jax.tree.map(choose, goal, desired)
        changes = is_changed[None] & ~timesteps.first
        reward = jnp.where(changes, goals.compute_reward(achieved, goal), timesteps.reward)
        was_due_to_goal = goals.compute_terminated(achieved, desired)
        goes_on = jnp.where(was_due_to_goal, 1.0, timesteps.discount)
        goes_on = jnp.where(goals.compute_terminated(achieved, goal), 0.0, goes_on)
        timesteps = dataclasses.replace(
            timesteps,
            observation={**observation, DESIRED: goal},
            reward=reward,
            discount=jnp.where(changes, goes_on, timesteps.discount),
        )
        steps = dataclasses.replace(
            trajectory.steps, timestep=jax.tree.map(lambda x: x[:-1], timesteps)
        )
        final = jax.tree.map(lambda x: x[-1], timesteps)
        return dataclasses.replace(trajectory, steps=steps, final=final)


def _ring_size(state: ReplayState) -> int:
    """Return the number C of timesteps that each environment's ring holds."""
    return state.steps.timestep.reward.shape[1]
