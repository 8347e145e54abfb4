"""SAC: its temperature and its learning rate."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from off_policy import (
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

import podracer
from podracer.agents.sac import SAC
from podracer.config.experiment import Experiment
from podracer.dataset import Dataset
from podracer.drivers.anakin import AnakinConfig
from podracer.networks import MLP, TorsoNetwork
from podracer.replay import Replay
from podracer.schedules import Linear


@pytest.mark.slow
def test_sac_stops_where_its_learning_rate_ends():
    """After the frames of one rollout, temperature included."""
    num_frames = int(begin(*agent_and_env("sac"))[1].valid().sum())
    agent, env = agent_and_env("sac", learning_rate=Linear(1e-3, 0.0, frames=num_frames))
    state, trajectory = begin(agent, env)
    once, _ = learn(agent, state, trajectory)
    twice, _ = learn(agent, once, trajectory)
    before, after, later = (jax.tree.leaves(x.shared.params) for x in (state, once, twice))
    assert not any(map(np.array_equal, before, after))
    assert all(map(np.array_equal, after, later))


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


# --- cloning --------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [2.5, pytest.param(0.0, marks=pytest.mark.slow)])
def test_a_cloning_policy_stays_near_the_actions_of_the_batch(alpha):
    """Sample by sample in float64: -log π(a|s) + λ (temperature log π(a'|s) - Q(s, a')), where λ is
    alpha over the mean |Q|. The density is that of a Gaussian through tanh. Actions at the bounds
    count as 0.99, masked samples nowhere, and the temperature has no gradient."""
    agent, env = agent_and_env("sac", cloning_alpha=alpha)
    shared, transition = drawn(agent, env)
    methods, mask = methods_of(agent), np.arange(32) % 3 > 0
    action = transition.action.at[:4, 0].set(1.0)
    transition = dataclasses.replace(transition, mask=jnp.asarray(mask, jnp.float32), action=action)
    with jax.enable_x64(True):
        shared, transition = jax.tree.map(doubled, (shared, transition))
        obs, key = transition.timestep.observation, jax.random.key(3)
        temperature = float(np.exp(shared.params.actor.log_temperature))

        def sampled(actor):
            policy = methods.policy(actor, obs)
            action, log_prob = policy.sample(jax.random.split(key, 32))
            q = methods.networks.q_values(shared.params.critics, obs, action).min(axis=0)
            return policy, q, temperature * log_prob - q

        rows = np.flatnonzero(mask)
        size = np.abs(sampled(shared.params.actor)[1][rows]).mean()

        def expected(actor):
            policy, _, value_losses = sampled(actor)
            total = 0.0
            for row in rows:
                a = jnp.clip(transition.action[row], -0.99, 0.99)
                x, std = jnp.arctanh(a), jnp.exp(policy.log_scale[row])
                density = jnp.exp(-(((x - policy.mean[row]) / std) ** 2) / 2)
                density /= std * jnp.sqrt(2 * jnp.pi) * (1 - a**2)
                total += alpha / size * value_losses[row] - jnp.log(density).sum()
            return total / len(rows)

        def loss(actor):
            return methods.actor_loss(actor, shared, transition, key)[0].value

        actor = shared.params.actor
        results = [jax.value_and_grad(x)(actor) for x in (loss, expected)]
        close(*results, atol=1e-10, rtol=1e-7)
        assert results[0][1].log_temperature == 0


def test_a_policy_that_was_cloned_is_taken_by_sac():
    """Their learners have the same leaves."""
    agents = [agent_and_env("sac", cloning_alpha=alpha)[0] for alpha in (None, 0.0)]
    states = [jax.eval_shape(partial(x.init, num_envs=4), jax.random.key(0)) for x in agents]
    assert states[0].shared == states[1].shared


@pytest.mark.slow
def test_sac_goes_on_from_a_clone_with_its_critics_and_moments(tmp_path):
    """The clone acts as the rule that the actions come from, and so does SAC from its weights."""
    rng, ends = np.random.default_rng(0), np.arange(1, 4001) % 20 == 0
    observation = rng.normal(size=(4000, 3)) * [1, 1, 4]
    action = 2 * np.tanh(0.3 * observation[:, 2:])
    data = Dataset(
        observation=observation, action=action, reward=-np.abs(observation[:, 2]), terminal=ends,
        timeout=np.zeros_like(ends), environment="pendulum",
    )  # fmt: skip
    (tmp_path / "data.npz").write_bytes(data.encode())
    agent = SAC(
        learning_rate=3e-3,
        cloning_alpha=0.0,
        random_frames=0,
        normalize_observations=True,
        replay=Replay(6_400, batch_size=64, warmup=640),
        network=TorsoNetwork(MLP((32,))),
    )
    experiment = Experiment(
        recipe="test",
        environment=f"data:{tmp_path / 'data.npz'}",
        agent=agent,
        driver=AnakinConfig(64, 1, 100),
        frames=64_000,
        evaluations=0,
        devices=1,
    )
    clone = podracer.train(experiment, run_dir=tmp_path / "clone")
    policy = podracer.load_policy(tmp_path / "clone")
    error = np.abs(policy(observation.astype(np.float32)) - action)
    assert error.mean() < 0.1
    assert clone.metrics["temperature"] == 1.0
    sac = podracer.train(
        experiment,
        environment="pendulum",
        agent=dataclasses.replace(agent, cloning_alpha=None, learning_rate=0.0),
        frames=6_400,
        weights=tmp_path / "clone",
    ).state.shared
    close(*(jax.device_get(x.params) for x in (sac, clone.state.shared)), atol=0)
    count = clone.state.shared.obs_moments.count
    assert float(sac.obs_moments.count) == pytest.approx(float(count) + 6_400, rel=0.01)
