"""Learning from a replay: warm-up, and where the transitions of a sample end."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest
from off_policy import REPLAY, agent_and_env, sample_of
from walk import begin, first_moments, learn

from podracer.agents.common import off_policy
from podracer.types import LearnerState


@pytest.mark.parametrize("name", ["dqn", pytest.param("sac", marks=pytest.mark.slow)])
def test_nothing_is_learned_before_the_warm_up_is_over(name):
    num_frames = int(begin(*agent_and_env(name))[1].valid().sum())
    replay = dataclasses.replace(REPLAY, warmup=2 * num_frames)
    agent, env = agent_and_env(name, replay=replay)
    state, trajectory = begin(agent, env)
    once, metrics = learn(agent, state, trajectory)
    jax.tree.map(np.testing.assert_array_equal, once.shared.params, state.shared.params)
    assert float(metrics["loss"]) == 0
    twice, metrics = learn(agent, once, trajectory)
    assert float(metrics["loss"]) != 0
    assert first_moments(twice)


def test_the_warm_up_counts_the_frames_of_all_parts_of_a_batch():
    """Each part learns with the replay of its own environments (`updates_per_batch`)."""
    num_frames = int(begin(*agent_and_env("dqn"))[1].valid().sum())
    replay = dataclasses.replace(REPLAY, warmup=2 * num_frames)
    agent, env = agent_and_env("dqn", replay=replay)
    state, trajectory = begin(agent, env)
    one, _ = learn(agent, state, trajectory)
    other, metrics = learn(agent, LearnerState(one.shared, state.local), trajectory)
    assert float(metrics["loss"]) != 0
    assert first_moments(other)


@pytest.mark.parametrize("num_added", [2**29, 2**30 - 8])
def test_learning_goes_on_however_many_timesteps_there_have_been(num_added):
    """All environments together have more of them than an int32 counts."""
    agent, env = agent_and_env("sac")
    state, trajectory = begin(agent, env)
    state, _ = learn(agent, state, trajectory)
    added = state.local.num_added
    assert added.shape[0] * num_added >= 2**31
    local = dataclasses.replace(state.local, num_added=added * 0 + num_added)
    state, metrics = learn(agent, LearnerState(state.shared, local), trajectory)
    assert float(metrics["loss"]) != 0
    assert int(state.local.num_added[0]) < 2**30


@pytest.mark.parametrize(
    ("discount", "last", "returns", "bootstrap", "end", "mask"),
    [
        ([1, 1, 1, 1], [0, 0, 0, 0], 1 + 0.5 * 2 + 0.25 * 3, 0.125, 3, 1),
        ([1, 1, 0, 1], [0, 0, 0, 0], 1 + 0.5 * 2, 0.0, 3, 1),
        ([1, 1, 1, 1], [0, 0, 1, 0], 1 + 0.5 * 2, 0.25, 2, 1),
        ([1, 1, 1, 1], [0, 1, 0, 0], 1.0, 0.5, 1, 1),
        ([1, 1, 1, 1], [1, 0, 0, 0], 0.0, 1.0, 0, 0),
    ],
    ids=["whole", "terminal", "late time-out", "early time-out", "at a time-out"],
)
def test_transitions_end_where_the_episode_does(discount, last, returns, bootstrap, end, mask):
    transition = off_policy.n_step_transition(sample_of([9, 1, 2, 3], discount, last), 0.5)
    assert float(transition.n_step_return[0]) == returns
    assert float(transition.bootstrap_discount[0]) == bootstrap
    assert float(transition.mask[0]) == mask
    if bootstrap and mask:
        assert float(transition.next_timestep.observation[0, 0]) == end
    assert float(transition.timestep.observation[0, 0]) == 0
