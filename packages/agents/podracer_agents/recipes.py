"""Recipes of the package's agents: the core's recipes with another agent."""

from __future__ import annotations

import dataclasses

from podracer.config.experiment import Experiment
from podracer.drivers.anakin import AnakinConfig
from podracer.recipes import catch, pendulum, rules
from podracer_agents.disco_discovery import DiscoDiscovery
from podracer_agents.frodo import Frodo
from podracer_agents.qt_opt import QTOpt


def catch_frodo() -> Experiment:
    """FRODO on Catch: `catch_impala` that learns what its values should predict."""
    return dataclasses.replace(catch.catch_impala(), agent=Frodo(**catch.V_TRACE))


def pendulum_qt_opt() -> Experiment:
    """QT-Opt on Pendulum."""
    return dataclasses.replace(pendulum.pendulum_sac(), agent=QTOpt(**pendulum.OFF_POLICY))


def disco_discovery() -> Experiment:
    """Discovery of a small rule with the inputs and outputs of Disco103, in the worlds of `lpg`."""
    return dataclasses.replace(
        rules.lpg(),
        agent=DiscoDiscovery(learning_rate=3e-3, lifetime_groups=2),
        driver=AnakinConfig(num_envs=256, rollout_length=20, updates_per_chunk=50),
        frames=20_000_000,
    )
