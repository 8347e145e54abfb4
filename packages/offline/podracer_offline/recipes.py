"""Recipes of agents that learn from a data set."""

from __future__ import annotations

import dataclasses

from podracer.config.experiment import Experiment
from podracer.drivers.anakin import AnakinConfig
from podracer.networks import MLP, TorsoNetwork
from podracer.recipes.cartpole import cartpole_dqn
from podracer.recipes.pendulum import NETWORK, REPLAY, pendulum_sac
from podracer.replay import Replay
from podracer_offline.avril import AVRIL
from podracer_offline.cloning import Cloning
from podracer_offline.iql import IQL
from podracer_offline.records import FromData
from podracer_offline.td3 import td3_bc
from podracer_offline.teacher import DAgger


def cartpole_cloning() -> Experiment:
    """Behavior cloning of CartPole's data: `environment="data:FILE.npz"`."""
    return Experiment(
        environment="cartpole",
        agent=Cloning(),
        driver=AnakinConfig(num_envs=128, rollout_length=4, updates_per_chunk=50),
        frames=512_000,
        evaluation_episodes=128,
    )


def cartpole_dagger() -> Experiment:
    """DAgger of a policy for CartPole: `environment="taught:RUN"`."""
    return Experiment(
        environment="cartpole",
        agent=DAgger(replay=Replay(capacity=100_000, updates_per_rollout=4, warmup=0)),
        driver=AnakinConfig(num_envs=16, rollout_length=16, updates_per_chunk=20),
        frames=50_000,
        evaluation_episodes=128,
    )


def cartpole_avril() -> Experiment:
    """AVRIL, reward and policy, from CartPole's data: `environment="data:FILE.npz"`."""
    return Experiment(
        environment="cartpole",
        agent=AVRIL(learning_rate=1e-3),
        driver=AnakinConfig(num_envs=32, rollout_length=16, updates_per_chunk=50),
        frames=1_024_000,
        evaluation_episodes=128,
    )


def cartpole_dqn_data() -> Experiment:
    """DQN from CartPole's data: `environment="data:FILE.npz"`."""
    experiment = cartpole_dqn()
    return dataclasses.replace(experiment, agent=FromData(experiment.agent))


def pendulum_iql() -> Experiment:
    """IQL from Pendulum's data: `environment="data:FILE.npz"`."""
    return Experiment(
        environment="pendulum",
        agent=IQL(discount=0.97, network=TorsoNetwork(MLP((64, 64)), shared=False)),
        driver=AnakinConfig(num_envs=256, rollout_length=1, updates_per_chunk=500),
        frames=2_560_000,
    )


def pendulum_iql_online() -> Experiment:
    """IQL on Pendulum itself, to go on from data: `--weights RUN` of `pendulum_iql`."""
    return dataclasses.replace(
        pendulum_sac(),
        agent=IQL(discount=0.97, replay=REPLAY, network=TorsoNetwork(MLP((64, 64)), shared=False)),
    )


def pendulum_sac_data() -> Experiment:
    """SAC from Pendulum's data: `environment="data:FILE.npz"`."""
    experiment = pendulum_sac()
    return dataclasses.replace(experiment, agent=FromData(experiment.agent))


def pendulum_td3_bc() -> Experiment:
    """TD3+BC from Pendulum's data: `environment="data:FILE.npz"`."""
    return Experiment(
        environment="pendulum",
        agent=td3_bc(
            discount=0.97,
            replay=dataclasses.replace(REPLAY, updates_per_rollout=1),
            network=NETWORK,
        ),
        driver=AnakinConfig(num_envs=64, rollout_length=1, updates_per_chunk=500),
        frames=1_280_000,
    )
