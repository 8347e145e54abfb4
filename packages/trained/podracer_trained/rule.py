"""An agent that learns by the update rule in this package, and its recipe."""

from __future__ import annotations

from pathlib import Path

import podracer
from podracer.agents.rules.lpg.rule import UpdateRule
from podracer.agents.rules.lpg.student import LPGStudent
from podracer.networks import Table


@podracer.struct
class ShippedRule(LPGStudent):
    """Agent trained by the update rule in this package, which LPG learned in small worlds."""

    @property
    def data_file(self) -> str:
        return str(Path(__file__).parent / "rule.npz")


def world_shipped_rule() -> podracer.Experiment:
    """Table in a grid world, trained by the update rule of podracer-trained."""
    return podracer.Experiment(
        environment="worlds:dense",
        agent=ShippedRule(
            learning_rate=40.0, optimizer="sgd", rule=UpdateRule(units=32), network=Table()
        ),
        driver=podracer.AnakinConfig(num_envs=64, rollout_length=20, updates_per_chunk=50),
        frames=2_560_000,
        evaluation_episodes=64,
    )
