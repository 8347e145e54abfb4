"""Several agents that share one policy: each is a row of the batch, beside its teammates.

A game is an environment in JAX whose timesteps and actions have an axis of agents. So any agent of
the library trains one policy for all, from what each of them observes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

import podracer
from podracer.envs.agents import agents_as_rows

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


def main(**overrides: Any) -> float:
    """Train both agents of a game as one policy; return the mean return of the last evaluation."""
    experiment = podracer.Experiment(
        recipe="meeting_ppo",
        environment=agents_as_rows(Meeting(), AGENTS),
        agent=podracer.PPO(learning_rate=1e-3),
        driver=podracer.AnakinConfig(num_envs=64, rollout_length=32, updates_per_chunk=10),
        frames=204_800,
    )
    result = podracer.train(experiment, **overrides)
    assert result.evaluation is not None
    return float(result.evaluation.returns.mean())


if __name__ == "__main__":
    print(f"mean return {main():.2f}; the best possible is about 0.97")
