"""Recipes: functions that return an experiment, for `podracer train`.

An argument of a recipe becomes a flag, if it is annotated `int`, `float`, `bool` or `str`.
"""

from __future__ import annotations

import podracer

from .agent import Reinforce
from .environment import make


def my_project(width: int = 6) -> podracer.Experiment:
    """REINFORCE on a board, where a goal must be reached."""
    return podracer.Experiment(
        recipe="my_project",  # in names of run directories
        environment=make(width),
        agent=Reinforce(),
        # An update learns from 64 x 16 steps; 20 of them are one call of the compiled program,
        # after which the run reports, evaluates and saves.
        driver=podracer.AnakinConfig(num_envs=64, rollout_length=16, updates_per_chunk=20),
        frames=614_400,
        evaluations=6,
    )


def my_project_ppo(width: int = 6) -> podracer.Experiment:
    """PPO on the same board: what a tested agent reaches."""
    return podracer.Experiment(
        recipe="my_project_ppo",
        environment=make(width),
        agent=podracer.PPO(learning_rate=1e-3),
        driver=podracer.AnakinConfig(num_envs=64, rollout_length=32, updates_per_chunk=10),
        frames=409_600,
        evaluations=4,
    )
