"""PPO on Atari Pong with IMPALA's deep network: a recipe for `atari.py`."""

from __future__ import annotations

import dataclasses

from podracer import recipes
from podracer.config.experiment import Experiment
from podracer.networks import ResNet, TorsoNetwork


def ppo() -> Experiment:
    """PPO at the settings of `atari_ppo`, with the paper's deep residual network."""
    experiment = recipes.find("atari_ppo")
    agent = dataclasses.replace(experiment.agent, network=TorsoNetwork(ResNet()))
    return dataclasses.replace(experiment, agent=agent)
