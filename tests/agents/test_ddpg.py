"""TD3, FastTD3 and TD3+BC: delayed policy and targets, settings and losses of the papers."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agents import blueprint
from off_policy import (
    BOXED,
    agent_and_env,
    drawn,
)
from walk import (
    begin,
    close,
    doubled,
    learn,
    methods_of,
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


@pytest.mark.parametrize("alpha", [2.5, 0.0])
def test_the_policy_of_td3_bc_stays_near_the_actions_of_the_batch(alpha):
    """Sample by sample in float64: -λ Q(s, μ(s)) + (μ(s) - a)², where λ is alpha over the mean |Q|
    and has no gradient. Masked samples count nowhere."""
    agent, env = agent_and_env("td3", cloning_alpha=alpha)
    shared, transition = drawn(agent, env)
    methods, mask = methods_of(agent), np.arange(32) % 3 > 0
    transition = dataclasses.replace(transition, mask=jnp.asarray(mask, jnp.float32))
    with jax.enable_x64(True):
        shared, transition = jax.tree.map(doubled, (shared, transition))
        obs, critic = transition.timestep.observation, shared.params.critics[:1]

        def values(actor, row):
            action = methods.policy(actor, obs[row][None])
            return action[0], methods.networks.q_values(critic, obs[row][None], action)[0, 0]

        rows = np.flatnonzero(mask)
        size = np.mean([abs(float(values(shared.params.actor, row)[1])) for row in rows])

        def expected(actor):
            total = 0.0
            for row in rows:
                action, q = values(actor, row)
                total += jnp.mean((action - transition.action[row]) ** 2) - alpha / size * q
            return total / len(rows)

        def loss(actor):
            return methods.actor_loss(actor, shared, transition)[0].value

        actor = shared.params.actor
        close(*(jax.value_and_grad(x)(actor) for x in (loss, expected)), atol=1e-12, rtol=1e-7)


def test_td3_bc_has_the_settings_of_its_paper():
    agent = recipes.find("pendulum_td3_bc").agent
    assert (agent.cloning_alpha, agent.num_critics, agent.policy_delay) == (2.5, 2, 2)
    assert (agent.target_noise_std, agent.target_noise_clip) == (0.2, 0.5)
    assert agent.normalize_observations


def test_td3_takes_the_weights_of_td3_bc():
    """Their learners have the same leaves, with the clone's policy among them."""
    agents = [agent_and_env("td3", cloning_alpha=alpha)[0] for alpha in (None, 0.0)]
    states = [jax.eval_shape(partial(x.init, num_envs=4), jax.random.key(0)) for x in agents]
    assert states[0].shared == states[1].shared
