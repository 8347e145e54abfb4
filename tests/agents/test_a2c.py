"""A2C, and what other actor-critics share with it: policy gradient, deviation, entropy cost."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest
from on_policy import CONTINUOUS, learner, small, standardized, textbook_gradient
from walk import BOX, B, T, Walk, begin, built, close, fresh, gradient, learn, slow

from podracer.agents.common import actor_critic
from podracer.ops.distributions import policy
from podracer.schedules import Linear
from podracer.types import LearnerState


@pytest.mark.parametrize(
    ("name", "memory"),
    [
        ("a2c", "none"),
        ("impala", "none"),
        ("ppo", "none"),
        slow("ppo", "gru"),
        slow("a2c", "gru"),
        slow("impala", "lstm"),
    ],
)
def test_the_first_gradient_is_the_policy_gradient(name, memory):
    """Where the policy that learns is the one that acted, all three do the same. (V-trace with a
    λ of 1, its default, then has the targets and the advantages of GAE.)"""
    settings = learner(name, memory)
    agent = built(settings)
    state, trajectory = begin(agent)
    valid = trajectory.valid()
    assert not valid.all()
    scale = partial(standardized, valid=valid) if name == "ppo" else lambda x: x
    expected = textbook_gradient(
        settings, state, trajectory, lambda log_prob, _, advantages: -scale(advantages) * log_prob
    )
    new_state, metrics = learn(agent, state, trajectory)
    close(gradient(new_state), expected, atol=1e-5)
    assert optax.tree.norm(expected) > 0.1
    close((metrics.get("approx_kl", 0.0), metrics.get("clip_fraction", 0.0)), (0.0, 0.0))


@pytest.mark.parametrize("name", ["a2c", "impala", "ppo", "stacx"])
def test_the_deviation_of_actions_is_a_parameter(name):
    """It is the same in every state; STACX has one for each of its heads."""
    settings, env = small(name), Walk(BOX)
    params = fresh(built(settings, env)).shared.params
    params["log_std"]["policy"] = jnp.full(BOX.size, 0.7)
    observation = jax.random.normal(jax.random.key(0), (T, B, 2))
    num_heads = getattr(settings, "num_heads", 1)
    net = actor_critic.build_network(settings.network, env.spec, num_heads=num_heads)
    outputs, _ = net.apply(params, (), observation, jnp.zeros((T, B), bool))
    distribution = policy(BOX, outputs["policy"])
    assert distribution.mean.shape == (T, B, BOX.size)
    assert jnp.std(distribution.mean) > 0
    close(distribution.log_scale, jnp.full((T, B, BOX.size), 0.7))


def test_the_deviation_of_actions_depends_on_the_state_by_choice():
    agent, env = built(small("a2c", state_dependent_std=True), CONTINUOUS), CONTINUOUS
    _, trajectory = begin(agent, env)
    log_scale = policy(BOX, trajectory.steps.extras["policy"]).log_scale
    assert (jnp.std(log_scale, axis=(0, 1)) > 0).all()


@pytest.mark.parametrize("name", ["a2c", slow("impala"), "ppo"])
def test_an_entropy_cost_falls_to_zero(name):
    settings = learner(name, entropy_cost=Linear(0.5, 0.0, frames=B * T))
    agent = built(settings)
    state, trajectory = begin(agent)
    for frames, cost in ((0, 0.5), (B * T // 2, 0.25), (B * T, 0.0)):
        shared = dataclasses.replace(state.shared, frames=jnp.uint32(frames))
        _, metrics = learn(agent, LearnerState(shared), trajectory)
        parts = metrics["policy_loss"] + settings.value_cost * metrics["value_loss"]
        close(metrics["loss"], parts - cost * metrics["entropy"])


@pytest.mark.parametrize("memory", ["none", "lstm"])
def test_the_importance_ratio_is_one_on_policy(memory):
    agent = built(learner("impala", memory))
    state, trajectory = begin(agent)
    close(learn(agent, state, trajectory)[1]["importance_ratio"], 1.0)
