"""Learned update rules, of LPG and DiscoRL: their discovery, and agents that they train."""

from __future__ import annotations

import dataclasses

from podracer.agents import A2C, LPG, Disco
from podracer.agents.rules.lpg import UpdateRule
from podracer.config.experiment import Experiment
from podracer.drivers.anakin import AnakinConfig
from podracer.networks import Table
from podracer.recipes.sizes import accelerator


def catch_disco() -> Experiment:
    """Disco103 on Catch: the experiment of DiscoRL's notebook (needs --update-rule FILE)."""
    return Experiment(
        environment="catch",
        agent=Disco(learning_rate=1e-2),
        driver=AnakinConfig(num_envs=2, rollout_length=29, updates_per_chunk=25),
        frames=58_000,
        evaluations=40,
    )


@accelerator(driver={"num_envs": 8192}, frames=960_000_000)
def lpg() -> Experiment:
    """LPG: an update rule discovered in small grid worlds and chains, on a laptop.

    With `--size accelerator` sixteen times as large, and not trained at this size.
    """
    return Experiment(
        environment="lifetimes:worlds:small+medium+chain,envs=16,steps=4000",
        agent=LPG(learning_rate=1e-3, lifetime_groups=4, rule=UpdateRule(units=32)),
        driver=AnakinConfig(num_envs=512, rollout_length=20, updates_per_chunk=50),
        frames=60_000_000,
        evaluations=0,
    )


def lpg_paper() -> Experiment:
    """LPG at the size of the Podracer paper: 61,440 environments, 960 students, tabular worlds."""
    return dataclasses.replace(
        lpg(),
        environment="lifetimes:worlds:tabular+chains,envs=64,steps=30000",
        agent=LPG(lifetime_groups=4),
        driver=AnakinConfig(num_envs=61_440, rollout_length=20, updates_per_chunk=10),
        frames=20_000_000_000,
    )


def worlds_a2c() -> Experiment:
    """Tabular A2C in one of the grid worlds that update rules are discovered in."""
    return Experiment(
        environment="worlds:dense",
        agent=A2C(learning_rate=0.1, network=Table()),
        driver=AnakinConfig(num_envs=64, rollout_length=20, updates_per_chunk=50),
        frames=2_560_000,
        evaluation_episodes=64,
    )
