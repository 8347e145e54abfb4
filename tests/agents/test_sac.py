"""SAC: its temperature and its learning rate."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from off_policy import (
    agent_and_env,
)
from walk import (
    begin,
    learn,
)

from podracer.schedules import Linear


@pytest.mark.slow
def test_sac_stops_where_its_learning_rate_ends():
    """After the frames of one rollout, temperature included."""
    num_frames = int(begin(*agent_and_env("sac"))[1].valid().sum())
    agent, env = agent_and_env("sac", learning_rate=Linear(1e-3, 0.0, frames=num_frames))
    state, trajectory = begin(agent, env)
    once, _ = learn(agent, state, trajectory)
    twice, _ = learn(agent, once, trajectory)
    before, after, later = (jax.tree.leaves(x.shared.params) for x in (state, once, twice))
    assert not any(map(np.array_equal, before, after))
    assert all(map(np.array_equal, after, later))


@pytest.mark.parametrize(
    ("target", "sign"), [(-50.0, -1), pytest.param(50.0, 1, marks=pytest.mark.slow)]
)
def test_sac_pays_for_entropy_until_there_is_as_much_as_wanted(target, sign):
    """The temperature falls while the entropy is above the target, and rises below it."""
    agent, env = agent_and_env("sac", target_entropy=target)
    state, trajectory = begin(agent, env)
    new, _ = learn(agent, state, trajectory)
    before, after = (x.shared.params.actor.log_temperature for x in (state, new))
    change = after - before
    assert np.sign(change) == sign
