"""Metrics `[n]` of an agent: averaged as scalars are, in files, reports and TensorBoard."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agents import SMALL
from runs import anakin_setup, sebulba_setup, train_anakin, train_sebulba

import podracer
from podracer.agent import DEFAULT_CONTEXT
from podracer.agents.a2c import A2C
from podracer.devices.reductions import Mean
from podracer.drivers.population import Pod
from podracer.envs.host.device import DeviceEnvironments
from podracer.fields import struct
from podracer.io.sinks import read_metrics
from podracer.scores.runs import read_members


@struct
class Counting:
    """A2C that measures how often each action is taken, and the mean reward of each action."""

    def build(self, spec, context=DEFAULT_CONTEXT):
        good = A2C(network=SMALL).build(spec, context)

        def learn(state, trajectory, key, axis):
            state, metrics = good.learn(state, trajectory, key, axis)
            taken = jax.nn.one_hot(trajectory.steps.action, spec.action.num_actions)
            share = taken.mean(axis=(0, 1))
            last_two = jnp.arange(share.shape[0]) > 0  # of the first action nothing counts
            rewards = Mean(share * last_two, share * last_two)
            return state, {**metrics, "action_share": share, "action_reward": rewards}

        return dataclasses.replace(good, learn=learn)


@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_chunk_has_the_mean_of_its_updates(devices):
    one, each = (
        train_anakin(
            *anakin_setup(Counting(), devices=devices, updates_per_chunk=updates), num_updates=10
        )[1]
        for updates in (5, 1)
    )
    assert (len(one), len(each)) == (2, 10)
    for index, progress in enumerate(one):
        share = progress.metrics["action_share"]
        assert share.shape == (3,)
        assert share.sum() == pytest.approx(1)
        assert progress.not_finite == []
        assert isinstance(progress.metrics["loss"], float)
        updates = [x.metrics["action_share"] for x in each[5 * index : 5 * index + 5]]
        np.testing.assert_allclose(share, np.mean(updates, axis=0), rtol=1e-6)
        np.testing.assert_array_equal(progress.metrics["action_reward"], [np.nan, 1, 1])


@pytest.mark.slow
def test_lock_step_sebulba_measures_the_same():
    env = podracer.make("catch")
    (_, one), (_, other) = (
        train_anakin(*anakin_setup(Counting(), env), num_updates=5),
        train_sebulba(
            *sebulba_setup(Counting(), DeviceEnvironments(env), policy_lag=0), num_updates=5
        ),
    )
    shares = [x[-1].metrics["action_share"] for x in (one, other)]
    np.testing.assert_allclose(*shares, rtol=1e-6)
    assert shares[0].shape == (3,)


@pytest.mark.slow
@pytest.mark.parametrize("pods", [0, 2])
def test_a_run_writes_lists_and_its_report_draws_each_number(pods, tmp_path):
    driver = podracer.AnakinConfig(num_envs=8, rollout_length=4, updates_per_chunk=5)
    experiment = podracer.Experiment(
        agent=Counting(), environment="catch", driver=driver, frames=320, evaluations=1,
        evaluation_episodes=2,
    )  # fmt: skip
    members = {"pods": tuple(Pod(seed) for seed in range(pods))} if pods else {}
    podracer.train(experiment, run_dir=tmp_path / "run", devices=1, **members)
    for record in read_metrics(tmp_path / "run" / "metrics.jsonl"):
        assert sum(record["action_share"]) == pytest.approx(1)
        assert record["action_reward"] == [None, 1, 1]
    runs = read_members(tmp_path / "run", "run")
    assert len(runs) == max(1, pods)
    for run in runs:
        parts = [run.series(f"action_share[{i}]", "updates")[1] for i in range(3)]
        np.testing.assert_allclose(np.sum(parts, axis=0), [1, 1], rtol=1e-5)
