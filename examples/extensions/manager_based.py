"""Robots of Isaac Lab and mjlab: an adapter for environments like their `ManagerBasedRlEnv`.

Such an environment steps all worlds in torch, on the device that learns, and exists once. It resets
by itself the rows that end, and returns the first observations of their next episodes: the final
ones are lost. At a time-out the adapter shows the observation before, from which the agent
bootstraps, and the new episode one step late. Tried with mjlab on a CPU, and with a stub that keeps
the contract of both. Needs `pip install torch`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]

import podracer


@dataclasses.dataclass(frozen=True)
class ManagerBased:
    """Factory of the one batch; `simulator(num_envs)` returns the environment of the package."""

    name: str
    simulator: Callable[[int], Any]
    num_observations: int
    num_actions: int
    group: str = "policy"  # of observations; "actor" in mjlab
    bound: float = 1.0  # of actions, in both directions
    on_device = True
    shared = True

    @property
    def spec(self) -> podracer.EnvironmentSpec:
        bounds = (self.bound,) * self.num_actions
        action = podracer.Continuous(tuple(-x for x in bounds), bounds)
        observation = podracer.ArraySpec((self.num_observations,))
        return podracer.EnvironmentSpec(self.name, observation, action)

    def make(self, num_envs: int, num_threads: int) -> Robots:
        return Robots(self.simulator(num_envs), self.group)


class Robots:
    """Batch whose rows are the worlds of an environment."""

    def __init__(self, simulator: Any, group: str) -> None:
        self.simulator, self.group, self.is_closed = simulator, group, False

    def reset(self, seed: int, indices: np.ndarray, start: int) -> podracer.TimeStep:
        """Begin; the simulator has one seed for all worlds, so results depend on their number."""
        words = np.random.SeedSequence([seed, int(indices[0]), start])  # other hosts, other worlds
        observations, _ = self.simulator.reset(seed=int(words.generate_state(1)[0] >> 1))
        self.observation = observations[self.group].clone()
        ones = torch.ones(len(indices), device=self.observation.device)
        self.timed_out = ones < 0
        return podracer.TimeStep(self.observation, 0 * ones, ones, ones > 0, self.timed_out)

    def step(self, action: Any) -> podracer.TimeStep:
        """Step all worlds, and show ends as drivers expect them."""
        results = self.simulator.step(torch.from_dlpack(action))
        observations, reward, terminated, truncated, _ = results
        previous, observation = self.observation, observations[self.group].clone()
        begins = self.timed_out  # rows whose previous timestep was a time-out ignored their action
        terminal = terminated & ~begins
        self.timed_out = truncated & ~terminated & ~begins
        self.observation = observation
        return podracer.TimeStep(
            observation=torch.where(self.timed_out[:, None], previous, observation),
            reward=torch.where(begins, 0.0, reward),
            discount=1.0 - terminal.float(),
            first=begins | terminal,
            last=self.timed_out,
        )

    def close(self) -> None:
        """Close the simulator, once."""
        if not self.is_closed:
            self.simulator.close()
        self.is_closed = True


def main(environment: ManagerBased, **overrides: Any) -> dict[str, Any]:
    """Train PPO with sizes of an accelerator; return the last record."""
    experiment = podracer.Experiment(
        recipe="robots_ppo",
        environment=environment,
        agent=podracer.PPO(learning_rate=3e-4),
        driver=podracer.SebulbaConfig(num_envs=4096, rollout_length=24, updates_per_chunk=10),
        frames=100_000_000,
        evaluations=0,
    )
    return podracer.train(experiment, **overrides).metrics
