"""Two simulators of many worlds at once in PyTorch, trained without a copy through the host.

Simulators of robots step all their worlds in one call, on the device that also learns. A class that
makes batches of them and one that steps a batch are all that Sebulba needs; neither inherits
anything. `on_device` says that the arrays are torch tensors, which JAX takes by DLPack, and
`shared` that the simulator exists once. Rows restart by themselves: the step after an end shows the
first timestep of the next episode. Needs `pip install torch`.
"""

# PyTorch is not among the library's own dependencies.
# pyright: basic

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import torch  # pyright: ignore[reportMissingImports]

import podracer


@dataclasses.dataclass(frozen=True)
class CartPoles:
    """Factory of batches of CartPole-v1, whose best return is 500."""

    device: str = "cpu"
    limit: int = 500
    on_device = True
    shared = True

    @property
    def spec(self) -> podracer.EnvironmentSpec:
        return podracer.EnvironmentSpec(
            "torch_cartpoles", podracer.ArraySpec((4,)), podracer.Discrete(2)
        )

    def make(self, num_envs: int, num_threads: int) -> Batch:
        return Batch(self, num_envs, size=4)

    def begin(self, uniform: torch.Tensor) -> torch.Tensor:
        """Return states `[n, 4]` at the start of episodes, from numbers in [0, 1)."""
        return 0.1 * uniform - 0.05

    def advance(self, state: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return states, rewards and terminals after a step of 20 ms."""
        _, velocity, angle, angular_velocity = state.unbind(1)
        force = 20.0 * action - 10.0
        sin, cos = torch.sin(angle), torch.cos(angle)
        push = (force + 0.05 * angular_velocity**2 * sin) / 1.1
        turn = (9.8 * sin - cos * push) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        change = torch.stack([velocity, push - 0.05 * turn * cos / 1.1, angular_velocity, turn], 1)
        state = state + 0.02 * change
        is_lost = (state[:, 0].abs() > 2.4) | (state[:, 2].abs() > 12 * np.pi / 180)
        return state, torch.ones_like(angle), is_lost


@dataclasses.dataclass(frozen=True)
class PointMasses:
    """Factory of batches of a robot on a plane, pushed to the origin, where it is paid to stay."""

    device: str = "cpu"
    limit: int = 100
    on_device = True
    shared = True

    @property
    def spec(self) -> podracer.EnvironmentSpec:
        action = podracer.Continuous((-1.0, -1.0), (1.0, 1.0))
        return podracer.EnvironmentSpec("torch_point_masses", podracer.ArraySpec((4,)), action)

    def make(self, num_envs: int, num_threads: int) -> Batch:
        return Batch(self, num_envs, size=4)

    def begin(self, uniform: torch.Tensor) -> torch.Tensor:
        """Return places and velocities `[n, 4]` at the start of episodes."""
        return (2.0 * uniform - 1.0) * torch.tensor([1.0, 1.0, 0.0, 0.0], device=uniform.device)

    def advance(self, state: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return states, rewards and terminals (none) after a step of 100 ms."""
        place, velocity = state.split(2, dim=1)
        velocity = 0.95 * velocity + 0.1 * action.clamp(-1.0, 1.0)
        place = place + 0.1 * velocity
        reward = torch.exp(-4.0 * place.square().sum(1))
        return torch.cat([place, velocity], 1), reward, torch.zeros_like(reward, dtype=torch.bool)


class Batch:
    """Worlds that are stepped together; each row draws from its own random numbers."""

    def __init__(self, task: Any, num_envs: int, size: int) -> None:
        self.task, self.num_envs, self.size = task, num_envs, size

    def reset(self, seed: int, indices: np.ndarray, start: int) -> podracer.TimeStep:
        n, device = self.num_envs, self.task.device
        hashes = [np.random.SeedSequence([seed, int(i), start]).generate_state(1) for i in indices]
        self.row = torch.as_tensor(np.concatenate(hashes).view(np.int32), device=device)
        self.state = torch.zeros((n, self.size), device=device)
        self.time = torch.zeros(n, dtype=torch.int32, device=device)
        self.episode = torch.zeros(n, dtype=torch.int32, device=device)
        self.is_over = torch.ones(n, dtype=torch.bool, device=device)
        self.is_terminal = torch.zeros(n, dtype=torch.bool, device=device)
        return self.show(torch.zeros(n, device=device))

    def step(self, action: Any) -> podracer.TimeStep:
        """Step all worlds; `action` is an array of JAX on this device."""
        state, reward, self.is_terminal = self.task.advance(self.state, torch.from_dlpack(action))
        self.state, self.time = state, self.time + 1
        return self.show(reward)

    def show(self, reward: torch.Tensor) -> podracer.TimeStep:
        """Return the timestep, with new episodes in the rows whose episode is over."""
        first = self.is_over
        self.episode = self.episode + first
        begin = self.task.begin(uniform(self.row, self.episode, self.size))
        self.state = torch.where(first[:, None], begin, self.state)
        self.time = torch.where(first, 0, self.time)
        self.is_terminal = self.is_terminal & ~first
        self.is_over = (self.is_terminal | (self.time >= self.task.limit)) & ~first
        return podracer.TimeStep(
            observation=self.state,
            reward=torch.where(first, 0.0, reward),
            discount=1.0 - self.is_terminal.float(),
            first=first,
            last=self.is_over,
        )

    def close(self) -> None:
        pass


def uniform(row: torch.Tensor, episode: torch.Tensor, count: int) -> torch.Tensor:
    """Return numbers in [0, 1), `[n, count]`, a hash of the row, its episode and the column."""
    columns = torch.arange(count, device=row.device)
    x = (row.long() << 24)[:, None] + count * episode.long()[:, None] + columns
    for factor in (-49064778989728563, -4265267296055464877):
        x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * factor
    return ((x >> 40) & 0xFFFFFF).float() / 2**24


def main(environment: Any = None, **overrides: Any) -> float:
    """Train on a simulator of 4,096 worlds; return the mean return of an evaluation afterwards."""
    worlds = environment or CartPoles("cuda" if torch.cuda.is_available() else "cpu")
    experiment = podracer.Experiment(
        recipe="torch_ppo",
        environment=worlds,
        agent=podracer.PPO(learning_rate=3e-3),
        driver=podracer.SebulbaConfig(num_envs=4096, rollout_length=16, updates_per_chunk=5),
        frames=2_000_000,
        evaluations=0,  # training has the simulator
    )
    result = podracer.train(experiment, **overrides)
    stages = {k: v for k, v in result.metrics.items() if k.startswith("actor_time_")}
    for name, seconds in stages.items():
        print(f"{name:24} {seconds:6.2f} s {seconds / sum(stages.values()):6.1%}")
    agent, state = podracer.load(result.run_dir, recipe=experiment)
    evaluate = podracer.make_evaluator(agent, worlds, 128)
    return float(evaluate(agent.actor_params(state), jax.random.key(0)).returns.mean())


if __name__ == "__main__":
    print(f"mean return {main():.2f}; the best possible is 500")
