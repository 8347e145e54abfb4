"""Updates of agents for continuous actions: critics, weight decay, order, random frames."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from off_policy import BOXED, OFF_POLICY, agent_and_env, drawn
from walk import BOX, B, begin, built, close, enter, fresh, learn, methods_of

from podracer.agents.common.optimizers import Optimizer
from podracer.devices.reductions import global_grad
from podracer.errors import ConfigError
from podracer.fields import check_ranges
from podracer.networks import MLP, ResNet, TorsoNetwork
from podracer.types import ArraySpec, EnvironmentSpec, LearnerState

WITHOUT_NOISE = {"target_noise_std": 0.0, "policy_delay": 1, "optimizer": Optimizer(epsilon=0.01)}


@pytest.mark.parametrize("name", [pytest.param("td3-c51", marks=pytest.mark.slow), "sac-c51"])
def test_categorical_critics_learn_the_smaller_target_distribution(name):
    """One sample and one atom after another, by algorithm 1 of Bellemare et al. 2017."""
    agent, env = agent_and_env(name, **(WITHOUT_NOISE if name == "td3-c51" else {}))
    shared, transition = drawn(agent, env)
    mask = np.random.default_rng(1).integers(2, size=32).astype(np.float32)
    transition = dataclasses.replace(transition, mask=jnp.asarray(mask))
    agent, key = methods_of(agent), jax.random.key(5)
    networks = agent.networks
    next_obs, penalty = transition.next_timestep.observation, np.zeros(32)
    if name == "sac-c51":
        actor, targets = shared.params.actor, shared.target_params
        policy = agent.policy(actor, next_obs)
        next_action, log_prob = policy.sample(jax.random.split(key, (32,)))
        penalty = np.exp(actor.log_temperature) * np.asarray(log_prob)
    else:
        targets = shared.target_params.critics
        next_action = agent.policy(shared.target_params.actor, next_obs)
    probabilities = np.asarray(
        jax.nn.softmax(networks.q_outputs(targets, next_obs, next_action)), np.float64
    )
    observation, action = transition.timestep.observation, transition.action
    outputs = networks.q_outputs(shared.params.critics, observation, action)
    log_probabilities = np.asarray(jax.nn.log_softmax(outputs), np.float64)

    support, losses, chosen = np.linspace(-3.0, 2.0, 11), np.zeros((2, 32)), set()
    for n in range(32):
        smaller = int(np.argmin(probabilities[:, n] @ support))
        chosen.add(smaller)
        target = np.zeros(11)
        for atom, probability in zip(support, probabilities[smaller, n], strict=True):
            discount = float(transition.bootstrap_discount[n])
            value = float(transition.n_step_return[n]) + discount * (atom - penalty[n])
            position = (np.clip(value, -3.0, 2.0) + 3.0) / 0.5
            below = min(int(position), 9)
            target[below] += probability * (below + 1 - position)
            target[below + 1] += probability * (position - below)
        losses[:, n] = -log_probabilities[:, n] @ target
    assert chosen == {0, 1}

    loss, (metrics, priorities, *_) = jax.jit(agent.critic_loss)(
        shared.params.critics, shared, transition, key
    )
    weight = np.asarray(transition.weight)
    np.testing.assert_allclose(loss.value, np.sum(mask * weight * losses.sum(0)) / mask.sum(), 1e-4)
    np.testing.assert_allclose(priorities, mask * losses.mean(0), rtol=1e-4)
    q = (np.exp(log_probabilities) @ support)[:, mask > 0]
    np.testing.assert_allclose(metrics["q"].value, np.mean(q), 1e-4)


@pytest.mark.slow
def test_matrices_decay_and_nothing_else_does():
    """Without a gradient Adam moves nothing, so what is left is the decay, before the rate."""
    settings = dataclasses.replace(OFF_POLICY["sac"], weight_decay=0.5)
    agent = built(settings, BOXED)
    shared = jax.eval_shape(lambda: fresh(agent)).shared
    params = jax.tree.map(lambda x: jnp.full(x.shape, 3.0), shared.params)
    optimizer = methods_of(agent).learner.optimizer.optimizer
    for part in params:
        updates, _ = optimizer.update(
            jax.tree.map(jnp.zeros_like, part), optimizer.init(part), part
        )
        for update in jax.tree.leaves(updates):
            np.testing.assert_array_equal(update, 1.5 if update.ndim > 1 else 0.0)
    assert params.actor.log_temperature.shape == ()

    stacked = TorsoNetwork(ResNet(channels=(4,), blocks=3, hidden=8, layer_norm=True))
    heads = TorsoNetwork(MLP((8,)), memory="transformer", memory_size=8, memory_heads=2)
    spec = EnvironmentSpec("images", ArraySpec((4, 4, 1), jnp.uint8), BOX)
    for network, matrices in ((stacked, {"weight"}), (heads, {"weight", "weights"})):
        agent = methods_of(dataclasses.replace(settings, network=network).build(spec))
        shapes = jax.eval_shape(partial(agent.networks.init, num_critics=1), jax.random.key(0))
        critic = jax.tree.map(lambda x: jnp.ones(x.shape), shapes[1][0])
        zeros = jax.tree.map(jnp.zeros_like, critic)
        updates, _ = optimizer.update(zeros, optimizer.init(critic), critic)
        decayed = {path[-1].name for path, x in jax.tree.leaves_with_path(updates) if x.any()}
        assert decayed == matrices
    with pytest.raises(ConfigError, match="weight_decay must be at least 0"):
        check_ranges(dataclasses.replace(settings, weight_decay=-0.1), "agent")


@pytest.mark.parametrize("name", [pytest.param("ddpg", marks=pytest.mark.slow), "sac"])
def test_the_policy_follows_the_updated_critics(name):
    """Its gradient is that of its loss under the critics that this update leaves, and they move
    first: a policy updated by the old critics would be another."""
    agent, env = agent_and_env(name, random_frames=0)
    shared, transition = drawn(agent, env)
    key = jax.random.key(5)
    agent = methods_of(agent)
    new, _, _ = jax.jit(agent.update, static_argnums=3)(shared, transition, key, None)
    actor_key = (jax.random.split(key)[1],) if name == "sac" else ()

    @jax.jit
    def gradient(critics):
        params = shared.params._replace(critics=critics)
        at = dataclasses.replace(shared, params=params)
        arguments = (params.actor, at, transition, *actor_key)
        return global_grad(agent.actor_loss, *arguments, axis=None)[0]

    moment = jax.tree.map(lambda x: 10 * x, new.optimizer_states.actor.mu)
    close(moment, gradient(new.params.critics), atol=1e-6)
    with pytest.raises(AssertionError):
        close(moment, gradient(shared.params.critics), atol=1e-6)


@pytest.mark.parametrize(
    ("name", "begins_randomly"),
    [
        ("ddpg", True),
        ("sac", False),
        pytest.param("ddpg", False, marks=pytest.mark.slow),
        pytest.param("sac", True, marks=pytest.mark.slow),
    ],
)
def test_only_the_first_frames_are_random(name, begins_randomly):
    """And none where `random_frames` is 0."""
    agent, env = agent_and_env(name, random_frames=int(begins_randomly))
    state, trajectory = begin(agent, env)
    timestep, keys = enter(agent, env).timestep, jax.random.split(jax.random.key(0), B)
    policy = dataclasses.replace(state.shared, frames=jnp.uint32(10**6))

    def act(shared):
        params = agent.actor_params(LearnerState(shared))
        return np.asarray(agent.act(params, (), timestep, keys, True)[0])

    assert (act(state.shared) == act(policy)).all() != begins_randomly
    shared = learn(agent, state, trajectory)[0].shared
    assert int(shared.frames) == trajectory.valid().sum()
    learned = dataclasses.replace(shared, frames=jnp.uint32(10**6))
    np.testing.assert_array_equal(act(shared), act(learned))


@pytest.mark.parametrize(
    ("target", "sign"), [(-50.0, -1), pytest.param(50.0, 1, marks=pytest.mark.slow)]
)
def test_sac_pays_for_entropy_until_there_is_as_much_as_wanted(target, sign):
    """The temperature falls while the entropy is above the target, and rises below it."""
    agent, env = agent_and_env("sac", target_entropy=target)
    state, trajectory = begin(agent, env)
    new, _ = learn(agent, state, trajectory)
    before, after = (x.shared.params.actor.log_temperature for x in (state, new))
    change = after - before
    assert np.sign(change) == sign


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
