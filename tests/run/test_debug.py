"""Debugging: single updates, their operations made one by one, as in `docs/troubleshooting.md`."""

import dataclasses
import inspect
import sys
import traceback

import jax
import jax.numpy as jnp
import pytest

import podracer
from podracer.agent import DEFAULT_CONTEXT
from podracer.devices.mesh import find_devices, make_mesh
from podracer.drivers.anakin import update_once
from podracer.drivers.state import make_init
from podracer.networks import MLP, TorsoNetwork
from podracer.run.setup import build


@podracer.struct
class Watched(podracer.A2C):
    """A2C that stops in `learn`, and then computes the logarithm of a field."""

    positive: float = 1.0

    def build(self, spec, context=DEFAULT_CONTEXT):
        agent = podracer.A2C.build(self, spec, context)

        def learn(state, trajectory, key, axis):
            reward = trajectory.steps.timestep.reward
            breakpoint()
            logarithm = jnp.log(self.positive + 0 * reward)
            state, metrics = agent.learn(state, trajectory, key, axis)
            return state, {**metrics, "logarithm": jnp.sum(logarithm)}

        return dataclasses.replace(agent, learn=learn)


def debug(num_updates, positive=1.0):
    """Return the number of updates of the state after some that ran operation by operation."""
    config = podracer.AnakinConfig(num_envs=1, rollout_length=2)
    agent = Watched(network=TorsoNetwork(MLP((2,))), positive=positive)
    blueprint, env = build(
        podracer.Experiment(environment="catch", agent=agent, driver=config, frames=2)
    )
    agent = blueprint.build()
    state = make_init(blueprint, env, make_mesh(find_devices(1)), config)(jax.random.key(0))
    with jax.disable_jit(), jax.debug_nans(True):
        for _ in range(num_updates):
            state, _ = update_once(agent, state, env=env, config=config)
    return int(state.update)


@pytest.fixture
def rewards(monkeypatch):
    """Rewards that each breakpoint saw."""
    seen = []

    def stop():
        seen.append(inspect.stack()[1].frame.f_locals["reward"])

    monkeypatch.setattr(sys, "breakpointhook", stop)
    return seen


@pytest.mark.slow
def test_breakpoints_see_values_and_only_values(rewards):
    assert debug(2) == len(rewards) == 2
    assert all(reward.tolist() == [[0.0], [0.0]] for reward in rewards)  # tracers have no list


def test_the_first_nan_is_an_error_at_its_line(rewards):
    with pytest.raises(FloatingPointError, match="nan") as error:
        debug(1, positive=-1.0)
    lines = [frame.line for frame in traceback.extract_tb(error.value.__traceback__)]
    assert "logarithm = jnp.log(self.positive + 0 * reward)" in lines
    (reward,) = rewards
    assert reward.tolist() == [[0.0], [0.0]]  # a value, at the breakpoint of the only update


def test_a_run_without_compilation_is_refused(tmp_path):
    with pytest.raises(podracer.ConfigError, match="jax_disable_jit"), jax.disable_jit():
        podracer.train("catch", run_dir=tmp_path / "run")
