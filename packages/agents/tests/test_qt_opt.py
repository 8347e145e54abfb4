"""QT-Opt: the cross-entropy method beside a loop, and the targets that it gives."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agents import COMMON, RANDOM
from differences import assert_gradient_equals_differences
from sequences import changed, drawn
from walk import BOX, B, Walk, built, close, doubled, methods_of, network, slow

from podracer.agents.common.off_policy import Transition
from podracer.environment import auto_reset
from podracer.networks import MLP, TorsoNetwork
from podracer.ops.action_values import Atoms, Quantiles
from podracer.replay import Replay
from podracer.types import TimeStep
from podracer_agents.qt_opt import QTOpt
from podracer_testing.contract import check_contract
from podracer_testing.parity import check_parity
from podracer_testing.probes import check_probe
from podracer_testing.reset_steps import check_reset_steps_of_replay

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


# --- what every agent must do ---------------------------------------------------------------------

ENV = auto_reset(Walk(BOX))
PRIORITIZED = Replay(B * 40, batch_size=64, warmup=0, prioritized=True)
SMALL = QTOpt(network=NETWORK, replay=PRIORITIZED, random_frames=0, n_step=2)


def test_it_keeps_the_contract():
    check_contract(SMALL, ENV)


@pytest.mark.parametrize("learners", [1, slow(2)])
def test_lock_step_equals_anakin_to_the_bit(learners):
    replay = Replay(16 * 40, batch_size=16, updates_per_rollout=2, warmup=16 * 16)
    check_parity(
        QTOpt(
            network=TorsoNetwork(MLP((16,))),
            replay=replay,
            random_frames=400,
            num_samples=16,
        ),
        "pendulum",
        learners,
    )


@pytest.mark.parametrize("length", [1, slow(5)])
def test_steps_that_only_reset_teach_nothing(length):
    check_reset_steps_of_replay(SMALL, length, env=ENV)


def test_it_learns_the_probe_of_continuous_actions():
    def values(agent, learner, timestep, carry, extras):
        keys = jax.random.split(jax.random.key(0), len(timestep.first))
        action, _, _ = agent.act(agent.actor_params(learner), (), timestep, keys, False)
        networks = methods_of(agent).networks
        return networks.q_values(learner.shared.params.critics, timestep.observation, action).min(0)

    check_probe(QTOpt(**COMMON, **RANDOM), "continuous", 300, values=values)


@pytest.mark.parametrize(
    "distribution", [None, slow(Atoms(-4.0, 4.0, 11)), slow(Quantiles(7))], ids=repr
)
def test_the_loss_of_critics_whose_actions_the_cross_entropy_method_finds(distribution, key):
    replay = Replay(B * 40, warmup=0, prioritized=True)
    settings = {"return_distribution": distribution, "num_samples": 12, "n_step": 3}
    agent = built(QTOpt(network=network(), replay=replay, **settings), ENV)
    learner_of_critics = methods_of(agent).learner
    drawing = drawn(agent, ENV, learner_of_critics.buffer)
    with jax.enable_x64(True):
        learner, sample = jax.tree.map(doubled, drawing)
        transition = learner_of_critics.transition(sample, None)
        critics = changed(learner.params.critics)
        learner = dataclasses.replace(learner, target_params=changed(critics, 0.2))

        def loss(critics: Any) -> jax.Array:
            return methods_of(agent).critic_loss(critics, learner, transition, key)[0].total

        assert_gradient_equals_differences(loss, critics)
