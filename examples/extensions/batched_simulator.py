"""A simulator of many worlds at once, in NumPy, as environments of the host.

Simulators such as those of robots step all their worlds in one call. A class that makes batches of
them and one that steps a batch are all that Sebulba needs; neither inherits anything. Rows restart
by themselves: the step after an end shows the first timestep of the next episode.
"""

# Batches of the host are NumPy, as timesteps of the device are JAX.
# pyright: reportArgumentType=false

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

import podracer

LIMIT = 40


@dataclasses.dataclass(frozen=True)
class Landings:
    """Factory of batches. It observes height and speed, thrusts, and is paid to land softly."""

    gravity: float = 0.02

    @property
    def spec(self) -> podracer.EnvironmentSpec:
        observation, action = podracer.ArraySpec((2,)), podracer.Continuous((-1.0,), (1.0,))
        return podracer.EnvironmentSpec("landings", observation, action)

    def make(self, num_envs: int, num_threads: int) -> LandingBatch:
        return LandingBatch(num_envs, self.gravity)


class LandingBatch:
    """Batch of worlds, stepped together; each row draws from its own random numbers."""

    def __init__(self, num_envs: int, gravity: float) -> None:
        self.num_envs, self.gravity = num_envs, gravity

    def reset(self, seed: int, indices: np.ndarray, start: int) -> podracer.TimeStep:
        self.random = [np.random.default_rng([seed, index, start]) for index in indices]
        self.height, self.speed = np.zeros((2, self.num_envs), np.float32)
        self.time = np.zeros(self.num_envs, int)
        self.is_over = np.ones(self.num_envs, bool)
        return self.step(np.zeros((self.num_envs, 1), np.float32))

    def step(self, action: np.ndarray) -> podracer.TimeStep:
        is_first = self.is_over
        thrust = 2 * self.gravity * np.clip(action[:, 0], 0.0, 1.0)
        self.speed = self.speed + thrust - self.gravity
        self.height = self.height + self.speed
        self.time = self.time + 1
        for row in np.flatnonzero(is_first):
            self.height[row] = self.random[row].uniform(0.5, 1.0)
            self.speed[row], self.time[row] = 0.0, 0
        is_landed = ~is_first & (self.height <= 0)
        self.is_over = is_landed | (self.time >= LIMIT)
        softness = 1.0 - 10.0 * np.abs(self.speed)
        return podracer.TimeStep(
            observation=np.stack([self.height, self.speed], axis=-1).astype(np.float32),
            reward=np.where(is_landed, softness, 0.0).astype(np.float32),
            discount=1.0 - is_landed.astype(np.float32),
            first=is_first,
            last=self.is_over,
        )

    def close(self) -> None:
        pass


def main(**overrides: Any) -> float:
    """Train on the host's simulator; return the mean return of the last evaluation."""
    experiment = podracer.Experiment(
        recipe="landings_ppo",
        environment=Landings(),
        agent=podracer.PPO(learning_rate=1e-3),
        driver=podracer.SebulbaConfig(num_envs=64, rollout_length=32, updates_per_chunk=10),
        frames=204_800,
    )
    result = podracer.train(experiment, **overrides)
    assert result.evaluation is not None
    return float(result.evaluation.returns.mean())


if __name__ == "__main__":
    print(f"mean return {main():.2f}; the best possible is 1")
