"""Debugging: single updates, their operations made one by one, as in `docs/troubleshooting.md`."""

import dataclasses
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
class Broken(podracer.A2C):
    """A2C that computes the logarithm of a negative number."""

    def build(self, spec, context=DEFAULT_CONTEXT):
        def learn(state, trajectory, key, axis):
            logarithm = jnp.log(0 * trajectory.steps.timestep.reward - 1)
            return state, {"logarithm": jnp.sum(logarithm)}

        return dataclasses.replace(podracer.A2C.build(self, spec, context), learn=learn)


def test_the_first_nan_is_an_error_at_its_line():
    config = podracer.AnakinConfig(num_envs=1, rollout_length=2)
    agent = Broken(network=TorsoNetwork(MLP((2,))))
    blueprint, env = build(
        podracer.Experiment(environment="catch", agent=agent, driver=config, frames=2)
    )
    state = make_init(blueprint, env, make_mesh(find_devices(1)), config)[1](jax.random.key(0))
    with (
        pytest.raises(FloatingPointError, match="nan") as error,
        jax.disable_jit(),
        jax.debug_nans(True),
    ):
        update_once(blueprint.build(), state, env=env, config=config)
    lines = [frame.line for frame in traceback.extract_tb(error.value.__traceback__)]
    assert "logarithm = jnp.log(0 * trajectory.steps.timestep.reward - 1)" in lines


def test_a_run_without_compilation_is_refused(tmp_path):
    with pytest.raises(podracer.ConfigError, match="jax_disable_jit"), jax.disable_jit():
        podracer.train("catch", run_dir=tmp_path / "run")
