"""Discrete SAC: both of its losses beside a loop over samples and actions."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from walk import B, begin, built, close, doubled, learn, methods_of

import podracer
from podracer import recipes
from podracer.agents.common.off_policy import Transition
from podracer.agents.sac import Actor
from podracer.envs import make
from podracer.errors import ConfigError
from podracer.networks import MLP, TorsoNetwork
from podracer.ops.action_values import Atoms
from podracer.replay import Replay
from podracer.types import ArraySpec, Discrete, EnvironmentSpec, TimeStep
from podracer_agents.discrete_sac import DiscreteSAC
from podracer_testing.contract import check_contract
from podracer_testing.parity import check_parity

N, A = 7, 3
SETTINGS = DiscreteSAC(
    network=TorsoNetwork(MLP((8,), "tanh")),
    random_frames=0,
    target_entropy=0.5,
    replay=Replay(B * 40, batch_size=16, warmup=0),
)


def a_timestep(random: np.random.Generator) -> TimeStep:
    ones = jnp.ones(N)
    observation = jnp.asarray(random.normal(size=(N, 2)), jnp.float32)
    return TimeStep(observation, ones, ones, ones < 0, ones < 0)


def test_the_losses_are_expectations_over_all_actions():
    agent = methods_of(built(SETTINGS))
    random = np.random.default_rng(0)
    shared = jax.tree.map(
        lambda x: x + jnp.asarray(random.normal(size=x.shape), x.dtype),
        agent.init(jax.random.key(0), B).shared.params,
    )
    target = jax.tree.map(lambda x: x * 1.1, shared.critics)
    state = agent.init(jax.random.key(0), B).shared
    state = dataclasses.replace(state, params=shared, target_params=target)
    transition = Transition(
        timestep=a_timestep(random),
        action=jnp.asarray(random.integers(0, A, N), jnp.int32),
        n_step_return=jnp.asarray(random.normal(size=N), jnp.float32),
        bootstrap_discount=jnp.asarray(random.uniform(size=N), jnp.float32),
        next_timestep=a_timestep(random),
        mask=jnp.asarray(np.arange(N) % 3 > 0, jnp.float32),
        weight=jnp.asarray(random.uniform(size=N), jnp.float32),
    )
    with jax.enable_x64(True):
        state, transition = jax.tree.map(doubled, (state, transition))
        actor, critics = state.params
        alpha = math.exp(actor.log_temperature)
        obs, next_obs = transition.timestep.observation, transition.next_timestep.observation

        def policy(observation, n):
            logits = np.asarray(agent.networks.policy(actor.policy, observation)[n])
            return np.exp(logits) / np.exp(logits).sum()

        def values(params, observation, n):
            return np.asarray(agent.networks.action_values(params, observation)[:, n])

        critic_loss, policy_loss, temperature_loss = 0.0, 0.0, 0.0
        for n in np.flatnonzero(transition.mask):
            pi, q = policy(next_obs, n), values(state.target_params, next_obs, n).min(0)
            value = sum(pi[a] * (q[a] - alpha * math.log(pi[a])) for a in range(A))
            goal = transition.n_step_return[n] + transition.bootstrap_discount[n] * value
            for critic in range(2):
                q = values(critics, obs, n)[critic, transition.action[n]]
                critic_loss += transition.weight[n] * 0.5 * (goal - q) ** 2
            pi, q = policy(obs, n), values(critics, obs, n).min(0)
            entropy = -sum(p * math.log(p) for p in pi)
            policy_loss += sum(pi[a] * (alpha * math.log(pi[a]) - q[a]) for a in range(A))
            temperature_loss += actor.log_temperature * (entropy - 0.5 * math.log(A))
        key = jax.random.key(0)
        got = agent.critic_loss(critics, state, transition, key)[0]
        count = float(transition.mask.sum())
        close(got.value, critic_loss / count, atol=1e-12)

        def loss(actor: Actor) -> jax.Array:
            return agent.actor_loss(actor, state, transition, key)[0].value

        close(loss(actor), (policy_loss + temperature_loss) / count, atol=1e-12)
        slope = temperature_loss / actor.log_temperature / count
        close(jax.grad(loss)(actor).log_temperature, slope, atol=1e-12)


def test_the_temperature_rests_where_allowed_actions_are_as_likely_as_the_target_says():
    masks = np.array([[1, 1, 0], [1, 0, 0], [1, 1, 1], [0, 0, 0]], bool)
    observation = {"observation": jnp.ones((4, 2)), "action_mask": jnp.asarray(masks)}
    spec = EnvironmentSpec(
        "masked",
        {"observation": ArraySpec((2,)), "action_mask": ArraySpec((A,), bool)},
        Discrete(A),
    )
    settings = dataclasses.replace(SETTINGS, target_entropy=1.0)
    agent = methods_of(settings.build(spec))
    state = agent.init(jax.random.key(0), 4).shared
    policy = jax.tree.map(jnp.zeros_like, state.params.actor.policy)  # uniform
    ones = jnp.ones(4)
    timestep = TimeStep(observation, ones, ones, ones < 0, ones < 0)
    transition = Transition(timestep, jnp.zeros(4, jnp.int32), ones, ones, timestep, ones, ones)

    def loss(log_temperature: jax.Array) -> jax.Array:
        actor = Actor(policy, log_temperature)
        return agent.actor_loss(actor, state, transition, jax.random.key(1))[0].value

    close(jax.grad(loss)(jnp.float32(0.0)), 0.0, atol=1e-6)


def test_it_keeps_the_contract():
    check_contract(SETTINGS)
    state, _ = learn(built(SETTINGS), *begin(built(SETTINGS)))
    assert int(state.shared.frames) > 0


def test_what_it_cannot_learn_is_refused():
    with pytest.raises(ConfigError, match="discrete actions"):
        SETTINGS.build(make("pendulum").spec)
    with pytest.raises(ConfigError, match="no distribution of returns"):
        DiscreteSAC(return_distribution=Atoms()).build(make("catch").spec)


@pytest.mark.slow
def test_lock_step_sebulba_equals_anakin():
    check_parity(dataclasses.replace(SETTINGS, replay=Replay(640, 16, warmup=64)), "catch")


@pytest.mark.slow
def test_it_learns_catch(tmp_path):
    result = podracer.train(recipes.find("catch_discrete_sac"), run_dir=tmp_path)
    assert result.metrics["evaluation_return"] > 0.9
