"""The share of a data set's actions that a policy chooses, too."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from off_policy import agent_and_env
from walk import WALK, built, fresh, network

from podracer.agents.a2c import A2C
from podracer.errors import ConfigError
from podracer.policy import Policy
from podracer_offline import Dataset, agreement


@pytest.mark.parametrize("name", ["none", "sac", pytest.param("gru", marks=pytest.mark.slow)])
def test_agreement_is_the_share_of_equal_actions(name):
    """Episode by episode, alone; then every third action is another one."""
    if name == "sac":
        agent, _ = agent_and_env(name)
    else:
        agent = built(A2C(network=network(name)), WALK)
    state = fresh(agent)
    shared = jax.tree.map(lambda x: x * 3 if jnp.ndim(x) == 2 else x, state.shared)
    state = dataclasses.replace(state, shared=shared)
    policy, rng = Policy(agent, state), np.random.default_rng(2)
    lengths, rewards = [1, 4, 2, 5], rng.normal(size=12).astype(np.float32)
    observation = rng.normal(size=(12, 2)).astype(np.float32)
    ends, actions = np.cumsum(lengths) - 1, []
    for row in range(12):
        begins = row == 0 or row - 1 in ends
        if begins:
            policy.reset()
        actions.append(policy(observation[row], 0.0 if begins else rewards[row - 1]))
    terminal = np.isin(np.arange(12), ends)
    action = np.stack(actions)
    data = Dataset(
        observation=observation,
        action=action,
        reward=rewards,
        terminal=terminal,
        timeout=np.zeros(12, bool),
    )
    assert agreement(policy, data) == 1.0
    others = action.copy()
    is_continuous = name == "sac"
    others[::3] = np.array([[0.5, 1.5]]) - 0.1 * action[::3] if is_continuous else 2 - action[::3]
    share = np.mean([np.all(x == y) for x, y in zip(others, action, strict=True)])
    assert 8 / 12 <= share < 1
    assert agreement(policy, dataclasses.replace(data, action=others)) == pytest.approx(share)
    if is_continuous:
        near = dataclasses.replace(data, action=np.clip(action + 0.04, [-1, 0], [1, 2]))
        assert agreement(policy, near) == 1.0
        assert agreement(policy, near, tolerance=0.01) < 1.0
    with pytest.raises(ConfigError, match="observation of the data set is float32"):
        agreement(policy, dataclasses.replace(data, observation=observation[:, :1]))
