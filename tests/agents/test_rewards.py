"""Changed rewards: each agent learns from `with_rewards` as from an environment's own."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agents import AGENTS, blueprint, environment_for

import podracer
from podracer.errors import ConfigError
from podracer.rollout import init_actor, rollout

B = 16
ACTS_ON_REWARDS = ("sac-gru", "td3-lstm")  # those need a wrapped environment
LENGTHS = {"dqn": 1, "sac": 1, "td3": 1, "fast_td3": 1}  # 8 for others
QUICK = ("ppo", "dqn")


@dataclasses.dataclass(frozen=True)
class Rewarded:
    """An environment whose rewards a function changes; it keeps 0."""

    env: podracer.Environment
    factor: float

    @property
    def spec(self):
        return self.env.spec

    def reset(self, key):
        return self.env.reset(key)

    def step(self, key, state, action):
        state, timestep = self.env.step(key, state, action)
        return state, dataclasses.replace(timestep, reward=self.factor * timestep.reward)


class Learner:
    """An agent's updates in an environment, from rewards that are multiplied on the way or not."""

    def __init__(self, name):
        env = environment_for(name)
        settings = AGENTS[name]
        if name == "r2d2":
            settings = dataclasses.replace(settings, action_reward_inputs=False)
        self.env, self.T = env, LENGTHS.get(name, 8)
        self.blueprint = blueprint(settings, env.spec, self.T)
        self.agent = self.blueprint.build()
        self.learn = jax.jit(lambda plan, *args: plan.build().learn(*args, None))

    def train(self, in_environment, in_agent):
        env = Rewarded(self.env, in_environment)
        agent, key = self.agent, jax.random.key(0)
        state = agent.init(key, B)
        actor = init_actor(agent, env, jax.random.split(key, B))
        act = jax.jit(partial(rollout, agent, env))
        for number in range(400 // (B * self.T)):
            keys = jax.random.split(jax.random.fold_in(key, number), (2, self.T, B))
            actor, trajectory = act(agent.actor_params(state), actor, *keys)
            rewards = in_agent * trajectory.timesteps().reward
            trajectory = trajectory.with_rewards(rewards)
            state, _ = self.learn(self.blueprint, state, trajectory, keys[0, 0, 0])
        return state.shared


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in AGENTS
        if name not in ACTS_ON_REWARDS
    ],
)
def test_an_agent_learns_from_changed_rewards_as_from_an_environment_with_them(name):
    """In every transition, the last of a rollout too: with a rollout of one step there is no other.

    Rewards times 0 teach what an environment without rewards does."""
    learner = Learner(name)
    for factor in (0.0, -3.0):
        changed, expected = learner.train(1.0, factor), learner.train(factor, 1.0)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), changed, expected)
    leaves = zip(jax.tree.leaves(learner.train(1.0, 1.0)), jax.tree.leaves(changed), strict=True)
    assert any((np.asarray(a) != np.asarray(b)).any() for a, b in leaves), "rewards teach something"


def test_rewards_are_one_for_each_timestep():
    learner = Learner("a2c")
    actor = init_actor(learner.agent, learner.env, jax.random.split(jax.random.key(0), B))
    keys = jax.random.split(jax.random.key(1), (2, 8, B))
    state = learner.agent.init(jax.random.key(0), B)
    params = learner.agent.actor_params(state)
    _, trajectory = rollout(learner.agent, learner.env, params, actor, *keys)
    rewards = jnp.arange(9 * B).reshape(9, B)  # whole numbers become those of the trajectory
    changed = trajectory.with_rewards(rewards)
    assert changed.final.reward.dtype == jnp.float32
    np.testing.assert_array_equal(changed.timesteps().reward, rewards)
    np.testing.assert_array_equal(changed.next_timesteps().reward, rewards[1:])
    with pytest.raises(ConfigError, match=r"needs \[9, 16\] as timesteps\(\).reward is, not \[8, "):
        trajectory.with_rewards(rewards[1:])
