"""QT-Opt: the cross-entropy method beside a loop, and the targets that it gives."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from walk import BOX, B, Walk, close, methods_of

from podracer.agents.common.off_policy import Transition
from podracer.agents.qt_opt import QTOpt
from podracer.environment import auto_reset
from podracer.errors import ConfigError
from podracer.networks import MLP, TorsoNetwork
from podracer.replay import Replay
from podracer.types import TimeStep

N = 4
NETWORK = TorsoNetwork(MLP((8,), "tanh"))
SETTINGS = QTOpt(
    network=NETWORK,
    num_samples=20,
    elite_fraction=0.25,
    num_iterations=3,
    replay=Replay(B * 40),
)
SPEC = auto_reset(Walk(BOX)).spec
AGENT = methods_of(SETTINGS.build(SPEC))
q_values = jax.jit(AGENT.networks.q_values)


def best_by_hand(critic, observation, key):
    """Iteration by iteration, for one observation."""
    mean, std, best = 0.0, 1.0, None
    for i in range(3):
        noise = np.asarray(jax.random.normal(jax.random.fold_in(key, 2 + i), (20, 2)))
        samples = np.clip(mean + std * noise, -1, 1)
        q = q_values((critic,), jnp.tile(observation, (20, 1)), samples)[0]
        elites = samples[np.argsort(-np.asarray(q), kind="stable")[:5]]
        mean, std, best = elites.mean(axis=0), elites.std(axis=0), elites[0]
    return best


def critics_and_observations():
    critics = AGENT.networks.init_critics(jax.random.key(1), 2)
    # Larger weights than the first ones: values with maxima inside the bounds, too.
    critics = jax.tree.map(lambda x: 4 * x, critics)
    return critics, jax.random.normal(jax.random.key(2), (N, 2))


def test_actions_are_those_of_the_cross_entropy_method_by_hand():
    critics, observations = critics_and_observations()
    keys = jax.random.split(jax.random.key(3), N)
    best_action = jax.jit(jax.vmap(AGENT.best_action, (None, 0, 0)))
    found = best_action(critics[0], observations, keys)
    by_hand = [best_by_hand(critics[0], *row) for row in zip(observations, keys, strict=True)]
    close(found, np.stack(by_hand))


def test_targets_take_the_smallest_value_at_the_best_action_of_the_first_critic():
    critics, observations = critics_and_observations()
    target_critics = jax.tree.map(lambda x: -0.9 * x, critics)
    state = AGENT.init(jax.random.key(0), B).shared
    state = dataclasses.replace(state, target_params=target_critics)
    ones, key = jnp.ones(N), jax.random.key(4)
    timestep = TimeStep(observations, ones, ones, ones > 1, ones > 1)
    next_timestep = dataclasses.replace(timestep, observation=-observations)
    action = jnp.linspace(-1, 1, 2 * N).reshape(N, 2)
    transition = Transition(timestep, action, 2 * ones, 0.5 * ones, next_timestep, ones, ones)
    loss, _ = jax.jit(AGENT.critic_loss)(critics, state, transition, key)
    keys = jax.random.split(key, N)
    best = jnp.stack(
        [best_by_hand(target_critics[0], *row) for row in zip(-observations, keys, strict=True)]
    )
    target = 2 + 0.5 * q_values(target_critics, -observations, best).min(0)
    errors = q_values(critics, observations, action) - target[None]
    np.testing.assert_allclose(loss.value, 0.5 * np.square(errors).sum(0).mean(), rtol=1e-4)


def test_a_recurrent_network_is_refused():
    network = dataclasses.replace(NETWORK, memory="gru")
    with pytest.raises(ConfigError, match="needs a feed-forward network"):
        dataclasses.replace(SETTINGS, network=network).build(SPEC)
