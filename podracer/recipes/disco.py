"""Disco: networks trained by a rule that DiscoRL discovered, by `--update-rule`; and discovery."""

from __future__ import annotations

import dataclasses

from podracer.agents.rules.disco import Disco, DiscoDiscovery
from podracer.config.experiment import Experiment
from podracer.drivers.anakin import AnakinConfig
from podracer.replay import Replay


def catch_disco() -> Experiment:
    """Disco103 on Catch: the experiment of DiscoRL's notebook (needs --update-rule FILE)."""
    return Experiment(
        environment="catch",
        agent=Disco(learning_rate=1e-2),
        driver=AnakinConfig(num_envs=2, rollout_length=29, updates_per_chunk=25),
        frames=58_000,
        evaluations=40,
        evaluation_episodes=100,
    )


def cartpole_disco() -> Experiment:
    """Disco103 on CartPole, as `catch_disco` at a lower rate (needs --update-rule FILE)."""
    return dataclasses.replace(
        catch_disco(),
        environment="cartpole",
        agent=Disco(learning_rate=1e-3),
        frames=116_000,
        target_return=475.0,
    )


def breakout_disco() -> Experiment:
    """Disco103 on MinAtar Breakout (needs gymnax and --update-rule FILE), fully connected."""
    return dataclasses.replace(
        catch_disco(),
        environment="gymnax:Breakout-MinAtar",
        agent=Disco(
            learning_rate=1e-3,
            replay=Replay(capacity=1024 * 29, batch_size=64, updates_per_rollout=4, warmup=64 * 29),
        ),
        driver=AnakinConfig(num_envs=32, rollout_length=29, updates_per_chunk=10),
        frames=1_000_000,
        evaluations=20,
        evaluation_policy="sampled",  # greedy episodes of this game are one or two
    )


def disco_discovery() -> Experiment:
    """Discovery of a small rule with the inputs and outputs of Disco103, in the worlds of `lpg`."""
    return Experiment(
        environment="lifetimes:worlds:small+medium+chain,envs=16,steps=4000",
        agent=DiscoDiscovery(learning_rate=3e-3, lifetime_groups=2),
        driver=AnakinConfig(num_envs=256, rollout_length=20, updates_per_chunk=50),
        frames=20_000_000,
        evaluations=0,
    )
