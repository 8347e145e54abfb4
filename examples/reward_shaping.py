"""Three ways to change rewards: clip them, add a potential, or let the agent alone see others.

    python examples/reward_shaping.py
    podracer train reward_shaping:upright_ppo        # in the folder of this file

A wrapped environment gives everybody the new reward: `act`, `learn`, a replay, a search.
Evaluations run in `for_evaluation()`, so they count the environment's own. An agent that changes
rewards leaves the task as it is: training and evaluations count the environment's own.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp

import podracer
from podracer import recipes


@dataclasses.dataclass(frozen=True)
class Shaped:
    """An environment with a bonus that leaves the best policy the best (Ng et al. 1999).

    The bonus is the difference of a potential of states, discount * potential(next) - potential,
    with a potential of 0 after a terminal. The discount is the agent's.
    """

    env: podracer.Environment
    potential: Callable[[Any], jax.Array]  # of an observation
    discount: float

    @property
    def spec(self):
        return self.env.spec

    def reset(self, key):
        inner, timestep = self.env.reset(key)
        return (inner, self.potential(timestep.observation)), timestep

    def step(self, key, state, action):
        inner, before = state
        inner, timestep = self.env.step(key, inner, action)
        after = self.potential(timestep.observation)
        bonus = self.discount * timestep.discount * after - before  # terminals have a discount of 0
        only_reset = timestep.first & (timestep.discount > 0)  # after a time-out
        reward = timestep.reward + jnp.where(only_reset, 0.0, bonus)
        return (inner, after), dataclasses.replace(timestep, reward=reward)

    def for_evaluation(self):
        return self.env


def upright_ppo() -> podracer.Experiment:
    """PPO on a pendulum that is paid for the height of its tip."""
    shaped = Shaped(podracer.make("pendulum"), lambda observation: observation[0], discount=0.95)
    return dataclasses.replace(recipes.find("pendulum_ppo"), environment=shaped)


def clipped_pendulum() -> gymnasium.Env:
    """A wrapper of Gymnasium; pass `podracer.Gymnasium(clipped_pendulum)` as the environment."""
    return gymnasium.wrappers.ClipReward(gymnasium.make("Pendulum-v1"), -1.0, 1.0)


@podracer.struct
class ClippedDQN:
    """DQN that learns from clipped rewards, as in Mnih et al. 2015."""

    dqn: podracer.DQN = podracer.DQN()
    """Settings of DQN."""
    reward_limit: float = podracer.bounded(1.0)
    """Largest absolute reward that it learns from."""

    def build(self, spec, context):
        inner = self.dqn.build(spec, context)

        def learn(state, trajectory, key, axis):
            rewards = trajectory.timesteps().reward  # [T + 1, B], each of the action before it
            rewards = jnp.clip(rewards, -self.reward_limit, self.reward_limit)
            return inner.learn(state, trajectory.with_rewards(rewards), key, axis)

        return dataclasses.replace(inner, learn=learn)


def main(**fields: Any) -> float:
    """Train on the shaped pendulum; return the mean of the environment's own returns."""
    result = podracer.train(upright_ppo(), recipe="upright_ppo", **fields)
    assert result.evaluation is not None
    return float(result.evaluation.returns.mean())


if __name__ == "__main__":
    print(main())
