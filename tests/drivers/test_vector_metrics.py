"""Metrics `[n]` of an agent: averaged as scalars are, in files, reports and TensorBoard."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agents import SMALL
from runs import anakin_setup, train_anakin

from podracer.agent import DEFAULT_CONTEXT
from podracer.agents.a2c import A2C
from podracer.devices.reductions import MaskedMean
from podracer.fields import struct


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
            rewards = MaskedMean(share * last_two, share * last_two)
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
