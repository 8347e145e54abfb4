"""Schedules and optimizers: their values, flags, files, ranges and hyperparameters."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from child import records

import podracer
from podracer import recipes
from podracer.agents.a2c import A2C
from podracer.agents.common.optimizers import Optimizer, ParamsState, take_step
from podracer.agents.dqn import DQN
from podracer.agents.impala import Impala
from podracer.cli.recipe_flags import parse_experiment
from podracer.cli.values import format_value, kind_of
from podracer.config.experiment import Experiment
from podracer.config.serialization import from_json, to_json
from podracer.drivers.anakin import AnakinConfig
from podracer.errors import ConfigError
from podracer.fields import struct
from podracer.replay import Replay
from podracer.run.setup import build
from podracer.schedules import (
    MAX_FRAMES,
    Linear,
    Schedule,
    add_frames,
    current_values,
    over_run,
    value_at,
)

DECAY = Linear(6e-4, 0.0, frames=50e6)


def test_a_number_is_its_own_value():
    assert value_at(0.25, jnp.uint32(7)) == 0.25
    traced = jnp.float32(0.5)  # of a population
    assert value_at(traced, jnp.uint32(7)) is traced


@pytest.mark.parametrize(
    ("frames", "value"), [(0, 2.0), (25, 1.75), (100, 1.0), (101, 1.0), (MAX_FRAMES, 1.0)]
)
def test_a_linear_schedule_ends_after_its_frames(frames, value):
    assert jax.jit(value_at)(Linear(2.0, 1.0, 100.0), jnp.uint32(frames)) == value


def test_a_schedule_without_frames_lasts_as_long_as_the_run():
    agent = DQN(epsilon=Linear(1.0, 0.0), replay=Replay(8, importance_exponent=Linear(0.4, 1.0)))
    assert over_run(DQN(epsilon=0.1), 100) == DQN(epsilon=0.1)
    whole = over_run(agent, 1000)
    assert whole.epsilon == Linear(1.0, 0.0, 1000.0)
    assert whole.replay.importance_exponent == Linear(0.4, 1.0, 1000.0)
    assert over_run(whole, 10) == whole
    expected = {"epsilon": 0.75, "replay.importance_exponent": 0.55}
    assert current_values(whole, 250) == pytest.approx(expected)
    assert current_values(whole, 5000) == {"epsilon": 0.0, "replay.importance_exponent": 1.0}
    for agent, frames in ((agent, 5e9), (DQN(epsilon=Linear(1.0, 0.0, 5e9)), 100)):  # noqa: B020
        with pytest.raises(ConfigError, match="would change over 5,000,000,000 frames"):
            over_run(agent, frames)
    with pytest.raises(ConfigError, match="needs a run"):
        value_at(Linear(1.0, 0.0), jnp.uint32(0))


def test_a_run_records_its_schedules(tmp_path):
    agent, driver = A2C(learning_rate=Linear(8e-4, 0.0)), AnakinConfig(16, 8, 1)
    experiment = Experiment(
        environment="catch", agent=agent, driver=driver, frames=512, evaluations=0
    )
    podracer.train(experiment, run_dir=tmp_path / "run")
    rates = [record["learning_rate"] for record in records(tmp_path / "run")]
    assert rates == pytest.approx([8e-4, 6e-4, 4e-4, 2e-4])
    longer = Experiment(
        environment="catch", agent=agent, driver=AnakinConfig(16, 8, 2), frames=300, evaluations=0
    )
    assert build(longer)[0].settings.learning_rate.frames == 384  # in whole updates


def test_the_counter_of_frames_does_not_wrap():
    frames = jnp.uint32(MAX_FRAMES - 10)
    ends = [int(add_frames(frames, jnp.uint32(count))) for count in (10, 11)]
    assert ends == [MAX_FRAMES, MAX_FRAMES]
    assert int(add_frames(jnp.uint32(5), jnp.uint32(3))) == 8


def test_texts_of_schedules():
    def read(text):
        return kind_of(Schedule).read([text], "--rate")

    assert read("6e-4:0:50e6") == DECAY
    assert read(format_value(DECAY)) == DECAY
    assert read("1e-3") == 1e-3
    assert read("1e-3:0") == Linear(1e-3, 0.0)
    assert read(format_value(Linear(1e-3, 0.0))) == Linear(1e-3, 0.0)
    for text in ("1:2:3:4", "fast", "1e-3:0:", ""):
        with pytest.raises(ConfigError, match=r"--rate: .* START:END\[:FRAMES\]"):
            read(text)


# --- flags, files, ranges, hyperparameters -------------------------------------------------------


@struct
class Options:
    """None."""


def parsed(*flags: str) -> Experiment:
    _, experiment = parse_experiment("train", flags, recipes.find("catch_a2c"), Options())
    return experiment


def test_flags_of_schedules_and_optimizers():
    agent = parsed("--learning-rate", "6e-4:0:50e6", "--optimizer.name", "rmsprop").agent
    assert agent.learning_rate == DECAY
    assert agent.optimizer == Optimizer("rmsprop")
    assert parsed("--learning-rate", "0.5", "--optimizer.epsilon", "0.1").agent == (
        dataclasses.replace(
            recipes.find("catch_a2c").agent, learning_rate=0.5, optimizer=Optimizer(epsilon=0.1)
        )
    )


def test_schedules_in_files():
    agent = A2C(learning_rate=DECAY, optimizer=Optimizer("rmsprop"))
    assert from_json(to_json(agent)) == agent
    data = to_json(agent)
    assert data["learning_rate"] == {"kind": "Linear", "start": 6e-4, "end": 0.0, "frames": 50e6}
    with pytest.raises(ConfigError, match=r"A2C\.learning_rate cannot be 'fast'"):
        from_json({**data, "learning_rate": "fast"})


# --- optimizers ----------------------------------------------------------------------------------


def steps(optimizer: optax.GradientTransformation, rate: float, count: int = 3) -> np.ndarray:
    params = jnp.asarray([1.0, -2.0, 0.5])
    state = ParamsState(params, optimizer.init(params))
    for i in range(count):
        state = take_step(optimizer, rate, state, jnp.sin(state.params * (i + 1)))
    return np.asarray(state.params)


@pytest.mark.parametrize(("name", "method"), [("adam", optax.adam), ("radam", optax.radam)])
def test_a_step_is_that_of_optax(name, method):
    """To the bit: a constant learning rate computes what `optax` does, which scales updates."""
    reference = optax.chain(optax.clip_by_global_norm(0.5), method(1e-2, eps=1e-5))
    params = jnp.asarray([1.0, -2.0, 0.5])
    state = reference.init(params)
    for i in range(8):  # RAdam rectifies from the sixth step on
        updates, state = reference.update(jnp.sin(params * (i + 1)), state)
        params = optax.apply_updates(params, updates)
    assert np.array_equal(steps(Optimizer(name).build(0.5), 1e-2, 8), params)


def test_the_defaults_of_impala_are_those_of_its_paper():
    """On a mean loss: the same steps as norm 40 and epsilon 0.01 on the sum over 640 items."""
    agent = Impala()
    of_mean = agent.optimizer.build(agent.max_gradient_norm)
    of_sum = Optimizer("rmsprop", epsilon=0.01, rmsprop_decay=0.99).build(40.0)
    scaled = optax.GradientTransformation(
        of_sum.init, lambda grads, *state: of_sum.update(640 * grads, *state)
    )
    np.testing.assert_allclose(steps(of_mean, 6e-4), steps(scaled, 6e-4), rtol=1e-6)


def test_a_step_is_that_of_rmsprop():
    """As PyTorch has it: epsilon stands outside of the root."""
    params, mean_square = np.asarray([1.0, -2.0, 0.5]), np.zeros(3)
    for i in range(3):
        grads = np.sin(params * (i + 1))
        mean_square = 0.9 * mean_square + 0.1 * grads**2
        params = params - 1e-2 * grads / (np.sqrt(mean_square) + 0.25)
    optimizer = Optimizer("rmsprop", epsilon=0.25, rmsprop_decay=0.9).build()
    np.testing.assert_allclose(steps(optimizer, 1e-2), params, rtol=1e-6)
