"""HER of stable-baselines3 (tested with 2.9.2) for `hindsight.py`: prints its greedy returns.

    python reference_hindsight.py bits|reach SEED FRAMES EPISODES BITS

The environments are podracer's, in NumPy; torch has one thread.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.spaces import Box, Dict, Discrete
from stable_baselines3 import DQN, SAC, HerReplayBuffer
from stable_baselines3.common.vec_env import DummyVecEnv


class Goals(gymnasium.Env):
    """An episode with a goal, see `podracer_agents.goals`."""

    def __init__(self, size: int, goal_size: int, steps: int) -> None:
        self.steps = steps
        goal = Box(-1.0, 1.0, (goal_size,), np.float32)
        observation = Box(-np.inf, np.inf, (size,), np.float32)
        spaces = {"observation": observation, "achieved_goal": goal, "desired_goal": goal}
        self.observation_space = Dict(spaces)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, Any]:
        super().reset(seed=seed)
        self.position, self.goal = self.start()
        self.time = 0
        return self.observe(), {}

    def observe(self) -> dict[str, np.ndarray]:
        achieved = self.position[: len(self.goal)]
        names = ("observation", "achieved_goal", "desired_goal")
        values = (self.position, achieved, self.goal)
        return {k: np.array(x, np.float32) for k, x in zip(names, values, strict=True)}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, Any]:
        self.move(action)
        self.time += 1
        observation = self.observe()
        reward = self.compute_reward(observation["achieved_goal"], self.goal, {})
        ends = bool(self.is_terminal and reward == 0)
        return observation, float(reward), ends, self.time >= self.steps, {}

    def compute_reward(self, achieved: Any, desired: Any, info: Any) -> Any:
        distance = np.linalg.norm(achieved - desired, axis=-1)
        return np.where(distance < self.tolerance, 0.0, -1.0)


class Bits(Goals):
    is_terminal, tolerance = True, 0.5

    def __init__(self, bits: int) -> None:
        super().__init__(bits, bits, bits)
        self.action_space = Discrete(bits)

    def start(self) -> Any:
        return self.np_random.integers(0, 2, (2, self.steps)).astype(np.float32)

    def move(self, action: Any) -> None:
        self.position[action] = 1 - self.position[action]


class Reach(Goals):
    is_terminal, tolerance = False, 0.1

    def __init__(self) -> None:
        super().__init__(4, 2, 50)
        self.action_space = Box(-1.0, 1.0, (2,), np.float32)

    def start(self) -> Any:
        start, goal = self.np_random.uniform(-1, 1, (2, 2))
        return np.concatenate([start, np.zeros(2)]), goal

    def move(self, action: Any) -> None:
        velocity = 0.8 * self.position[2:] + 0.05 * np.clip(action, -1, 1)
        place = np.clip(self.position[:2] + velocity, -1, 1)
        self.position = np.concatenate([place, velocity])


def play(agent: Any, envs: list[Any], seed: int) -> list[float]:
    """Return the greedy return of an episode in each environment."""
    seen = [env.reset(seed=seed + i)[0] for i, env in enumerate(envs)]
    returns, running = np.zeros(len(envs)), np.ones(len(envs), bool)
    while running.any():
        observation = {key: np.stack([x[key] for x in seen]) for key in seen[0]}
        actions = agent.predict(observation, deterministic=True)[0]
        for i in np.flatnonzero(running):
            seen[i], reward, terminal, timeout, _ = envs[i].step(actions[i])
            returns[i] += reward
            running[i] = not (terminal or timeout)
    return returns.tolist()


def main() -> None:
    task, (seed, frames, episodes, bits) = sys.argv[1], map(int, sys.argv[2:])
    torch.set_num_threads(1)
    began = time.process_time()
    make = (lambda: Bits(bits)) if task == "bits" else Reach
    settings: dict[str, Any] = {
        "replay_buffer_class": HerReplayBuffer,
        "replay_buffer_kwargs": {"n_sampled_goal": 4, "goal_selection_strategy": "future"},
        "buffer_size": 100_000,
        "batch_size": 256,
        "learning_rate": 1e-3,
        "learning_starts": 2_000,
        "seed": seed,
    }
    env = DummyVecEnv([make] * 16)
    if task == "bits":
        agent: Any = DQN(
            "MultiInputPolicy", env, gamma=0.98, train_freq=4, gradient_steps=8,
            target_update_interval=800, exploration_fraction=0.5, exploration_final_eps=0.05,
            policy_kwargs={"net_arch": [256]}, **settings,
        )  # fmt: skip
    else:
        agent = SAC(
            "MultiInputPolicy", env, gamma=0.95, train_freq=1, gradient_steps=4,
            ent_coef="auto_0.1", policy_kwargs={"net_arch": [64, 64]}, **settings,
        )  # fmt: skip
    agent.learn(frames)
    returns = play(agent, [make() for _ in range(episodes)], 10_000 + seed)
    print(json.dumps({"returns": returns, "cpu_seconds": time.process_time() - began}))


if __name__ == "__main__":
    main()
