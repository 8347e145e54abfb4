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
from podracer.fields import struct
from podracer.policy import Policy
from podracer_offline import Dataset, agreement
from podracer_offline.records import with_recorded_action


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


@pytest.mark.parametrize("actions", [np.linspace(-3, 3, 8)[:, None], np.arange(8)])
def test_a_part_of_a_log_may_have_actions_that_the_other_lacks(actions):
    """Nobody knows the bounds of a log, so they are the extremes of what was learned from."""
    log = Dataset(
        observation=np.zeros((8, 2), np.float32),
        action=actions,
        reward=np.zeros(8),
        terminal=np.ones(8, bool),
        timeout=np.zeros(8, bool),
    )
    keep = np.arange(8) < 6
    lessons, exam = log._episodes(keep), log._episodes(~keep)
    agent = A2C(network=network()).build(lessons.spec)
    assert agreement(Policy(agent, agent.init(jax.random.key(0), 1)), exam) == 0


@struct
class LastAction:
    last_action: jax.Array


def test_agents_that_act_together_and_observe_their_last_actions_are_refused():
    """Which part of a recorded action is whose is not in their memory."""
    carry, action = {"speaker": (), "listener": LastAction(jnp.zeros(2))}, jnp.ones((2, 2))
    with pytest.raises(ConfigError, match="one of these observes its own last action"):
        with_recorded_action(carry, action)
    assert with_recorded_action({"speaker": ()}, action) == {"speaker": ()}


def test_a_policy_observes_the_recorded_actions_as_its_last_ones():
    """It repeats its last action, so it agrees wherever the data set does."""

    def act(params, carry, timestep, keys, explore):
        action = jnp.where(timestep.first, 0, carry.last_action)
        return action, (), LastAction(action)

    agent = built(A2C(), WALK)
    carry = lambda num_envs: LastAction(jnp.zeros(num_envs, jnp.int32))  # noqa: E731
    policy = Policy(dataclasses.replace(agent, act=act, carry=carry), fresh(agent))
    terminal = np.array([0, 0, 0, 1, 0, 0, 1], bool)
    data = Dataset(
        observation=np.zeros((7, 2), np.float32),
        action=np.array([0, 2, 2, 1, 1, 1, 2]),
        reward=np.zeros(7, np.float32),
        terminal=terminal,
        timeout=np.zeros(7, bool),
    )
    assert agreement(policy, data) == pytest.approx(3 / 7)  # rows 0, 2 and 5
