"""IQL: its losses and one update, slowly and in float64, and a run on a data set."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest
from demonstrations import Recorded
from on_policy import CONTINUOUS
from walk import BOX, WALK, B, begin, built, close, gradient, learn, methods_of

import podracer
from podracer.agents.common.off_policy import n_step_transition
from podracer.checks import check_agent
from podracer.errors import ConfigError
from podracer.networks import MLP, TorsoNetwork, outputs
from podracer.ops.distributions import from_bounds, policy
from podracer.replay import Replay
from podracer_offline import IQL
from podracer_offline.likelihood import clipped_log_prob

RECORDED = Recorded(CONTINUOUS)
NETWORK = TorsoNetwork(MLP((8,), "tanh"), shared=False)
SETTINGS = IQL(network=NETWORK, discount=0.9, expectile=0.8, max_weight=2.0)


@partial(jax.jit, static_argnums=0)
def forward(parts, params, targets, trajectory):
    """Values, next values, values of the critics and of their targets, log-probabilities."""
    observation = trajectory.timesteps().observation
    heads = jax.vmap(lambda x: outputs(parts.model.network, params.actor, x))(observation)
    action = jax.vmap(partial(from_bounds, BOX))(trajectory.steps.action)
    q, target_q = (
        jax.vmap(partial(parts.critics.q_values, x), out_axes=1)(observation[:-1], action)
        for x in (params.critics, targets)
    )
    log_prob = clipped_log_prob(policy(BOX, heads["policy"][:-1]), action)
    values = heads["value"][..., 0]
    return values[:-1], values[1:], q, target_q, log_prob


def test_the_losses_are_those_of_the_paper():
    """Transition by transition, equations 5 to 7, with values of the networks in float64."""
    agent = built(SETTINGS, RECORDED)
    state, trajectory = begin(agent, CONTINUOUS)
    parts = methods_of(agent)
    # Large rewards, so that weights reach their bound, and targets that differ from the critics.
    trajectory = trajectory.with_rewards(3.0 * trajectory.timesteps().reward)
    params = jax.tree.map(lambda x: x + 0.3, state.shared.params)
    targets = state.shared.target_params
    total, metrics = parts.loss(params, targets, parts.transition(trajectory))

    values, next_values, q, target_q, log_probs = jax.device_get(
        forward(parts, params, targets, trajectory)
    )
    timesteps = trajectory.timesteps()
    value_losses, critic_losses, policy_losses, weights = [], [], [], []
    for t, b in np.argwhere(trajectory.valid()):
        advantage = np.float64(target_q[:, t, b]).min() - values[t, b]
        value_losses.append((0.8 if advantage >= 0 else 0.2) * advantage**2)
        reward, discount = (float(x[t + 1, b]) for x in (timesteps.reward, timesteps.discount))
        target = reward + 0.9 * discount * next_values[t, b]
        critic_losses.append(0.5 * ((target - np.float64(q[:, t, b])) ** 2).sum())
        weights.append(min(np.exp(3.0 * advantage), 2.0))
        policy_losses.append(-weights[-1] * log_probs[t, b])
    assert min(weights) < 2.0 == max(weights)
    expected = {
        "value_loss": np.mean(value_losses),
        "critic_loss": np.mean(critic_losses),
        "policy_loss": np.mean(policy_losses),
    }
    for name, loss in expected.items():
        np.testing.assert_allclose(float(metrics[name]), loss, rtol=2e-5)
    np.testing.assert_allclose(float(total), sum(expected.values()), rtol=2e-5)


def test_each_loss_teaches_its_own_part():
    """The policy's loss moves no value, the value's no critic, and the targets follow slowly."""
    agent = built(SETTINGS, RECORDED)
    state, trajectory = begin(agent, CONTINUOUS)
    parts = methods_of(agent)
    transition = parts.transition(trajectory)

    @jax.jit
    def gradients(params):
        def only(name):
            targets = state.shared.target_params
            return jax.grad(lambda params: parts.loss(params, targets, transition)[1][name].value)

        return {name: only(name)(params) for name in ("value_loss", "critic_loss", "policy_loss")}

    grads = jax.device_get(gradients(state.shared.params))
    is_zero = {
        name: [not any(np.any(x) for x in jax.tree.leaves(part)) for part in grad]
        for name, grad in grads.items()
    }
    assert is_zero == {
        "value_loss": [False, True],
        "critic_loss": [True, False],
        "policy_loss": [False, True],
    }
    overlap = jax.tree.map(
        lambda x, y: np.any(x) and np.any(y), grads["value_loss"].actor, grads["policy_loss"].actor
    )
    assert not any(jax.tree.leaves(overlap))

    new_state, _ = learn(agent, state, trajectory)
    close(gradient(new_state), jax.tree.map(lambda *x: sum(x), *grads.values()), atol=1e-5)
    shared = new_state.shared
    moved = jax.tree.map(
        lambda x, y: 0.995 * x + 0.005 * y, state.shared.target_params, shared.params.critics
    )
    close(shared.target_params, moved)
    assert int(shared.frames) == int(trajectory.valid().sum())


def test_it_keeps_the_contract_and_refuses_what_it_cannot_learn():
    check_agent(podracer.Blueprint(SETTINGS, RECORDED.spec), num_envs=B)
    with pytest.raises(ConfigError, match="needs continuous actions"):
        built(SETTINGS, Recorded(WALK))
    with pytest.raises(ConfigError, match="needs a feed-forward network"):
        built(
            dataclasses.replace(SETTINGS, network=TorsoNetwork(MLP((8,)), memory="gru")), RECORDED
        )


def test_with_a_replay_it_goes_on_in_an_environment_from_what_it_has_learned():
    """Its learner is the same, and samples are the replay's transitions: actions in [-1, 1],
    bootstraps of the discount, no time-out."""
    online = dataclasses.replace(SETTINGS, replay=Replay(B * 40, batch_size=32, warmup=0))
    check_agent(podracer.Blueprint(online, CONTINUOUS.spec), num_envs=B)
    agents = [built(SETTINGS, RECORDED), built(online, CONTINUOUS)]
    shapes = [jax.eval_shape(partial(x.init, num_envs=B), jax.random.key(0)) for x in agents]
    assert shapes[0].shared == shapes[1].shared

    agent, parts = agents[1], methods_of(agents[1])
    state, trajectory = begin(agent, CONTINUOUS)

    @jax.jit
    def draw(replay):
        sample = parts.buffer.sample(
            parts.buffer.add(replay, trajectory.steps), jax.random.key(1), 32
        )
        return parts.transition(sample.trajectory), n_step_transition(sample, 0.9)

    transition, expected = draw(state.local)
    expected = dataclasses.replace(expected, action=from_bounds(BOX, expected.action))
    assert not expected.mask.all()
    valid = np.asarray(expected.mask) > 0
    jax.tree.map(
        lambda x, y: np.testing.assert_array_equal(x[valid], y[valid]), transition, expected
    )
    assert np.array_equal(transition.mask, expected.mask)
    new_state, metrics = learn(agent, state, trajectory)
    assert int(new_state.shared.frames) == int(trajectory.valid().sum())
    assert np.isfinite(metrics["policy_loss"])
    prioritized = dataclasses.replace(online.replay, prioritized=True)
    with pytest.raises(ConfigError, match="IQL samples uniformly"):
        built(dataclasses.replace(online, replay=prioritized), CONTINUOUS)
