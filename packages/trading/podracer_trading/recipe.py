"""Trading on a synthetic stock market."""

from __future__ import annotations

from podracer.agents.ppo import PPO
from podracer.config.experiment import Experiment
from podracer.drivers.anakin import AnakinConfig


def trading_ppo() -> Experiment:
    """PPO on a synthetic stock market; evaluated in a period that it never trained in."""
    return Experiment(
        environment="trading:synthetic",
        agent=PPO(entropy_cost=0.0, normalize_observations=True),
        driver=AnakinConfig(num_envs=64, rollout_length=64, updates_per_chunk=20),
        frames=2_000_000,
        evaluation_episodes=1,  # one fixed start, through the whole period
    )
