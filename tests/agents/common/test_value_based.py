"""Exploration of agents that act by values: an epsilon for each environment."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from off_policy import DISCRETE, agent_and_env
from walk import B, begin, enter, fresh

from podracer.agents.common import value_based
from podracer.schedules import Linear
from podracer.types import LearnerState, leaves_by_path


def test_each_environment_has_an_epsilon_as_in_ape_x():
    epsilons = value_based.apex_epsilon(jnp.float32(0.4), 7.0, value_based.environment_ranks(8))
    np.testing.assert_allclose(epsilons, [0.4 ** (1 + 7 * i / 7) for i in range(8)], rtol=1e-5)
    alone = value_based.apex_epsilon(jnp.float32(0.4), 7.0, value_based.environment_ranks(1))
    assert alone.tolist() == [np.float32(0.4)]


@pytest.mark.parametrize("name", ["dqn", "r2d2"])
def test_a_changed_exponent_holds_for_what_environments_carry_already(name):
    """A population's selection changes the number, and keeps the carry."""
    old, _ = agent_and_env(name, epsilon=0.5, apex_alpha=0.0)
    new, _ = agent_and_env(name, epsilon=0.5, apex_alpha=30.0)
    params, actor = old.actor_params(fresh(old)), enter(old, DISCRETE)
    keys = jax.random.split(jax.random.key(0), (64, B))

    def actions(agent: Any, carry: Any) -> np.ndarray:
        act = jax.vmap(lambda keys: agent.act(params, carry, actor.timestep, keys, True)[0])
        return np.asarray(act(keys))

    changed = actions(new, actor.carry)
    np.testing.assert_array_equal(changed, actions(new, new.carry(B)))
    assert (changed[:, -1] == changed[0, -1]).all()  # greedy: epsilon is 0.5 to the power of 31
    assert (changed != actions(old, actor.carry)).any()


@pytest.mark.parametrize("name", ["dqn", "r2d2"])
def test_a_rank_has_another_path_than_the_exponent_of_older_checkpoints(name):
    """Both have one shape and dtype: at one path, a run would go on with other epsilons."""
    assert ".rank" in leaves_by_path(agent_and_env(name)[0].carry(B))


@pytest.mark.parametrize("name", ["dqn", "r2d2"])
def test_epsilon_decays_with_the_frames(name):
    agent, env = agent_and_env(name, epsilon=Linear(1.0, 0.1, frames=4 * 8 * B))
    state, _ = begin(agent, env)
    epsilons = []
    for rollouts in range(6):
        counted = dataclasses.replace(state.shared, frames=jnp.uint32(rollouts * 8 * B))
        epsilons.append(float(agent.actor_params(LearnerState(counted)).epsilon))
    np.testing.assert_allclose(epsilons, [1.0, 0.775, 0.55, 0.325, 0.1, 0.1], rtol=1e-5)
