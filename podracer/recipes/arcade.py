"""Arcade games on the device: CHIP-8's from octax, Atari's from JAXtari."""

from __future__ import annotations

from podracer.agents.ppo import PPO
from podracer.config.experiment import Experiment
from podracer.drivers.anakin import AnakinConfig
from podracer.networks import CNN, MLP, TorsoNetwork
from podracer.schedules import Linear


def octax_ppo(game: str = "brix") -> Experiment:
    """PPO on the pixels of a CHIP-8 game (`--game NAME`, needs octax)."""
    torso = CNN(channels=(16, 32), kernels=(4, 4), strides=(4, 2), hidden=(128,))
    return Experiment(
        environment=f"octax:{game}",
        agent=PPO(
            learning_rate=Linear(1e-3, 0.0),
            num_epochs=3,
            num_minibatches=8,
            network=TorsoNetwork(torso),
        ),
        driver=AnakinConfig(num_envs=64, rollout_length=64, updates_per_chunk=8),
        frames=1_000_000,
        evaluations=5,
        evaluation_policy="sampled",
    )


def jaxtari_ppo(game: str = "pong") -> Experiment:
    """PPO on the objects of an Atari game (`--game NAME`, needs jaxtari and its sprites)."""
    return Experiment(
        environment=f"jaxtari:{game},objects=true",
        agent=PPO(
            learning_rate=Linear(1e-3, 0.0),
            num_minibatches=8,
            normalize_observations=True,
            network=TorsoNetwork(MLP((64, 64), "relu"), shared=False),
        ),
        driver=AnakinConfig(num_envs=64, rollout_length=128, updates_per_chunk=10),
        frames=2_000_000,
        evaluations=5,
        evaluation_policy="sampled",
    )
