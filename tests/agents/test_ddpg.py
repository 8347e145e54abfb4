"""TD3 and FastTD3: delayed policy and targets, settings and losses of the papers."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from agents import blueprint
from off_policy import (
    BOXED,
    agent_and_env,
)
from walk import (
    begin,
    learn,
)

from podracer import recipes
from podracer.checks import check_agent
from podracer.ops.action_values import Atoms


def test_td3_moves_policy_and_targets_every_second_time():
    agent, env = agent_and_env("td3")
    state, trajectory = begin(agent, env)
    moved = []
    for _ in range(4):
        new, _ = learn(agent, state, trajectory)
        before, after = (
            (shared.params.actor, shared.target_params, shared.params.critics)
            for shared in (state.shared, new.shared)
        )
        equal = jax.tree.map(np.array_equal, before, after)
        moved.append([not all(jax.tree.leaves(part)) for part in equal])
        state = new
    assert moved == [[False, False, True], [True, True, True]] * 2


@pytest.mark.slow
def test_fast_td3_is_that_of_its_paper():
    """Settings of its code for MuJoCo Playground, but for the range of returns and the network."""
    experiment = recipes.find("pendulum_fast_td3")
    agent, replay = experiment.agent, experiment.agent.replay
    assert (experiment.driver.num_envs, replay.batch_size) == (1024, 32_768)
    assert agent.return_distribution == Atoms(-250.0, 250.0, 101)
    assert (agent.weight_decay, agent.target_update_rate, agent.discount) == (0.1, 0.1, 0.97)
    assert (agent.num_critics, agent.policy_delay, agent.normalize_observations) == (2, 2, True)
    check_agent(blueprint(agent, BOXED.spec, 1), num_envs=1024)
