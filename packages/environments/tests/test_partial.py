"""Environments without components of their observations, and the recipes that train in them."""

import dataclasses
import re
from types import SimpleNamespace

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import recipes
from podracer.checks import check_environment
from podracer.environment import features
from podracer.envs import make
from podracer.errors import ConfigError
from podracer.types import ArraySpec
from podracer_environments.agents import agents_as_rows
from podracer_environments.partial import PartiallyObserved


def test_hidden_components_are_all_that_is_missing():
    env, whole, action = make("partial:pendulum,hide=2"), make("pendulum"), jnp.ones(1)
    check_environment(env)
    assert env == make("partial:pendulum,hide=2")
    assert env.spec.observation == ArraySpec((2,))
    assert env.spec.action == whole.spec.action
    (state, timestep), expected = env.reset(jax.random.key(0)), whole.reset(jax.random.key(0))
    got = state, dataclasses.replace(timestep, observation=expected[1].observation)
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    np.testing.assert_array_equal(timestep.observation, expected[1].observation[:2])
    _, timestep = env.step(jax.random.key(1), state, action)
    _, expected_timestep = whole.step(jax.random.key(1), expected[0], action)
    np.testing.assert_array_equal(timestep.observation, expected_timestep.observation[:2])
    np.testing.assert_array_equal(timestep.reward, expected_timestep.reward)
    assert features(env).render is not None
    assert features(env).for_evaluation is None
    for hide, shown in (("0+2", [1]), ("1-2", [0]), ("1+2-2", [0])):
        other = make(f"partial:pendulum,hide={hide}")
        np.testing.assert_array_equal(np.setdiff1d(np.arange(3), other.hidden), shown)


def test_optional_features_are_those_of_the_environment():
    inner = make("pendulum")
    optional = {"check_agent": print, "kinds": ("calm", "windy"), "draw": id, "num_agents": 3}
    env = SimpleNamespace(spec=inner.spec, reset=inner.reset, step=inner.step, **optional)
    env.enter = lambda key, world: inner.reset(key)
    hidden = PartiallyObserved(env, (2,))
    assert {name: getattr(hidden, name) for name in optional} == optional
    assert features(hidden).enter(jax.random.key(0), 1)[1].observation.shape == (2,)


def test_an_environment_of_gymnasium_is_refused():
    pole = gymnasium.make("CartPole-v1")
    for wrap in (PartiallyObserved, agents_as_rows):
        with pytest.raises(ConfigError, match="TimeLimit is one of Gymnasium: pass"):
            wrap(pole, 2)


def test_a_missing_option_is_named():
    with pytest.raises(ConfigError, match=re.escape("partial:pendulum: add ,hide=VALUE.")):
        make("partial:pendulum")


@pytest.mark.parametrize("name", ["pendulum_recurrent_sac", "pendulum_recurrent_td3"])
def test_a_recipe_has_a_memory(name):
    experiment = recipes.find(name)
    assert experiment.environment == "partial:pendulum,hide=2"
    assert experiment.agent.network.memory == "lstm"
