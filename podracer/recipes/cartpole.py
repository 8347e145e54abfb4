"""CartPole, on the device and from Gymnasium."""

from __future__ import annotations

import dataclasses
from typing import Any

from podracer.agents import DQN, PPO, PQN, Impala, MuZero, Stacx
from podracer.agents.common.optimizers import Optimizer
from podracer.agents.dqn import rainbow
from podracer.config.experiment import Experiment
from podracer.drivers.anakin import AnakinConfig
from podracer.drivers.sebulba import SebulbaConfig
from podracer.networks import MLP, TorsoNetwork
from podracer.ops.action_values import Atoms, SquaredMean
from podracer.recipes.sizes import accelerator
from podracer.replay import Replay
from podracer.schedules import Linear

# Settings of both actor-critics with V-trace, so that they can be compared.
V_TRACE: dict[str, Any] = {
    "learning_rate": 2e-3,
    "discount": 0.97,
    "trace_lambda": 0.95,
    "optimizer": Optimizer(),
    "max_gradient_norm": 40.0,
    "network": TorsoNetwork(MLP((64, 64), "tanh")),
}
# Replay of DQN and Rainbow at their sizes for an accelerator.
MANY = {"capacity": 200_000, "batch_size": 512, "updates_per_rollout": 16, "warmup": 10_000}


@accelerator(
    agent={"learning_rate": 2e-3, "num_minibatches": 16},
    driver={"num_envs": 4096},
    frames=16_384_000,
)
def cartpole_ppo() -> Experiment:
    """PPO on CartPole."""
    return Experiment(
        environment="cartpole",
        agent=PPO(learning_rate=1e-3),
        driver=AnakinConfig(num_envs=32, rollout_length=32, updates_per_chunk=10),
        frames=512_000,
        evaluation_episodes=128,
        target_return=475.0,
    )


@accelerator(driver={"num_envs": 1024}, frames=24_576_000, evaluations=30)
def cartpole_impala() -> Experiment:
    """IMPALA on CartPole, with Adam instead of RMSProp."""
    return dataclasses.replace(
        cartpole_ppo(), agent=Impala(**V_TRACE), frames=1_536_000, evaluation_episodes=64
    )


def cartpole_stacx() -> Experiment:
    """STACX on CartPole: `cartpole_impala` that tunes itself."""
    return dataclasses.replace(cartpole_impala(), agent=Stacx(**V_TRACE))


def cartpole_sebulba() -> Experiment:
    """PPO on Gymnasium's CartPole, stepped by processes of the host."""
    return dataclasses.replace(
        cartpole_ppo(),
        environment="gymnasium:CartPole-v1",
        driver=SebulbaConfig(
            num_envs=32, rollout_length=32, updates_per_chunk=10, threads_per_actor=1
        ),
        evaluations=3,
        evaluation_episodes=16,
    )


@accelerator(
    agent={"epsilon": Linear(1.0, 0.05, frames=50_000), "replay": MANY},
    driver={"num_envs": 128, "updates_per_chunk": 50},
    frames=768_000,
)
def cartpole_dqn() -> Experiment:
    """Double DQN on CartPole, with squared errors and a falling rate: it keeps what it learned."""
    return Experiment(
        environment="cartpole",
        agent=DQN(
            learning_rate=Linear(1e-3, 0.0),
            value=SquaredMean(),
            epsilon=Linear(1.0, 0.05, frames=20_000),
            target_update_period=50,
            replay=Replay(capacity=50_000, updates_per_rollout=4),
        ),
        driver=AnakinConfig(num_envs=16, rollout_length=4, updates_per_chunk=100),
        frames=320_000,
        evaluations=20,
        target_return=475.0,
    )


@accelerator(
    agent={"replay": {**MANY, "importance_exponent": Linear(0.4, 1.0, frames=768_000)}},
    driver={"num_envs": 128, "updates_per_chunk": 50},
    frames=768_000,
)
def cartpole_rainbow() -> Experiment:
    """Rainbow on CartPole: everything that DQN can be extended with, at once."""
    return dataclasses.replace(
        cartpole_dqn(),
        agent=rainbow(
            learning_rate=1e-3,
            target_update_period=50,
            value=Atoms(0.0, 100.0, 51),
            replay=Replay(
                capacity=50_000,
                updates_per_rollout=4,
                prioritized=True,
                importance_exponent=Linear(0.4, 1.0, frames=320_000),
            ),
        ),
    )


@accelerator(
    agent={"learning_rate": Linear(1e-3, 0.0), "epsilon": Linear(1.0, 0.2, frames=1_300_000)},
    driver={"num_envs": 1024},
    frames=6_553_600,
)
def cartpole_pqn() -> Experiment:
    """PQN on CartPole."""
    return dataclasses.replace(
        cartpole_ppo(),
        agent=PQN(
            learning_rate=Linear(1e-4, 0.0, frames=500_000),
            trace_lambda=0.95,
            epsilon=Linear(1.0, 0.2, frames=100_000),
            num_epochs=4,
            num_minibatches=16,
            network=TorsoNetwork(MLP((256, 256), layer_norm=True)),
        ),
        driver=AnakinConfig(num_envs=32, rollout_length=64, updates_per_chunk=5),
    )


@accelerator(
    agent={"replay": {"capacity": 400_000, "batch_size": 1024, "warmup": 8_000}},
    driver={"num_envs": 256},
    frames=2_048_000,
)
def cartpole_muzero() -> Experiment:
    """Gumbel MuZero on CartPole.

    With `--size accelerator` eight times as large, and not trained at this size.
    """
    return Experiment(
        environment="cartpole",
        agent=MuZero(
            replay=Replay(capacity=50_000, batch_size=128, updates_per_rollout=4, prioritized=True)
        ),
        driver=AnakinConfig(num_envs=32, rollout_length=8, updates_per_chunk=20),
        frames=256_000,
        evaluations=5,
        evaluation_episodes=16,
        target_return=475.0,
    )
