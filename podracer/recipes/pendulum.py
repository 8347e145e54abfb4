"""Pendulum, with continuous actions."""

from __future__ import annotations

import dataclasses
from typing import Any

from podracer.agents import DDPG, PPO, SAC, MuZero
from podracer.agents.ddpg import td3
from podracer.config.experiment import Experiment
from podracer.drivers.anakin import AnakinConfig
from podracer.networks import MLP, TorsoNetwork
from podracer.recipes.sizes import accelerator
from podracer.replay import Replay
from podracer.schedules import Linear

# Settings of all agents with a replay, so that they can be compared.
REPLAY = Replay(capacity=100_000, updates_per_rollout=4, warmup=2_000)
NETWORK = TorsoNetwork(MLP((64, 64)))
OFF_POLICY: dict[str, Any] = {
    "learning_rate": 1e-3,
    "random_frames": 2_000,
    "replay": REPLAY,
    "network": NETWORK,
}


@accelerator(
    agent={"learning_rate": Linear(1e-3, 0.0)}, driver={"num_envs": 1024}, frames=6_553_600
)
def pendulum_ppo() -> Experiment:
    """PPO with continuous actions on Pendulum, observations and rewards normalized."""
    return Experiment(
        environment="pendulum",
        agent=PPO(
            learning_rate=Linear(3e-4, 0.0),
            discount=0.95,
            entropy_cost=0.0,
            num_epochs=10,
            num_minibatches=8,
            normalize_observations=True,
            normalize_rewards=True,
        ),
        driver=AnakinConfig(num_envs=64, rollout_length=64, updates_per_chunk=10),
        frames=1_228_800,
    )


@accelerator(
    agent={
        "random_frames": 16_000,
        "replay": {"capacity": 500_000, "batch_size": 1024, "warmup": 16_000},
    },
    driver={"num_envs": 128},
    frames=256_000,
)
def pendulum_sac() -> Experiment:
    """SAC on Pendulum."""
    return Experiment(
        environment="pendulum",
        agent=SAC(**OFF_POLICY),
        driver=AnakinConfig(num_envs=16, rollout_length=1, updates_per_chunk=100),
        frames=64_000,
    )


def pendulum_td3() -> Experiment:
    """TD3 on Pendulum."""
    return dataclasses.replace(pendulum_sac(), agent=td3(**OFF_POLICY))


def pendulum_ddpg() -> Experiment:
    """DDPG on Pendulum."""
    return dataclasses.replace(pendulum_sac(), agent=DDPG(**OFF_POLICY))


def pendulum_muzero() -> Experiment:
    """MuZero on Pendulum: Gumbel search among 16 actions sampled at each node (Sampled MuZero)."""
    return Experiment(
        environment="pendulum",
        agent=MuZero(
            discount=0.97,
            min_value_range=1.0,
            support_max=25.0,
            support_size=101,
            replay=Replay(
                capacity=100_000,
                batch_size=128,
                updates_per_rollout=32,
                warmup=2_000,
                prioritized=True,
            ),
        ),
        driver=AnakinConfig(num_envs=16, rollout_length=8, updates_per_chunk=50),
        frames=64_000,
    )
