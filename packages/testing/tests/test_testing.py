"""What the functions accept, and that they notice an agent which breaks its promise."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from podracer.agents import A2C
from podracer_testing import walk
from podracer_testing.contract import check_contract, check_greedy, check_time_outs
from podracer_testing.plugin import MAPPINGS, free_programs

SETTINGS = A2C(network=walk.network())


def test_an_agent_of_the_library_keeps_the_contract():
    check_contract(SETTINGS)


def test_an_agent_that_always_explores_is_noticed():
    agent = walk.built(SETTINGS)

    def act(params, carry, timestep, keys, explore):
        return agent.act(params, carry, timestep, keys, True)

    with pytest.raises(AssertionError):
        check_greedy(dataclasses.replace(agent, act=act))


def test_an_agent_that_learns_from_resets_is_noticed():
    agent = walk.built(SETTINGS)

    def learn(state, trajectory, key, axis):
        rewards = trajectory.timesteps().reward
        shifted = trajectory.with_rewards(rewards + jnp.sum(rewards))
        return agent.learn(state, shifted, key, axis)

    with pytest.raises(AssertionError):
        check_time_outs(dataclasses.replace(agent, learn=learn))


@pytest.mark.skipif(not MAPPINGS.exists(), reason="this system does not list a process's mappings")
def test_programs_are_freed_before_linux_allows_no_more():
    program = jax.jit(lambda x: x + 1)
    program(0.0)
    free_programs()
    assert program._cache_size() == 1
    free_programs(most_mappings=0)
    assert program._cache_size() == 0
