"""MuJoCo's HalfCheetah, Ant and Humanoid, stepped on the host.

`--environment` takes another of its robots.
"""

from __future__ import annotations

import dataclasses

from podracer.agents import PPO, SAC
from podracer.agents.ddpg import td3
from podracer.config.experiment import Experiment
from podracer.drivers.sebulba import SebulbaConfig
from podracer.networks import MLP, TorsoNetwork
from podracer.replay import Replay
from podracer.schedules import Linear

# Settings of all agents with a replay, so that they can be compared: one update for each frame, as
# in the papers and in stable-baselines3.
REPLAY = Replay(capacity=1_000_000, batch_size=256, updates_per_rollout=16, warmup=10_000)


def halfcheetah_ppo() -> Experiment:
    """PPO on MuJoCo's HalfCheetah (needs the extra `mujoco`), everything normalized."""
    return Experiment(
        environment="gymnasium:HalfCheetah-v5",
        agent=PPO(
            learning_rate=Linear(3e-4, 0.0),
            entropy_cost=0.0,
            num_epochs=10,
            num_minibatches=32,
            normalize_observations=True,
            normalize_rewards=True,
            network=TorsoNetwork(MLP((64, 64), "tanh"), shared=False),
        ),
        driver=SebulbaConfig(
            num_envs=16, rollout_length=128, updates_per_chunk=10, threads_per_actor=1
        ),
        frames=1_000_000,
        evaluation_episodes=16,
    )


def halfcheetah_sac() -> Experiment:
    """SAC on MuJoCo's HalfCheetah (needs the extra `mujoco`)."""
    return dataclasses.replace(
        halfcheetah_ppo(),
        agent=SAC(random_frames=10_000, replay=REPLAY),
        driver=SebulbaConfig(
            num_envs=16, rollout_length=1, updates_per_chunk=200, threads_per_actor=1
        ),
    )


def halfcheetah_td3() -> Experiment:
    """TD3 on MuJoCo's HalfCheetah (needs the extra `mujoco`).

    The paper's learning rate: after 51 k frames it is at 3,523 (seed 0), where 3e-4, as in its
    authors' later code, is at 1,359, 1,391 and 2,305 (seeds 100 to 102).
    """
    agent = td3(learning_rate=1e-3, random_frames=10_000, replay=REPLAY)
    return dataclasses.replace(halfcheetah_sac(), agent=agent)
