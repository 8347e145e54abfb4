"""Debugging: a run whose operations are made one by one."""

import dataclasses
import inspect
import sys
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from variants import variants

import podracer
from podracer.agent import DEFAULT_CONTEXT
from podracer.networks import MLP, TorsoNetwork

SMALL: dict[str, Any] = {"num_envs": 1, "rollout_length": 2, "updates_per_chunk": 1}


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


def train(run_dir, driver, positive=1.0, debug=True, **settings):
    network = TorsoNetwork(MLP((2,)))
    return podracer.train(
        podracer.Experiment(
            environment="catch",
            agent=Watched(network=network, positive=positive),
            driver=driver,
            frames=4,
            evaluations=0,
        ),
        run_dir=run_dir,
        debug=debug,
        progress=False,
        **settings,
    )


@pytest.fixture
def rewards(monkeypatch):
    """Rewards that each breakpoint saw."""
    seen = []

    def stop():
        seen.append(inspect.stack()[1].frame.f_locals["reward"])

    monkeypatch.setattr(sys, "breakpointhook", stop)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(
    "driver",
    [podracer.AnakinConfig(**SMALL), podracer.SebulbaConfig(**SMALL, threads_per_actor=1)],
)
def test_breakpoints_see_values_and_only_values(tmp_path, rewards, driver):
    result = train(tmp_path / "run", driver)
    assert result.metrics["frames"] >= 4
    assert len(rewards) == result.metrics["updates"]
    assert all(reward.tolist() == [[0.0], [0.0]] for reward in rewards)  # tracers have no list


@variants("how", ["debug"], ["JAX_DISABLE_JIT"])
def test_the_first_nan_is_an_error_at_its_line(how, tmp_path, rewards):
    is_debug = how == "debug"
    with pytest.raises(FloatingPointError, match="nan") as error, jax.disable_jit(not is_debug):
        train(tmp_path / "run", podracer.AnakinConfig(**SMALL), positive=-1.0, debug=is_debug)
    lines = [frame.line for frame in traceback.extract_tb(error.value.__traceback__)]
    assert "logarithm = jnp.log(self.positive + 0 * reward)" in lines
    (reward,) = rewards
    assert reward.tolist() == [[0.0], [0.0]]  # a value, at the breakpoint of the only update


def test_a_run_on_several_devices_is_refused(tmp_path):
    with pytest.raises(podracer.ConfigError, match="`devices=1`"):
        train(tmp_path / "run", podracer.AnakinConfig(**SMALL), devices=2)
