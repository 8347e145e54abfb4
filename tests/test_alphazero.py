"""Planning in the environment itself: what is seen, what is found without any learning, ends."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer.agents.a2c import A2C
from podracer.agents.alphazero import AlphaZero
from podracer.checks import check_agent, check_environment
from podracer.envs import make
from podracer.envs.model import WithModel
from podracer.evaluate import make_evaluator
from podracer.networks import MLP, TorsoNetwork
from podracer.types import ConfigError

SMALL = TorsoNetwork(MLP((8,)))


def fresh(name, **settings):
    env = make(f"model:{name}")
    agent = AlphaZero(network=SMALL, spec=env.spec, **settings)
    init = jax.jit(lambda key: agent.actor_params(agent.init(key, 4)))
    return agent, env, init(jax.random.key(0))


def test_keeps_both_contracts():
    agent, env, _ = fresh("catch")
    check_environment(env)
    check_agent(agent)
    assert env == make("model:catch")
    assert hash(env.spec) == hash(make("model:catch").spec)


def test_without_learning_it_finds_what_one_step_shows():
    """The reward of each action is there to be seen, so an untrained network acts perfectly."""
    agent, env, params = fresh("probe:policy", num_simulations=8)
    result = make_evaluator(agent, env, 64)(params, jax.random.key(1))
    assert (result.returns == 1).all()


@pytest.mark.slow
def test_it_sees_further_with_more_simulations():
    """On Catch the reward is eight steps away."""
    few, many = (
        make_evaluator(agent, env, 64)(params, jax.random.key(1)).returns.mean()
        for agent, env, params in (fresh("catch", num_simulations=n) for n in (2, 200))
    )
    assert many > few + 0.3


def test_a_plan_ends_with_the_episode():
    """After a terminal nothing counts; after a time-out neither, but its state has its value."""
    agent, env, params = fresh("probe:timeout")
    step = jax.vmap(env.step)
    keys = jax.random.split(jax.random.key(0), 3)
    state, timestep = jax.vmap(env.reset)(keys)
    action, key = jnp.zeros(3, jnp.int32), jax.random.key(1)
    for _ in range(5):
        state, timestep = step(keys, state, action)
    assert timestep.last.all()
    output, (_, cut) = agent._recurrent_fn(params, key, action, (state, timestep.last))
    assert (output.reward == 0).all()
    assert (output.discount == 0).all()
    assert not cut.any()
    agent, env, params = fresh("probe:constant")
    state, timestep = jax.vmap(env.reset)(keys)
    output, _ = agent._recurrent_fn(params, key, action, (state, timestep.last))
    assert (output.reward == 1).all()
    assert (output.discount == 0).all()


def test_refuses_what_nothing_can_plan_in():
    agent = AlphaZero(network=SMALL, spec=make("catch").spec)
    with pytest.raises(ConfigError, match="take --environment model:catch"):
        check_agent(agent)
    with pytest.raises(ConfigError, match="needs discrete actions; pendulum has continuous"):
        check_agent(AlphaZero(network=SMALL, spec=make("model:pendulum").spec))
    with pytest.raises(ConfigError, match="object is not a device environment"):
        WithModel(object())


def test_other_agents_may_see_the_state():
    env = make("model:catch")
    check_agent(dataclasses.replace(A2C(network=SMALL), spec=env.spec))
    assert np.prod(env.spec.observation["observation"].shape) == 50
