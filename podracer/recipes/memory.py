"""Tasks that only agents with memory solve."""

from __future__ import annotations

import dataclasses

from podracer.agents import PPO, PQN, R2D2
from podracer.config.experiment import Experiment
from podracer.drivers.anakin import AnakinConfig
from podracer.networks import MLP, TorsoNetwork
from podracer.recipes.sizes import accelerator
from podracer.replay import Replay
from podracer.schedules import Linear


@accelerator(
    agent={"learning_rate": 2e-3},
    driver={"num_envs": 1024, "updates_per_chunk": 4},
    frames=1_310_720,
)
def memory_ppo() -> Experiment:
    """Recurrent PPO on a task that needs memory."""
    return Experiment(
        environment="probe:memory",
        agent=PPO(
            learning_rate=1e-3,
            network=TorsoNetwork(MLP((32,), "tanh"), memory="gru", memory_size=32),
        ),
        driver=AnakinConfig(num_envs=64, rollout_length=32, updates_per_chunk=10),
        frames=409_600,
    )


def memory_pqn() -> Experiment:
    """Recurrent PQN on a task that needs memory."""
    return dataclasses.replace(
        memory_ppo(),
        agent=PQN(
            learning_rate=1e-3,
            trace_lambda=0.95,
            epsilon=Linear(1.0, 0.05, frames=50_000),
            network=TorsoNetwork(MLP((32,), layer_norm=True), memory="gru", memory_size=32),
        ),
        frames=204_800,
    )


def memory_r2d2() -> Experiment:
    """R2D2 on a task that needs memory."""
    return Experiment(
        environment="probe:memory",
        agent=R2D2(
            target_update_period=50,
            burn_in_length=8,
            unroll_length=16,
            n_step=2,
            replay=Replay(capacity=40_000, batch_size=64, updates_per_rollout=4, prioritized=True),
        ),
        driver=AnakinConfig(num_envs=16, rollout_length=16, updates_per_chunk=20),
        frames=102_400,
    )
