"""Environments of gymnax: their episodes, and what their time limit is."""

from __future__ import annotations

import importlib.util
import inspect

import numpy as np
import pytest
from episodes import check_episodes, play
from variants import variants

from podracer import recipes
from podracer.checks import check_environment
from podracer.envs import make
from podracer.errors import ConfigError
from podracer.io.entry_points import installed
from podracer_environments import gymnax_recipes

NAMES = (
    "CartPole-v1",
    "Catch-bsuite",
    "MemoryChain-bsuite",
    "Breakout-MinAtar",
    "Asterix-MinAtar",
    "Pendulum-v1",
)
pytestmark = [
    pytest.mark.skipif(
        not (importlib.util.find_spec("gymnax") and importlib.util.find_spec("six")),
        reason="gymnax is not installed",
    ),
    # Before release 1 gymnax scatters numbers into flags and asks for int64.
    pytest.mark.filterwarnings("ignore:scatter inputs have incompatible types:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Explicitly requested dtype:UserWarning"),
]


@variants("name", ["Catch-bsuite", "Pendulum-v1"], NAMES)
def test_gymnax_environment(name: str) -> None:
    env = make(f"gymnax:{name}")
    spec = check_environment(env)
    assert spec.name == f"gymnax:{name}"
    assert hash(env) == hash(make(f"gymnax:{name}"))
    check_episodes(f"gymnax:{name}", 201)  # an episode of Pendulum has 200
    timesteps, _ = play(env, 100, 4)
    assert timesteps.observation.shape == (101, 4, *spec.observation.shape)
    assert timesteps.observation.dtype == spec.observation.dtype


def test_gymnax_time_out_is_not_a_terminal() -> None:
    shown, _ = play(make("gymnax:Catch-bsuite", max_steps_in_episode=4), 20, 4)
    assert np.flatnonzero(shown.last.all(axis=1)).tolist() == [4, 9, 14, 19]
    assert (shown.discount == 1).all()
    assert not shown.reward.any()

    # This one keeps its own flag of having ended, which the clock must not set.
    shown, _ = play(make("gymnax:Breakout-MinAtar", max_steps_in_episode=3), 20, 4)
    assert np.flatnonzero(shown.last.all(axis=1)).tolist() == [3, 7, 11, 15, 19]
    assert (shown.discount == 1).all()


def test_gymnax_without_a_step_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_steps_in_episode must be 1, 2, 3 and so on, not 0"):
        make("gymnax:Catch-bsuite", max_steps_in_episode=0)


def test_gymnax_terminal_wins_over_the_clock() -> None:
    shown, _ = play(make("gymnax:Catch-bsuite", max_steps_in_episode=9), 27, 4)
    assert np.flatnonzero((shown.discount == 0).all(axis=1)).tolist() == [9, 18, 27]
    assert not shown.last.any()


def test_gymnax_observations_know_the_clock() -> None:
    """The limit is a part of this one's observation, so it cannot just be lifted."""
    shown, _ = play(make("gymnax:DiscountingChain-bsuite", max_steps_in_episode=10), 10, 2)
    np.testing.assert_allclose(shown.observation[:, 0, 1], np.arange(11) / 10, rtol=1e-6)


def test_every_recipe_is_attached_and_trains_in_gymnax() -> None:
    entries = installed("recipes").values()
    names = {entry.name for entry in entries if entry.module == gymnax_recipes.__name__}
    functions = inspect.getmembers(gymnax_recipes, inspect.isfunction)
    own = {name for name, function in functions if function.__module__ == gymnax_recipes.__name__}
    assert names == own
    for name in names:
        experiment = recipes.find(name)
        assert check_environment(make(experiment.environment)).name.startswith("gymnax:")
