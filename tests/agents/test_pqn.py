"""PQN: its targets and its loss by a slow reference, exploration, masks."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from walk import (
    WALK,
    B,
    T,
    begin,
    built,
    close,
    enter,
    fresh,
    gradient,
    learn,
    methods_of,
    network,
    slow,
)

from podracer.agent import Agent
from podracer.agents.common import epochs
from podracer.agents.pqn import PQN
from podracer.schedules import Linear
from podracer.types import ACTION_MASK, ArraySpec, EnvironmentSpec, TimeStep


def settings_with(memory: str = "none", **fields: Any) -> PQN:
    settings = {"num_epochs": 1, "num_minibatches": 1, "max_gradient_norm": 1e9, **fields}
    return PQN(network=network(memory), **settings)


def action_values(agent: Agent, params: Any, trajectory: Any) -> jax.Array:
    """Of all timesteps `[T+1, B, A]`, from the network alone."""
    steps = trajectory.timesteps()
    network = methods_of(agent).network
    heads, _ = network.apply(params, trajectory.carry, steps.observation, steps.first)
    return heads["advantage"]


def slow_targets(settings: PQN, q: np.ndarray, trajectory: Any) -> np.ndarray:
    """Equations of the paper, one environment and one timestep after another, from the end."""
    after, cut = trajectory.next_timesteps(), np.asarray(trajectory.steps.timestep.last)
    targets = np.zeros((T, B))
    for b in range(B):
        following = q[T, b].max()  # what the rest of the episode is worth
        for t in reversed(range(T)):
            best = q[t + 1, b].max()
            discount = settings.discount * float(after.discount[t, b])
            mixed = (1 - settings.trace_lambda) * best + settings.trace_lambda * following
            following = float(after.reward[t, b]) + discount * mixed
            if cut[t, b]:
                following = q[t, b].max()
            targets[t, b] = following
    return targets


@pytest.mark.parametrize("memory", ["none", slow("gru")])
def test_the_gradient_is_that_of_the_error_to_lambda_returns(memory):
    settings = settings_with(memory)
    agent = built(settings)
    state, trajectory = begin(agent)
    params, valid = state.shared.params, trajectory.valid()
    q = np.asarray(action_values(agent, params, trajectory))
    targets = slow_targets(settings, q, trajectory)
    chosen = jax.nn.one_hot(trajectory.steps.action, 3)

    def loss(params: Any) -> jax.Array:
        q = jnp.sum(action_values(agent, params, trajectory)[:-1] * chosen, axis=-1)
        return 0.5 * jnp.mean((q - targets) ** 2, where=valid)

    expected_loss, expected = jax.jit(jax.value_and_grad(loss))(params)
    new_state, metrics = learn(agent, state, trajectory)
    close(gradient(new_state), expected, atol=1e-5)
    close(metrics["loss"], expected_loss)
    assert optax.tree.norm(expected) > 0.1


@pytest.mark.slow
def test_the_targets_stay_those_of_the_network_that_acted():
    """Later epochs move towards the same targets."""
    agent = built(settings_with(num_epochs=3, learning_rate=1e-2))
    methods = methods_of(agent)
    state, trajectory = begin(agent)
    batch = methods.make_batch(state.shared.params, trajectory)
    batch, items = epochs.shuffle(jax.random.key(0), batch, settings_with())
    learner = state.shared
    for _ in range(3):
        parts = (methods.optimizer, methods.network, methods.loss, learner, batch)
        learner, _ = epochs.fit(*parts, (items,), None)
    close(learn(agent, state, trajectory)[0].shared.params, learner.params, atol=1e-6)


@pytest.mark.slow
def test_it_explores_with_the_epsilon_of_its_frames():
    _, trajectory = begin(built(settings_with()))
    num_frames = int(trajectory.valid().sum())
    agent = built(settings_with(epsilon=Linear(1.0, 0.0, frames=2 * num_frames)))
    state, shares = fresh(agent), []
    for _ in range(3):
        params = agent.actor_params(state)
        shares.append(float(params.epsilon))
        state, _ = learn(agent, state, trajectory)
    assert shares == [1.0, 0.5, 0.0]
    timestep = jax.tree.map(lambda x: jnp.repeat(x[:1], 900, axis=0), enter(agent).timestep)
    keys = jax.random.split(jax.random.key(0), 900)
    params = agent.actor_params(fresh(agent))
    random, _, _ = agent.act(params, (), timestep, keys, True)
    np.testing.assert_allclose(np.bincount(random) / 900, 1 / 3, atol=0.05)
    greedy, extras, _ = agent.act(params, (), timestep, keys, False)
    assert len(set(greedy.tolist())) == 1
    assert extras["value"].shape == (900,)


def test_forbidden_actions_are_neither_chosen_nor_bootstrapped_from():
    observation = {"x": ArraySpec((2,)), ACTION_MASK: ArraySpec((3,), np.bool_)}
    spec = EnvironmentSpec("masked", observation, WALK.spec.action)
    agent = settings_with().build(spec)
    mask = jnp.tile(jnp.array([True, False, True]), (B, 1))
    seen = {"x": jnp.ones((B, 2)), ACTION_MASK: mask}
    ones = jnp.ones(B)
    timestep = TimeStep(seen, 0 * ones, ones, ones > 0, ones < 0)
    params = agent.actor_params(fresh(agent))
    for seed in range(5):
        keys = jax.random.split(jax.random.key(seed), B)
        action, extras, _ = agent.act(params, (), timestep, keys, True)
        assert 1 not in action.tolist()
    timesteps = jax.tree.map(lambda x: x[None], timestep)
    q, _ = methods_of(agent).action_values(params.params, (), timesteps)
    close(extras["value"], q[0][:, [0, 2]].max(-1))
