"""Recipes of gymnax: MinAtar's Breakout (Young and Tian 2019) and bsuite's memory chain."""

from __future__ import annotations

import dataclasses

from podracer.agents import DQN, PPO, PQN, R2D2, Disco
from podracer.agents.dqn import rainbow
from podracer.config.experiment import Experiment
from podracer.drivers.anakin import AnakinConfig
from podracer.networks import CNN, MLP, ResNet, TorsoNetwork
from podracer.ops.action_values import Atoms
from podracer.recipes.sizes import accelerator
from podracer.replay import Replay
from podracer.schedules import Linear

# MinAtar's network: one convolution and one fully connected layer.
MINATAR = CNN(channels=(16,), kernels=(3,), strides=(1,), hidden=(128,))


@accelerator(driver={"num_envs": 2048}, frames=80_000_000)
def breakout_ppo() -> Experiment:
    """PPO on MinAtar Breakout (needs gymnax), fully connected as in the peers' benchmarks.

    With `--size accelerator` sixteen times as large, and not trained at this size.
    """
    return Experiment(
        environment="gymnax:Breakout-MinAtar",
        agent=PPO(
            learning_rate=Linear(5e-3, 0.0),
            gae_lambda=0.9,
            num_minibatches=8,
            network=TorsoNetwork(MLP((64, 64), "relu"), shared=False),
        ),
        driver=AnakinConfig(num_envs=128, rollout_length=64, updates_per_chunk=20),
        frames=5_000_000,
        evaluations=20,
        evaluation_policy="sampled",  # greedy episodes of this game are one or two
    )


@accelerator(driver={"num_envs": 1024}, frames=40_000_000)
def breakout_cnn_ppo() -> Experiment:
    """PPO with a convolutional network on MinAtar Breakout (needs gymnax).

    Of five constant learning rates and three annealed, seeds 0 and 1, 4e-3 is the best after 1 M
    frames: 36.8 constant and 35.9 annealed, where 1e-3 is at 20.9. With `--size accelerator` eight
    times as large, and not trained at this size.
    """
    return dataclasses.replace(
        breakout_ppo(),
        agent=PPO(
            learning_rate=Linear(4e-3, 0.0), num_minibatches=8, network=TorsoNetwork(MINATAR)
        ),
    )


def breakout_resnet_ppo() -> Experiment:
    """PPO with a residual network of any width and depth (`--channels`, `--blocks`)."""
    torso = ResNet(channels=(16,), blocks=1)
    return dataclasses.replace(
        breakout_cnn_ppo(),
        agent=PPO(learning_rate=1e-3, num_minibatches=8, network=TorsoNetwork(torso)),
        driver=AnakinConfig(num_envs=128, rollout_length=64, updates_per_chunk=4),
        frames=500_000,
        evaluations=15,
        evaluation_episodes=64,
    )


def breakout_dqn() -> Experiment:
    """Double DQN with MinAtar's convolutional network on MinAtar Breakout (needs gymnax)."""
    return Experiment(
        environment="gymnax:Breakout-MinAtar",
        agent=DQN(
            learning_rate=5e-4,
            epsilon=Linear(1.0, 0.01, frames=250_000),
            target_update_period=250,
            replay=Replay(capacity=200_000, updates_per_rollout=8, warmup=5_000),
            network=TorsoNetwork(MINATAR),
        ),
        driver=AnakinConfig(num_envs=64, rollout_length=4, updates_per_chunk=100),
        frames=1_000_000,
        evaluations=20,
        evaluation_epsilon=0.01,  # greedy episodes of this game are one or two
    )


@accelerator(
    agent={"epsilon": Linear(1.0, 0.05, frames=8e6)},
    driver={"num_envs": 2048},
    frames=80_000_000,
)
def breakout_pqn() -> Experiment:
    """PQN on MinAtar Breakout (needs gymnax), with half the frames of its authors' settings.

    With `--size accelerator` sixteen times as large, and not trained at this size.
    """
    return Experiment(
        environment="gymnax:Breakout-MinAtar",
        agent=PQN(
            learning_rate=Linear(5e-4, 0.0),
            epsilon=Linear(1.0, 0.05, frames=5e5),
            num_minibatches=32,
            network=TorsoNetwork(dataclasses.replace(MINATAR, layer_norm=True)),
        ),
        driver=AnakinConfig(num_envs=128, rollout_length=32, updates_per_chunk=20),
        frames=5_000_000,
        evaluations=20,
        evaluation_epsilon=0.01,  # greedy episodes of this game are one or two
    )


def breakout_rainbow() -> Experiment:
    """Rainbow on MinAtar Breakout (needs gymnax).

    The game is deterministic after one of two openings, so epsilon-greedy actions explore besides
    the noise, which begins as in DQN Zoo. Of six learning rates from 1.25e-4 to 8e-3, seeds 0 and
    1, 2e-3 is the best after 0.4 M frames: 13.8, where 1e-3 and 4e-3 are at 11.4 and 11.3.
    """
    return dataclasses.replace(
        breakout_dqn(),
        agent=rainbow(
            learning_rate=2e-3,
            epsilon=Linear(1.0, 0.02, frames=250_000),
            noise_scale=0.1,
            target_update_period=250,
            value=Atoms(0.0, 25.0, 51),
            replay=Replay(
                capacity=200_000,
                updates_per_rollout=8,
                warmup=5_000,
                prioritized=True,
                priority_exponent=0.5,
                importance_exponent=Linear(0.4, 1.0, frames=1_000_000),
            ),
            network=TorsoNetwork(MINATAR),
        ),
    )


def breakout_disco() -> Experiment:
    """Disco103 on MinAtar Breakout (needs gymnax and --update-rule FILE), fully connected."""
    return Experiment(
        environment="gymnax:Breakout-MinAtar",
        agent=Disco(
            learning_rate=1e-3,
            replay=Replay(capacity=1024 * 29, batch_size=64, updates_per_rollout=4, warmup=64 * 29),
        ),
        driver=AnakinConfig(num_envs=32, rollout_length=29, updates_per_chunk=10),
        frames=1_000_000,
        evaluations=20,
        evaluation_episodes=100,
        evaluation_policy="sampled",  # greedy episodes of this game are one or two
    )


def memorychain_r2d2() -> Experiment:
    """R2D2 on bsuite's memory chain: recall the first observation after 15 steps (gymnax)."""
    return Experiment(
        environment="gymnax:MemoryChain-bsuite,memory_length=15",
        agent=R2D2(
            learning_rate=2e-3,
            target_update_period=50,
            burn_in_length=8,
            unroll_length=40,
            n_step=3,
            replay=Replay(capacity=40_000, batch_size=64, updates_per_rollout=8, prioritized=True),
        ),
        driver=AnakinConfig(num_envs=16, rollout_length=32, updates_per_chunk=20),
        frames=307_200,
    )


def memorychain_pqn() -> Experiment:
    """Recurrent PQN on the memory chain (gymnax)."""
    return dataclasses.replace(
        memorychain_r2d2(),
        agent=PQN(
            learning_rate=1e-3,
            trace_lambda=0.95,
            epsilon=Linear(1.0, 0.01, frames=30_000),
            num_epochs=4,
            network=TorsoNetwork(MLP((128,), layer_norm=True), memory="gru"),
        ),
        driver=AnakinConfig(num_envs=32, rollout_length=64, updates_per_chunk=5),
    )


def memorychain_dqn() -> Experiment:
    """Feed-forward DQN on the memory chain: without a memory its mean return stays 0 (gymnax)."""
    return dataclasses.replace(
        memorychain_r2d2(),
        agent=DQN(
            learning_rate=1e-3,
            epsilon=Linear(1.0, 0.05, frames=20_000),
            target_update_period=50,
            replay=Replay(capacity=50_000, updates_per_rollout=4),
        ),
        driver=AnakinConfig(num_envs=16, rollout_length=4, updates_per_chunk=100),
    )
