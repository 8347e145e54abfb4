"""Runs half of whose batches come from a data set, and half from their own replay."""

from __future__ import annotations

import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import podracer
from podracer.agents.dqn import DQN
from podracer.agents.iql import IQL
from podracer.agents.r2d2 import R2D2
from podracer.agents.sac import SAC
from podracer.config.experiment import Experiment
from podracer.dataset import Dataset
from podracer.drivers.anakin import AnakinConfig
from podracer.drivers.population import Pod
from podracer.drivers.sebulba import SebulbaConfig
from podracer.errors import ConfigError
from podracer.io.checkpoint import stored_fingerprint
from podracer.networks import MLP, TorsoNetwork
from podracer.replay import Buffer, Replay, sample_rows

NETWORK = TorsoNetwork(MLP((8,)))
STEPS = 16 * 4


def of_pendulum(seed=0, environment="pendulum"):
    """Two episodes of 20 transitions with random numbers, the first cut by a time-out."""
    rng, ends = np.random.default_rng(seed), np.arange(1, 41) % 20 == 0
    timeout = ends & (np.arange(40) < 20)
    return Dataset(
        observation=rng.normal(size=(40, 3)),
        action=rng.uniform(-2, 2, (40, 1)),
        reward=rng.normal(size=40),
        terminal=ends & ~timeout,
        timeout=timeout,
        final_observation=rng.normal(size=(1, 3)),
        environment=environment,
    )


def of_cartpole():
    data = of_pendulum(environment="cartpole")
    wide = partial(np.pad, pad_width=((0, 0), (0, 1)))
    return dataclasses.replace(
        data,
        observation=wide(data.observation),
        final_observation=wide(data.final_observation),
        action=(data.action[:, 0] > 0).astype(int),
    )


def experiment(agent, environment="pendulum", **fields):
    return Experiment(
        recipe="test",
        environment=environment,
        agent=agent,
        driver=fields.pop("driver", AnakinConfig(16, 4, 2)),
        frames=6 * STEPS,
        evaluations=0,
        **{"devices": 1} | fields,
    )


def sac(path, **replay):
    settings = Replay(6_400, batch_size=32, warmup=STEPS, data=str(path), **replay)
    return SAC(network=NETWORK, replay=settings, random_frames=0)


def dqn(path):
    return DQN(network=NETWORK, replay=Replay(6_400, batch_size=32, warmup=STEPS, data=str(path)))


def iql(path):
    network = dataclasses.replace(NETWORK, shared=False)
    return IQL(network=network, replay=Replay(6_400, batch_size=32, warmup=STEPS, data=str(path)))


def fingerprint(run):
    return stored_fingerprint(run)[1]


@pytest.mark.parametrize("prioritized", [False, True])
def test_half_of_a_batch_comes_from_the_data_set(prioritized):
    """Its rewards are all 7, with full weight, and no priority of the replay is theirs."""
    rows = jax.tree.map(jnp.asarray, of_cartpole().rows())
    data = dataclasses.replace(rows, reward=jnp.where(rows.last, rows.reward, 7.0))
    spec = podracer.make("cartpole").spec
    recorded = sample_rows(rows, jax.random.key(1), 6, 9)
    buffer = Buffer(Replay(6 * 40, prioritized=prioritized), spec, 2, data=data)
    alone = dataclasses.replace(buffer, data=None)
    replay = buffer.add(buffer.init(6), recorded.steps)
    sample = buffer.sample(replay, jax.random.key(0), 33)
    rewards = np.asarray(sample.trajectory.final.reward)
    assert not (rewards[:17] == 7.0).any()
    assert set(rewards[17:]) <= {0.0, 7.0}  # 0 before an episode cut by a time-out
    assert (rewards[17:] == 7.0).sum() > 12
    assert (sample.weights[17:] == 1).all()
    assert len(sample.rows) == len(sample.starts) == 17

    own = alone.sample(replay, jax.random.key(0), 17)
    assert np.array_equal(own.rows, sample.rows)
    assert np.array_equal(own.trajectory.final.reward, rewards[:17])
    if prioritized:
        errors = jnp.arange(1.0, 34.0)
        updated = [
            buffer.update_priorities(replay.priorities, x, errors[: len(x.weights)])
            for x in (own, sample)
        ]
        assert all(map(np.array_equal, *map(jax.tree.leaves, updated)))


def test_both_halves_of_a_batch_are_drawn_independently():
    """The replay has as many starts as the data set, 41, and places show in observations."""
    rows = jax.tree.map(jnp.asarray, of_cartpole().rows())
    places = jnp.broadcast_to(jnp.arange(41.0)[:, None], rows.observation.shape)
    data, spec = dataclasses.replace(rows, observation=places), podracer.make("cartpole").spec
    recorded = sample_rows(data, jax.random.key(1), 1, 43)
    buffer = Buffer(Replay(50), spec, 2, data=data)
    sample = buffer.sample(buffer.add(buffer.init(1), recorded.steps), jax.random.key(0), 400)
    places = np.asarray(sample.trajectory.steps.timestep.observation[0, 200:, 0])
    assert (places == sample.starts).mean() < 0.2


@pytest.mark.parametrize(
    ("agent", "data"),
    [
        (dqn, of_cartpole),
        pytest.param(sac, of_pendulum, marks=pytest.mark.slow),
        pytest.param(iql, of_pendulum, marks=pytest.mark.slow),
    ],
)
def test_a_run_with_a_data_set_in_its_replay_is_resumed_exactly(agent, data, tmp_path):
    path, data = tmp_path / "data.npz", data()
    path.write_bytes(data.encode())
    whole = experiment(agent(path), data.environment)
    result = podracer.train(whole, run_dir=tmp_path / "whole")
    podracer.train(whole, run_dir=tmp_path / "cut", frames=4 * STEPS)
    podracer.train(whole, run_dir=tmp_path / "cut", resume=True)
    assert fingerprint(tmp_path / "cut") == fingerprint(tmp_path / "whole")
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    assert config["data"] == data.digest

    path.write_bytes(dataclasses.replace(data, reward=np.full(40, 100.0)).encode())
    with pytest.raises(ConfigError, match="began with another data set in its replay, and its f"):
        podracer.train(whole, run_dir=tmp_path / "cut", resume=True, frames=8 * STEPS)
    rewarded = podracer.train(whole)
    assert rewarded.metrics["loss"] > 10 * result.metrics["loss"]


def test_what_cannot_be_mixed_is_refused(tmp_path):
    path = tmp_path / "data.npz"
    path.write_bytes(of_pendulum().encode())
    memory = TorsoNetwork(MLP((8,)), memory="gru", memory_size=8)
    r2d2 = R2D2(replay=Replay(6_400, data=str(path)), network=memory)
    recurrent = dataclasses.replace(sac(path), network=memory)
    for agent, environment, message in (
        (dqn(path), "cartpole", r"observation of the data set is float32\[3\], but that of cartpo"),
        (recurrent, "pendulum", "cannot mix the data set of `agent.replay.data` into its batches"),
        (sac(tmp_path / "none.npz"), "pendulum", "SAC needs the file .* No such file"),
    ):
        with pytest.raises(ConfigError, match=message):
            podracer.train(experiment(agent, environment))
    path.write_bytes(of_cartpole().encode())
    with pytest.raises(ConfigError, match="cannot mix the data set"):
        podracer.train(experiment(r2d2, "cartpole"))


def test_a_device_that_cannot_take_half_of_its_share_from_the_data_set_is_refused(tmp_path):
    """With one sample each, no device would ever take one from there."""
    path = tmp_path / "data.npz"
    path.write_bytes(of_cartpole().encode())
    agent = dqn(path)
    agent = dataclasses.replace(agent, replay=dataclasses.replace(agent.replay, batch_size=2))
    with pytest.raises(ConfigError, match=r"is 2, 1 for each of 2 devices, .* multiple of 4\."):
        podracer.train(experiment(agent, "cartpole", devices=2), run_dir=tmp_path / "run")


@pytest.mark.slow
def test_both_drivers_and_a_population_learn_from_the_same_halves(tmp_path):
    path = tmp_path / "data.npz"
    path.write_bytes(of_cartpole().encode())
    anakin = experiment(dqn(path), "cartpole")
    lockstep = SebulbaConfig(16, 4, 2, policy_lag=0, threads_per_actor=1)
    runs = {
        "anakin": anakin,
        "sebulba": experiment(dqn(path), "cartpole", driver=lockstep),
        "two": experiment(dqn(path), "cartpole", devices=2),
    }
    learned = {
        name: jax.device_get(podracer.train(run).state.shared.params) for name, run in runs.items()
    }
    leaves = {name: jax.tree.leaves(params) for name, params in learned.items()}
    assert all(map(np.array_equal, leaves["anakin"], leaves["sebulba"]))
    assert not all(map(np.array_equal, leaves["anakin"], leaves["two"]))  # shards draw apart

    pods = tuple(Pod(seed) for seed in (0, 1))
    result = podracer.train(dataclasses.replace(anakin, pods=pods))
    both = jax.device_get(result.state.shared.params)
    for x, y in zip(jax.tree.leaves(both), leaves["anakin"], strict=True):
        np.testing.assert_allclose(x[0], y, 1e-4, 1e-6)
