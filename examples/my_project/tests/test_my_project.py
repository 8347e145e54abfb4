"""What must hold before a long training: `python -m pytest`."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from my_project.agent import Reinforce
from my_project.environment import Board, make
from my_project.recipes import my_project

import podracer


def test_the_environment_keeps_the_rules() -> None:
    """Shapes, dtypes and ends of episodes, in random play."""
    podracer.check_environment(make())


def test_the_goal_ends_an_episode() -> None:
    """A rule of this environment: one step to the right from the goal's left neighbor."""
    board = Board()
    state, _ = board.reset(jax.random.key(0))
    state = dataclasses.replace(state, position=jnp.asarray([2, 2]), goal=jnp.asarray([2, 3]))
    _, timestep = board.step(jax.random.key(1), state, jnp.int32(0))  # the action (0, 1)
    assert (timestep.reward, timestep.discount, timestep.last) == (1.0, 0.0, True)


def test_the_agent_keeps_the_rules() -> None:
    """Shapes, dtypes, randomness, and that every parameter has a gradient."""
    podracer.check_agent(podracer.Blueprint(Reinforce(), make().spec))


def test_the_agent_learns(tmp_path) -> None:
    """A few seconds of training: random play returns about -0.1, the best possible is 0.94."""
    result = podracer.train(
        my_project(), run_dir=tmp_path / "run", frames=102_400, evaluations=1, progress=False
    )
    assert result.evaluation.returns.mean() > 0.5
