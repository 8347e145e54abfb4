"""Planning in the environment itself: what is seen, what is found without any learning, ends."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from walk import WALK, B, T, begin, built, close, gradient, learn, methods_of, slow

import podracer
from podracer import recipes
from podracer.agent import Agent, Blueprint
from podracer.agents.common import epochs
from podracer.agents.planning import gumbel
from podracer.checks import check_agent, check_environment
from podracer.drivers.anakin import AnakinConfig
from podracer.envs import make
from podracer.envs.probes import GAMMA, PROBES
from podracer.evaluate import make_evaluator
from podracer.io.checkpoint import stored_fingerprint
from podracer.networks import MLP, TorsoNetwork
from podracer.run.loading import reopen
from podracer.types import TimeStep
from podracer_games.alphazero import AlphaZero
from podracer_games.model import WithModel
from podracer_testing import probes

SMALL = TorsoNetwork(MLP((8,)))


def fresh(name, **settings):
    env = make(f"model:{name}")
    agent = AlphaZero(network=SMALL, **settings).build(env.spec)
    init = jax.jit(lambda key: agent.actor_params(agent.init(key, 4)))
    return agent, env, init(jax.random.key(0))


def test_keeps_both_contracts():
    env = make("model:catch")
    check_environment(env)
    check_agent(Blueprint(AlphaZero(network=SMALL), env.spec))
    assert env == make("model:catch")
    assert hash(env.spec) == hash(make("model:catch").spec)


def test_without_learning_it_finds_what_one_step_shows():
    """The reward of each action is there to be seen, so an untrained network acts perfectly."""
    agent, env, params = fresh("probe:policy", num_simulations=8)
    result = make_evaluator(agent, env, 64)(params, jax.random.key(1))
    assert (result.returns == 1).all()


def test_a_time_out_is_worth_what_the_network_says():
    """At the root and inside the tree, however often the search visits it."""
    agent, env, params = fresh("probe:timeout", num_simulations=16)
    step, keys = jax.jit(jax.vmap(env.step)), jax.random.split(jax.random.key(0), 2)
    state, timestep = jax.vmap(env.reset)(keys)
    observation = timestep.observation["observation"]
    value = methods_of(agent).predict(params, observation)[1]  # of all states alike
    assert (np.abs(value) > 0.01).all()
    search_value = jax.jit(lambda timestep: agent.act(params, (), timestep, keys, True)[1]["value"])
    for _ in range(4):
        state, timestep = step(keys, state, jnp.zeros(2, jnp.int32))
    one_step = 1 + AlphaZero().discount * value
    np.testing.assert_allclose(search_value(timestep), (value + 16 * one_step) / 17, rtol=1e-5)
    _, timestep = step(keys, state, jnp.zeros(2, jnp.int32))
    assert timestep.last.all()
    np.testing.assert_allclose(search_value(timestep), value, rtol=1e-5)


def test_small_differences_of_values_are_stretched_only_so_far():
    """Two actions that end the episode with rewards 0 and 0.05, the network indifferent. After 4
    simulations each was tried twice: the logits of the policy are 0.1 (50 + 2) of the values,
    stretched to [0, 1] or divided by `min_value_range`."""
    root = gumbel.RootFnOutput(
        prior_logits=jnp.zeros((1, 2)), value=jnp.zeros(1), embedding=jnp.zeros(1)
    )

    def end(params, key, action, embedding):
        zero = jnp.zeros(1)
        output = gumbel.RecurrentFnOutput(
            reward=0.05 * action, discount=zero, prior_logits=jnp.zeros((1, 2)), value=zero
        )
        return output, embedding

    @jax.jit
    def search(min_value_range):
        settings = gumbel.PlanningSettings(
            num_simulations=4, max_considered_actions=2, min_value_range=min_value_range
        )
        return gumbel.gumbel_search((), jax.random.key(0), root, end, (), settings, explore=True)[1]

    for min_value_range, value in ((1e-8, 1.0), (0.05, 1.0), (0.1, 0.5), (1.0, 0.05)):
        expected = jax.nn.softmax(jnp.array([0.0, 5.2 * value]))
        np.testing.assert_allclose(search(min_value_range), expected, rtol=1e-4)


def slow_targets(value, trajectory):
    """λ-returns of the searched values, one environment and one timestep after another."""
    after, cut = trajectory.next_timesteps(), np.asarray(trajectory.steps.timestep.last)
    targets = np.zeros((T, B))
    for b in range(B):
        following = value[T, b]
        for t in reversed(range(T)):
            mixed = (1 - WALKER.td_lambda) * value[t + 1, b] + WALKER.td_lambda * following
            discount = WALKER.discount * float(after.discount[t, b])
            following = float(after.reward[t, b]) + discount * mixed
            following = value[t, b] if cut[t, b] else following
            targets[t, b] = following
    return targets


WALKER = AlphaZero(network=SMALL, num_simulations=4)
MODEL = WithModel(WALK)


def test_an_environment_of_gymnasium_is_no_model():
    with pytest.raises(podracer.ConfigError, match="TimeLimit is one of Gymnasium: pass"):
        WithModel(gymnasium.make("CartPole-v1"))


def test_the_gradient_is_that_of_the_search_and_its_lambda_returns():
    agent = built(dataclasses.replace(WALKER, max_gradient_norm=100.0), MODEL)
    predict = methods_of(agent).predict
    state, trajectory = begin(agent, MODEL)
    params, extras, valid = state.shared.params, trajectory.steps.extras, trajectory.valid()
    final_value = predict(params, trajectory.final.observation["observation"])[1]
    values = np.concatenate([extras["value"], final_value[None]])
    targets = slow_targets(values, trajectory)
    observation = trajectory.steps.timestep.observation["observation"].reshape(T * B, -1)

    def loss(params):
        logits, value = predict(params, observation)
        log_policy = jax.nn.log_softmax(logits).reshape(T, B, -1)
        policy_loss = -jnp.sum(extras["policy"] * log_policy, axis=-1)
        value_loss = 0.5 * (value.reshape(T, B) - targets) ** 2
        return jnp.mean(policy_loss + WALKER.value_cost * value_loss, where=valid)

    expected_loss, expected = jax.jit(jax.value_and_grad(loss))(params)
    new_state, metrics = learn(agent, state, trajectory)
    close(gradient(new_state), expected, atol=1e-5)
    close(metrics["loss"], expected_loss)


def test_epochs_of_minibatches_move_towards_the_same_targets():
    settings = dataclasses.replace(WALKER, num_epochs=3, num_minibatches=2, learning_rate=1e-2)
    agent = built(settings, MODEL)
    methods = methods_of(agent)
    state, trajectory = begin(agent, MODEL)
    batch = methods.make_batch(state.shared.params, trajectory)
    batch, items = epochs.shuffle(jax.random.key(2), batch, settings)  # by the key of `learn`
    learner = state.shared
    update = jax.jit(
        partial(epochs.fit, methods.optimizer, methods.network, methods.loss, axis=None)
    )
    for minibatch in items:
        learner, _ = update(learner, batch, (minibatch[None],))
    new_state, _ = learn(agent, state, trajectory)
    close(new_state.shared.params, learner.params, atol=1e-6)
    assert int(new_state.shared.frames) == trajectory.valid().sum()


@pytest.mark.parametrize(
    ("probe", "updates"),
    [
        ("policy", 100),
        *(slow(name, 200) for name in ("constant", "observation", "discount", "action", "timeout")),
    ],
)
def test_values_and_actions_of_the_probes(probe, updates):
    """It learns the known values and the known actions."""
    settings = AlphaZero(
        network=TorsoNetwork(MLP((16,), "tanh")),
        learning_rate=0.01,
        discount=GAMMA,
        num_simulations=4,
    )
    agent, learner, _ = probes.train(settings, f"model:probe:{probe}", updates)
    known = PROBES[probe]
    observation = with_states(agent, jnp.array([seen for seen, _ in known.values]))
    count = len(known.values)
    ones = jnp.ones(count)
    timestep = TimeStep(observation, 0 * ones, ones, ones > 0, ones < 0)
    keys, params = jax.random.split(jax.random.key(0), count), agent.actor_params(learner)
    action, _, _ = agent.act(params, agent.carry(count), timestep, keys, False)
    values = methods_of(agent).predict(params, observation["observation"])[1]
    np.testing.assert_allclose(values, [value for _, value in known.values], atol=0.1)
    if known.best_actions:
        np.testing.assert_array_equal(action, known.best_actions)


def with_states(agent: Agent, observations: jax.Array) -> Any:
    """The observations with states that show them, from the first two timesteps of episodes."""
    model, keys = methods_of(agent).model, jax.random.split(jax.random.key(0), 16)
    state, first = jax.vmap(model.reset)(keys)
    next_state, second = jax.vmap(model.step)(keys, state, jnp.zeros(16, jnp.int32))
    shown = jnp.concatenate([first.observation, second.observation])
    rows = (shown[None] == observations[:, None]).all(-1).argmax(-1)
    states = jax.tree.map(lambda x, y: jnp.concatenate([x, y])[rows], state, next_state)
    return {"observation": observations, "state": states}


def test_a_run_resumes_to_the_bit(tmp_path):
    experiment = dataclasses.replace(
        recipes.find("catch_alphazero"),
        agent=AlphaZero(network=SMALL, num_simulations=2),
        driver=AnakinConfig(8, 4, updates_per_chunk=1),
        frames=4 * 32,
        evaluations=0,
        devices=1,
    )
    podracer.train(experiment, run_dir=tmp_path / "whole")
    podracer.train(experiment, run_dir=tmp_path / "parts", frames=2 * 32)
    resumed = reopen(tmp_path / "parts")
    assert resumed.agent == experiment.agent  # its class is found by its name
    podracer.train(resumed, run_dir=tmp_path / "parts", resume=True, frames=4 * 32)
    assert stored_fingerprint(tmp_path / "whole") == stored_fingerprint(tmp_path / "parts")
