"""Shifted pictures beside a loop over pixels."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from podracer import recipes
from podracer.agents import DQN
from podracer.envs import make
from podracer.errors import ConfigError
from podracer.networks import MLP, TorsoNetwork
from podracer.types import ArraySpec, Discrete, EnvironmentSpec, Step, TimeStep
from podracer_agents.augmentation import ShiftedReplay, shift

H, W = 6, 5


def shifted_by(picture: np.ndarray, down: int, right: int) -> np.ndarray:
    rows = np.clip(np.arange(H) + down, 0, H - 1)
    columns = np.clip(np.arange(W) + right, 0, W - 1)
    return np.stack([[picture[r, c] for c in columns] for r in rows])


def test_pictures_are_shifted_by_all_amounts_alike():
    picture = np.random.default_rng(0).integers(0, 256, (H, W, 3)).astype(np.uint8)
    many = shift(jnp.tile(picture, (50, 40, 1, 1, 1)), jax.random.key(0), 2)
    assert many.dtype == jnp.uint8
    found = np.asarray(many).reshape(2000, -1)
    counts = [
        (found == shifted_by(picture, i, j).reshape(-1)).all(axis=1).sum()
        for i in range(-2, 3)
        for j in range(-2, 3)
    ]
    assert sum(counts) == 2000
    assert min(counts) > 40  # of 80 each


def test_a_sample_shifts_pictures_and_nothing_else():
    observation = {"picture": ArraySpec((H, W, 1), np.uint8), "vector": ArraySpec((2,))}
    spec = EnvironmentSpec("pictures", observation, Discrete(2))
    random, flag = np.random.default_rng(1), jnp.zeros((20, 3), bool)
    values = {
        "picture": jnp.asarray(random.integers(0, 256, (20, 3, H, W, 1)), jnp.uint8),
        "vector": jnp.asarray(random.normal(size=(20, 3, 2)), jnp.float32),
    }
    timestep = TimeStep(values, jnp.zeros((20, 3)), jnp.ones((20, 3)), flag, flag)
    buffer = ShiftedReplay(3 * 40, padding=1).build(spec, 2)
    memory = buffer.add(buffer.init(3), Step(timestep, jnp.zeros((20, 3), jnp.int32), ()))
    sample = buffer.sample(memory, jax.random.key(0), 64)
    shown = jax.device_get(sample.trajectory.timesteps().observation)
    shifts = set()
    for n in range(64):
        for t in range(2):
            row, time = int(sample.rows[n]), int(sample.starts[n]) + t
            np.testing.assert_array_equal(shown["vector"][t, n], values["vector"][time, row])
            truth = np.asarray(values["picture"][time, row])
            found = [
                (i, j)
                for i in (-1, 0, 1)
                for j in (-1, 0, 1)
                if (shifted_by(truth, i, j) == shown["picture"][t, n]).all()
            ]
            assert len(found) == 1
            shifts.add((t, *found[0]))
    assert len(shifts) == 18


def test_an_agent_takes_it_where_there_are_pictures():
    agent = recipes.find("atari_drq").agent
    spec = EnvironmentSpec("game", ArraySpec((84, 84, 4), np.uint8), Discrete(6))
    assert isinstance(agent.replay, ShiftedReplay)
    agent.build(spec)
    with pytest.raises(ConfigError, match="ShiftedReplay shifts pictures"):
        DQN(replay=ShiftedReplay(), network=TorsoNetwork(MLP((8,)))).build(make("cartpole").spec)
