"""Learned policy gradient (LPG): discovering an update rule, and training with one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from podracer.agents.a2c import A2C
from podracer.agents.lpg import LPG, UpdateRule
from podracer.agents.lpg.rule_file import read_rule
from podracer.agents.lpg.student import lpg_student
from podracer.drivers.anakin import AnakinConfig
from podracer.experiments.experiment import Experiment
from podracer.experiments.recipes.registry import recipe
from podracer.networks import Table


@recipe
def lpg() -> Experiment:
    """LPG: an update rule discovered in small grid worlds and chains, on a laptop."""
    return Experiment(
        environment="lifetimes:worlds:small+medium+chain,envs=16,steps=4000",
        agent=LPG(learning_rate=1e-3, lifetime_groups=4, rule=UpdateRule(units=32)),
        driver=AnakinConfig(num_envs=512, rollout_length=20, updates_per_chunk=50),
        frames=60_000_000,
        evaluations=0,
    )


@recipe
def lpg_paper() -> Experiment:
    """LPG at the size of the Podracer paper: 61,440 environments, 960 students, tabular worlds."""
    return dataclasses.replace(
        lpg(),
        environment="lifetimes:worlds:tabular+chains,envs=64,steps=30000",
        agent=LPG(lifetime_groups=4),
        driver=AnakinConfig(num_envs=61_440, rollout_length=20, updates_per_chunk=10),
        frames=20_000_000_000,
    )


@recipe
def worlds_a2c() -> Experiment:
    """Tabular A2C in one of the grid worlds that update rules are discovered in."""
    return Experiment(
        environment="worlds:dense",
        agent=A2C(learning_rate=0.1, network=Table()),
        driver=AnakinConfig(num_envs=64, rollout_length=20, updates_per_chunk=50),
        frames=2_560_000,
        evaluation_episodes=64,
    )


def with_update_rule(experiment: Experiment, file: str) -> Experiment:
    """Return the experiment with its agent's network trained by the update rule of a file."""
    old: Any = experiment.agent  # every agent of the library has these three
    rate = {} if isinstance(old.network, Table) else {"learning_rate": old.learning_rate}
    path = Path(file).resolve()
    rule, _ = read_rule(path)
    agent = lpg_student(rule, old.network, rule_file=str(path), discount=old.discount, **rate)
    driver = experiment.driver
    if isinstance(driver, AnakinConfig):
        driver = dataclasses.replace(driver, fused=False)
    return dataclasses.replace(
        experiment, recipe=f"{experiment.recipe}_under_rule", agent=agent, driver=driver
    )
