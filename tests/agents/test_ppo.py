"""PPO: its clips, minibatches, normalization, schedules and metrics."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from on_policy import learner, small, standardized, textbook_gradient
from walk import (
    WALK,
    B,
    T,
    Walk,
    advance,
    begin,
    built,
    close,
    enter,
    fresh,
    gradient,
    learn,
    methods_of,
    slow,
    with_rewards,
)

from podracer.agent import Agent
from podracer.agents.common.normalization import (
    discounted_rewards,
    normalized_by_actor,
    scale_rewards,
)
from podracer.agents.ppo import kl_estimate
from podracer.devices.reductions import init_moments
from podracer.environment import auto_reset
from podracer.ops.returns import generalized_advantages
from podracer.schedules import Linear
from podracer.types import LearnerState, Step, TimeStep, Trajectory, blank_timestep


def advantages(settings: Any, agent: Agent, state: LearnerState, trajectory: Trajectory) -> Any:
    """The generalized advantages, by the values that acting computed, and which of them count."""
    keys, final = jax.random.split(jax.random.key(0), B), trajectory.final
    params = agent.actor_params(state)
    _, extras, _ = agent.act(params, trajectory.final_carry, final, keys, False)
    values = jnp.concatenate([trajectory.steps.extras["value"], extras["value"][None]])
    next_timesteps, valid = trajectory.next_timesteps(), trajectory.valid()
    discounts = settings.discount * next_timesteps.discount
    rewards = next_timesteps.reward
    return (
        generalized_advantages(
            values[:-1], values[1:], rewards, discounts, valid, settings.gae_lambda
        ),
        valid,
    )


@pytest.mark.parametrize(("shift", "kept"), [(-0.5, -1), (0.5, 1)])
def test_ppo_ignores_gains_beyond_its_clip(shift, kept):
    """Where the ratio has left the clip to the good side of its advantage, nothing is learned."""
    settings = learner("ppo")
    agent = built(settings)
    state, trajectory = begin(agent)
    extras = trajectory.steps.extras
    extras = {**extras, "log_prob": extras["log_prob"] + shift}
    trajectory = dataclasses.replace(
        trajectory, steps=dataclasses.replace(trajectory.steps, extras=extras)
    )

    def loss(log_prob: jax.Array, old: jax.Array, advantages: jax.Array) -> jax.Array:
        gain = standardized(advantages, trajectory.valid()) * jnp.exp(log_prob - old)
        return -jnp.where(jnp.sign(gain) == kept, gain, 0.0)

    new_state, metrics = learn(agent, state, trajectory)
    close(gradient(new_state), textbook_gradient(settings, state, trajectory, loss), atol=1e-5)
    close(metrics["clip_fraction"], 1.0)


@pytest.mark.parametrize("memory", ["none", slow("gru")])
def test_acting_and_learning_see_the_same_observations(memory):
    """With moments that change at every update, ratios stay 1 in the first epoch of each, and the
    moments are those of all that was acted on."""
    agent = built(learner("ppo", memory, normalize_observations=True))
    env = auto_reset(Walk(offset=30.0))
    state, actor, observations = fresh(agent), enter(agent, env), []
    for i in range(3):
        actor, trajectory = advance(agent, env, agent.actor_params(state), actor, i)
        valid = np.asarray(trajectory.valid())
        observations.append(np.asarray(trajectory.steps.timestep.observation)[valid])
        state, metrics = learn(agent, state, trajectory)
        close((metrics["approx_kl"], metrics["clip_fraction"]), (0.0, 0.0))
        moments, items = (
            state.shared.observation_moments,
            np.concatenate(observations).astype(float),
        )
        assert moments.count == len(items)
        close((moments.mean, moments.variance), (items.mean(0), items.var(0)), rtol=1e-4)
    assert (moments.mean > 20).all()


def test_under_a_lag_learning_sees_what_acting_saw():
    """An actor's moments may be older than the learner's: ratios and values are still the same."""
    settings = learner("ppo", normalize_observations=True)
    agent = built(settings)
    env = auto_reset(Walk(offset=30.0))
    old_state = fresh(agent)
    params = agent.actor_params(old_state)
    actor, first = advance(agent, env, params, enter(agent, env), 0)
    _, trajectory = advance(agent, env, params, actor, 1)
    updated, _ = learn(agent, old_state, first)
    moments = updated.shared.observation_moments
    state = LearnerState(dataclasses.replace(old_state.shared, observation_moments=moments))
    _, metrics = learn(agent, state, trajectory)
    close((metrics["approx_kl"], metrics["clip_fraction"]), (0.0, 0.0))

    errors, valid = advantages(settings, agent, state, trajectory)
    close(metrics["value_loss"], 0.5 * jnp.mean(errors**2, where=valid), rtol=1e-5)
    # The final timestep, which no actor has normalized, has the newest moments.
    mean, deviation = np.asarray(moments.mean), np.sqrt(moments.variance)
    final = (np.asarray(trajectory.final.observation) - mean) / deviation
    close(normalized_by_actor(moments, trajectory).final.observation, final, atol=1e-4)


@pytest.mark.parametrize("memory", ["none", slow("gru")])
def test_the_variance_that_values_explain(memory):
    """It is 1 - Var[G - v] / Var[G] over the steps that count, as in Stable-Baselines3."""
    settings = learner("ppo", memory)
    agent = built(settings)
    state, trajectory = begin(agent)
    values = trajectory.steps.extras["value"]
    error, valid = (np.asarray(x) for x in advantages(settings, agent, state, trajectory))
    error, value = (np.asarray(x, float)[valid] for x in (error, values))
    _, metrics = learn(agent, state, trajectory)
    close(metrics["explained_variance"], 1 - np.var(error) / np.var(value + error), rtol=1e-4)
    assert not valid.all()


def test_of_equal_targets_there_is_no_variance_to_explain():
    agent = built(learner("ppo", discount=0.0))
    state, trajectory = begin(agent)
    _, metrics = learn(agent, state, with_rewards(trajectory, lambda reward: 0 * reward + 3.7))
    assert metrics["explained_variance"] == 0


@pytest.mark.parametrize("grouping", ["minibatch", "batch", "none"])
@pytest.mark.parametrize("memory", ["none", slow("gru")])
def test_advantages_are_standardized_together(grouping, memory):
    """By a reference that loops over the minibatches; what is not valid does not count."""
    items = np.asarray([[1, 4, 0], [5, 3, 2]])
    advantage = jax.random.normal(jax.random.key(0), (1 if memory == "none" else T, B))
    valid = np.ones(advantage.shape, np.float32)
    valid[0, 4] = 0
    methods = methods_of(built(learner("ppo", memory, advantage_normalization=grouping)))
    batch = SimpleNamespace(advantage=advantage, valid=jnp.asarray(valid))
    means, variances = methods.advantage_moments(batch, jnp.asarray(items), None)
    for k in range(2):
        counted = np.where(valid, advantage, np.nan)
        group = {"minibatch": counted[:, items[k]], "batch": counted}.get(grouping)
        group = None if group is None else group[~np.isnan(group)]
        expected = (0.0, 1.0) if group is None else (group.mean(), group.var())
        close((means[k], variances[k]), expected)


def test_the_value_is_clipped_by_choice():
    """Without the clip the value's loss is that of A2C: half of the squared error."""
    settings = learner("ppo", clip_value=False, clip_epsilon=0.01)
    agent = built(settings)
    state, trajectory = begin(agent)
    extras = trajectory.steps.extras
    extras = {**extras, "value": extras["value"] + 1.0}  # so that the clip would matter
    steps = dataclasses.replace(trajectory.steps, extras=extras)
    trajectory = dataclasses.replace(trajectory, steps=steps)
    change, valid = advantages(settings, agent, state, trajectory)  # of the value, to its target
    error = (1.0 + change) ** 2
    _, metrics = learn(agent, state, trajectory)
    close(metrics["value_loss"], 0.5 * jnp.mean(error, where=valid), rtol=1e-5)
    clipping = built(dataclasses.replace(settings, clip_value=True))
    _, metrics = learn(clipping, state, trajectory)
    larger = jnp.maximum(error, (0.01 + change) ** 2)
    close(metrics["value_loss"], 0.5 * jnp.mean(larger, where=valid), rtol=1e-5)


def test_a_target_kl_ends_an_update():
    """No step is taken on the first minibatch that exceeds it, nor on any after it."""
    settings = small("ppo", learning_rate=0.05, num_epochs=3, num_minibatches=2)
    agent = built(settings)
    state, trajectory = begin(agent)
    unlimited, all_metrics = learn(agent, state, trajectory)
    far = built(dataclasses.replace(settings, target_kl=1e9))
    same, metrics = learn(far, state, trajectory)
    close(same.shared.params, unlimited.shared.params, atol=1e-6)
    close({name: metrics[name] for name in all_metrics}, all_metrics, atol=1e-5)
    assert metrics["minibatch_fraction"] == 1

    near = built(dataclasses.replace(settings, target_kl=1e-6))
    stopped, metrics = learn(near, state, trajectory)
    taken = int(stopped.shared.optimizer_state[1].count)
    assert 0 < taken < 6
    close(metrics["minibatch_fraction"], taken / 6)
    assert metrics["approx_kl"] * (taken + 1) > 1.5e-6  # the last one is among them
    assert int(stopped.shared.frames) == trajectory.valid().sum()


def test_normalized_rewards_are_clipped():
    _, trajectory = begin(built(learner("ppo")))
    timesteps = with_rewards(trajectory, lambda reward: reward.at[3, 0].set(1e6))
    scaled, *_ = scale_rewards(
        init_moments(jnp.zeros(())), jnp.zeros(B), timesteps, discount=0.0, axis=None
    )
    assert scaled.steps.timestep.reward.max() < 10 + 1e-6


def test_rewards_are_divided_by_the_deviation_of_the_returns():
    """By that of all discounted sums so far, which start again after every end of an episode."""
    settings = learner("ppo")
    unscaled, agent = built(settings), built(learner("ppo", normalize_rewards=True))
    state, actor = fresh(agent), enter(unscaled)
    params, sums, total = unscaled.actor_params(fresh(unscaled)), [], np.zeros(B)
    for i in range(3):
        actor, trajectory = advance(unscaled, WALK, params, actor, i)
        old_state, (state, _) = state, learn(agent, state, trajectory)
        following = jax.device_get(trajectory.next_timesteps())
        for t in range(T):
            total = following.reward[t] + settings.discount * total
            sums += list(total[np.asarray(trajectory.valid()[t])])
            total = np.where(following.last[t] | (following.discount[t] == 0), 0.0, total)
    close(state.shared.return_moments.variance, np.var(sums), rtol=1e-4)
    close(state.local, total, atol=1e-5)

    # An agent that does not normalize learns the same from rewards divided by hand.
    divided = with_rewards(trajectory, lambda reward: reward / np.std(sums))
    old_learner = dataclasses.replace(old_state.shared, return_moments=None)
    expected, _ = learn(unscaled, LearnerState(old_learner), divided)
    close(state.shared.params, expected.shared.params, atol=1e-5)


def test_rewards_of_both_players_have_opposite_signs_in_the_sums():
    """Also where a player moves twice, across rollouts, terminals and time-outs."""
    rng, steps = np.random.default_rng(0), 80
    discount = rng.choice([-1.0, -1.0, 1.0, 0.0], (steps + 1, B))
    last = (rng.random((steps + 1, B)) < 0.1) & (discount == 1)
    timesteps = TimeStep(
        observation=jnp.zeros((steps + 1, B, 1)),
        reward=jnp.asarray(rng.normal(1.0, 1.0, (steps + 1, B)), jnp.float32),
        discount=jnp.asarray(discount, jnp.float32),
        first=jnp.asarray(discount == 0),
        last=jnp.asarray(last),
    )
    gains = []  # discounted, each of the player who makes the newest move
    for b in range(B):
        player, gain = 1.0, 0.0  # the one to move, and what the first player has gained
        for t in range(1, steps + 1):
            gain = 0.9 * gain + player * float(timesteps.reward[t, b])
            gains += [] if last[t - 1, b] else [player * gain]
            player *= -1 if discount[t, b] == -1 else 1
            gain = 0.0 if last[t, b] or discount[t, b] == 0 else gain

    def rollout(begin, end):
        part = Step(jax.tree.map(lambda x: x[begin:end], timesteps), (), ())
        return Trajectory(part, jax.tree.map(lambda x: x[end], timesteps), (), ())

    moments, sums = init_moments(jnp.zeros(())), jnp.zeros(B)
    for part in (rollout(0, 33), rollout(33, steps)):
        _, moments, sums = scale_rewards(moments, sums, part, discount=0.9, axis=None)
    close(moments.variance, np.var(gains), rtol=1e-4)


def test_an_episode_without_an_end_leaves_nothing_in_the_sums_of_the_next():
    """A fault has lost it in the first step of a rollout; or the run was resumed."""
    begin = blank_timestep(WALK.spec, 1)
    cut = dataclasses.replace(begin, first=jnp.zeros(1, bool), last=jnp.ones(1, bool))
    final = dataclasses.replace(begin, first=jnp.zeros(1, bool), reward=jnp.ones(1))
    for timesteps in ([cut, begin], [begin]):
        steps = Step(jax.tree.map(lambda *x: jnp.stack(x), *timesteps), (), ())
        sums = discounted_rewards(jnp.ones(1), Trajectory(steps, final, (), ()), 0.9)[1]
        assert sums == 1


def test_a_learning_rate_falls_to_zero():
    _, trajectory = begin(built(learner("ppo")))
    num_frames = int(trajectory.valid().sum())
    decay = Linear(1e-3, 0.0, frames=2 * num_frames)
    agent = built(small("ppo", num_epochs=2, num_minibatches=2, learning_rate=decay))
    state = fresh(agent)
    change = []
    for _ in range(3):
        new, _ = learn(agent, state, trajectory)
        difference = jax.tree.map(
            lambda a, b: jnp.abs(a - b).max(), new.shared.params, state.shared.params
        )
        change.append(max(jax.tree.leaves(jax.device_get(difference))))
        state = new
        assert int(state.shared.frames) == len(change) * num_frames
    assert change[0] > change[1] > 0 == change[2]


def test_the_kl_estimate_is_exact_near_0_and_far_from_it():
    magnitudes = np.geomspace(1e-6, 8, 200)
    log_ratio = np.concatenate([-magnitudes, magnitudes]).astype(np.float32)
    exact = np.expm1(log_ratio, dtype=np.float64) - log_ratio
    np.testing.assert_allclose(kl_estimate(jnp.asarray(log_ratio)), exact, rtol=3e-5)
    assert kl_estimate(jnp.zeros(())) == 0
