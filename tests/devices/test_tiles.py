"""Rings of large frames on a TPU are whole tiles, and what a state needs of a device's memory."""

import dataclasses
import operator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agents import SMALL, blueprint

from podracer.agents.dqn import DQN
from podracer.devices.fused import traced_for
from podracer.devices.mesh import make_mesh
from podracer.devices.tiles import from_stored, to_stored
from podracer.drivers import driver
from podracer.drivers.anakin import AnakinConfig
from podracer.drivers.state import abstract_state
from podracer.envs import make
from podracer.errors import ConfigError
from podracer.replay import Buffer, Replay
from podracer.types import ArraySpec, Step, TimeStep

REPLAYING = DQN(network=SMALL, replay=Replay(480, batch_size=16, warmup=100))


@pytest.mark.parametrize("dtype", [np.float32, np.uint8, bool])
def test_tiles_hold_the_same_numbers(dtype):
    ring, spec = np.random.default_rng(0).integers(0, 2, (2, 3, 60, 99)), ArraySpec((60, 99), dtype)
    ring = jnp.asarray(ring.astype(dtype))
    with traced_for("tpu"):
        stored = to_stored(ring)
    assert (stored.dtype, stored.shape[-1]) == (jnp.uint32, 128)
    np.testing.assert_array_equal(from_stored(stored, spec), ring)
    np.testing.assert_array_equal(to_stored(ring), ring)


def test_a_tpu_that_keeps_tiles_samples_the_same():
    config = Replay(2 * 12)
    observation = ArraySpec((32, 99, 2), np.uint8, frame_stack=True)
    spec = dataclasses.replace(make("catch").spec, observation=observation)
    random, buffer = np.random.default_rng(0), Buffer(config, spec, 3)
    frames = random.integers(0, 255, (17, 2, 32, 99)).astype(np.uint8)
    stacks, zeros = jnp.stack([frames[:-1], frames[1:]], -1), jnp.zeros((16, 2))
    signals = zeros, zeros, zeros > 0, zeros > 0
    steps = Step(TimeStep(stacks, *signals), jnp.zeros((16, 2), jnp.int32), ())

    def sampled():
        state = buffer.init(2)
        for start in (0, 5, 10):
            rows = slice(start, start + 5)
            state = buffer.add(state, jax.tree.map(operator.itemgetter(rows), steps))
        rows, starts = jnp.array([0, 1, 1]), jnp.array([4, 5, 10])
        observations = buffer.trajectory_at(state, rows, starts).steps.timestep.observation
        return observations, jax.tree.leaves(state.steps.timestep.observation)[0]

    expected, frames_on_cpu = sampled()
    with traced_for("tpu"):
        actual, tiles = sampled()
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(expected[:, 0], stacks[jnp.array([4, 5]), 0])
    assert (frames_on_cpu.shape, tiles.shape) == ((2, 12, 32, 99), (2, 12, 8, 128))


@pytest.mark.parametrize(("platform", "times"), [("cpu", 2), ("gpu", 1)])
def test_a_cpu_needs_the_state_twice_because_a_save_keeps_it(platform, times, monkeypatch):
    env, devices = make("catch"), np.array([SimpleNamespace(platform=platform)])
    agent = blueprint(REPLAYING, env.spec)
    state = abstract_state(agent, env, make_mesh(jax.devices()[:1]), AnakinConfig(16, 8, 2))
    mesh: Any = SimpleNamespace(devices=devices, local_devices=[0])
    monkeypatch.setattr(driver, "free_bytes", lambda mesh: 2**40)
    needed = driver.checked_size(state, mesh)
    monkeypatch.setattr(driver, "free_bytes", lambda mesh: times * needed)
    assert driver.checked_size(state, mesh) == needed
    monkeypatch.setattr(driver, "free_bytes", lambda mesh: times * needed - 1)
    with pytest.raises(ConfigError, match="are free") as error:
        driver.checked_size(state, mesh)
    assert ("and as much again during a save, but" in str(error.value)) == (platform == "cpu")
