"""Behavior cloning: its gradient, runs on a data set, and agents that go on from its weights."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from demonstrations import Recorded, teacher
from jax.scipy.stats import norm
from on_policy import CONTINUOUS
from walk import BOX, WALK, Walk, begin, built, close, gradient, learn, network, slow

import podracer
from podracer.config.experiment import Experiment
from podracer.drivers.anakin import AnakinConfig
from podracer.errors import ConfigError
from podracer.io.checkpoint import stored_fingerprint
from podracer.networks import MLP, TorsoNetwork
from podracer.ops.distributions import from_bounds, num_outputs, parameters
from podracer_offline import Cloning, Dataset, agreement
from podracer_offline.records import Record

SEVERAL = podracer.auto_reset(Walk(podracer.MultiDiscrete((2, 3))))


def clipped_log_prob(policy, action):
    """A Gaussian's density inside of the bounds, at a bound the probability of what it clips."""
    action, scale = from_bounds(BOX, action), jnp.exp(policy.log_scale)
    inside = norm.logpdf(action, policy.mean, scale)
    low, high = norm.logcdf(-1, policy.mean, scale), norm.logsf(1, policy.mean, scale)
    parts = jnp.where(action <= -1, low, jnp.where(action >= 1, high, inside))
    return jnp.sum(parts, axis=-1)


def with_records(trajectory):
    """The same timesteps as replayed ones, whose records have the actions that were taken."""

    def record(timestep, action):
        observation = Record(timestep.observation, action)
        return dataclasses.replace(timestep, observation=observation)

    steps = trajectory.steps
    final = record(trajectory.final, jax.tree.map(lambda x: x[-1], steps.action))
    steps = dataclasses.replace(steps, timestep=record(steps.timestep, steps.action))
    return dataclasses.replace(trajectory, steps=steps, final=final)


@pytest.mark.parametrize(
    ("env", "memory"),
    [
        (WALK, "gru"),
        (CONTINUOUS, "none"),
        slow(WALK, "none"),
        slow(WALK, "transformer"),
        slow(SEVERAL, "none"),
        slow(CONTINUOUS, "gru"),
    ],
)
def test_the_gradient_is_that_of_the_likelihood_of_each_action(env, memory):
    """Slowly: one timestep after another, the actions that are valid one by one."""
    agent = built(Cloning(network=network(memory), max_gradient_norm=1e9), Recorded(env))
    state, trajectory = begin(agent, env)

    def negative_log_likelihood(params):
        total, carry = 0.0, trajectory.carry
        for t in range(len(trajectory.valid())):
            step = jax.tree.map(lambda x, t=t: x[t], trajectory.steps)
            policy, carry = agent.distribution(params, carry, step.timestep)
            log_prob = policy.log_prob
            if env is CONTINUOUS:
                log_prob = partial(clipped_log_prob, policy)
            total -= jnp.sum(log_prob(step.action) * ~step.timestep.last)
        return total / trajectory.valid().sum()

    assert not trajectory.valid().all()
    if env is CONTINUOUS:
        is_at_bound = jnp.abs(from_bounds(BOX, trajectory.steps.action[0])) == 1
        assert is_at_bound.any()
        assert not is_at_bound.all()
    expected = jax.grad(negative_log_likelihood)(state.shared.params)
    new_state, metrics = learn(agent, state, with_records(trajectory))
    close(gradient(new_state), expected)
    close(metrics["loss"], negative_log_likelihood(state.shared.params))


def divergence(xp, space, teacher, student):
    """KL of teachers from students `[B, n]`, from their parameters, as textbooks have it."""
    if isinstance(space, podracer.Continuous):
        (mean, log_std), (other_mean, other_log_std) = (
            xp.split(x, 2, axis=-1) for x in (teacher, student)
        )
        ratio = (xp.exp(2 * log_std) + (mean - other_mean) ** 2) / (2 * xp.exp(2 * other_log_std))
        return xp.sum(other_log_std - log_std + ratio - 0.5, axis=-1)
    total, start = 0.0, 0
    for size in space.components:
        p, q = (xp.exp(x[..., start : start + size]) for x in (teacher, student))
        p, q = (x / xp.sum(x, axis=-1, keepdims=True) for x in (p, q))
        total, start = total + xp.sum(p * xp.log(p / q), axis=-1), start + size
    return total


@pytest.mark.parametrize(
    ("env", "memory"), [(WALK, "gru"), (CONTINUOUS, "none"), slow(SEVERAL, "none")]
)
def test_with_a_teacher_the_gradient_is_that_of_the_divergence_from_it(env, memory):
    """Slowly: one timestep after another, the loss in NumPy and float64."""
    agent = built(Cloning(network=network(memory), max_gradient_norm=1e9), Recorded(env))
    state, trajectory = begin(agent, env)
    valid, space = trajectory.valid(), env.spec.action
    shape = (*valid.shape, num_outputs(space))
    teacher = jax.random.uniform(jax.random.key(7), shape, minval=-1.5, maxval=1.5)
    steps = trajectory.steps
    record = Record(steps.timestep.observation, steps.action, teacher)
    timestep = dataclasses.replace(steps.timestep, observation=record)
    steps = dataclasses.replace(steps, timestep=timestep)
    trajectory = dataclasses.replace(trajectory, steps=steps)

    def students(params):
        outputs, carry = [], trajectory.carry
        for t in range(len(valid)):
            timestep = jax.tree.map(lambda x, t=t: x[t], trajectory.steps.timestep)
            policy, carry = agent.distribution(params, carry, timestep)
            outputs.append(parameters(policy))
        return jnp.stack(outputs)

    def loss(params):
        divergences = divergence(jnp, space, teacher, students(params))
        return jnp.sum(divergences * valid) / valid.sum()

    new_state, metrics = learn(agent, state, trajectory)
    close(gradient(new_state), jax.grad(loss)(state.shared.params))
    arrays = (np.asarray(x, np.float64) for x in (teacher, students(state.shared.params)))
    expected = divergence(np, space, *arrays)[np.asarray(valid)].mean()
    close(metrics["loss"], expected, rtol=1e-5)
    assert expected > 0.1


# --- runs -----------------------------------------------------------------------------------------

NETWORK = TorsoNetwork(MLP((16,)), memory="gru", memory_size=8)
STEPS = 16 * 8
EXPERIMENT = Experiment(
    recipe="test",
    environment="cartpole",
    agent=Cloning(network=NETWORK),
    driver=AnakinConfig(16, 8, 2, fused=True),
    frames=6 * STEPS,
    evaluations=1,
    evaluation_episodes=8,
    devices=1,
)


@pytest.fixture(scope="module")
def data_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "teacher.npz"
    path.write_bytes(teacher().encode())
    return path


def fingerprint(run):
    return stored_fingerprint(run)[1]


def test_a_run_on_a_data_set_is_resumed_exactly(data_file, tmp_path):
    experiment = dataclasses.replace(EXPERIMENT, environment=f"data:{data_file}")
    whole = podracer.train(experiment, run_dir=tmp_path / "whole")
    assert whole.evaluation is not None
    assert (whole.evaluation.lengths == whole.evaluation.returns).all()  # it was in CartPole
    podracer.train(experiment, run_dir=tmp_path / "cut", frames=4 * STEPS)
    podracer.train(experiment, run_dir=tmp_path / "cut", resume=True)
    assert fingerprint(tmp_path / "cut") == fingerprint(tmp_path / "whole")

    data = Dataset.load(data_file)
    changed = tmp_path / "changed.npz"
    changed.write_bytes(data.encode())
    experiment = dataclasses.replace(EXPERIMENT, environment=f"data:{changed}", evaluations=0)
    podracer.train(experiment, run_dir=tmp_path / "run", frames=2 * STEPS)
    changed.write_bytes(dataclasses.replace(data, action=1 - data.action).encode())
    with pytest.raises(ConfigError, match="another environment, and digest"):
        podracer.train(experiment, run_dir=tmp_path / "run", resume=True)


def test_a_small_student_learns_from_the_distributions_of_its_teacher(tmp_path):
    """The actions of its lessons are random, the teacher's are in the distributions alone."""
    lessons, exam = teacher(), teacher(seed=1)
    logits = 5 * np.eye(2, dtype=np.float32)[lessons.action]
    noise = np.random.default_rng(0).integers(0, 2, len(logits))
    lessons = dataclasses.replace(lessons, action=noise, distribution=logits)
    (tmp_path / "lessons.npz").write_bytes(lessons.encode())
    result = podracer.train(
        "cartpole_cloning",
        agent=Cloning(network=TorsoNetwork(MLP((16,), "tanh"), shared=False), learning_rate=1e-2),
        environment=f"data:{tmp_path / 'lessons.npz'}",
        frames=256_000,
        evaluations=0,
        run_dir=tmp_path / "student",
    )
    assert result.metrics["accuracy"] > 0.95
    assert agreement(podracer.load_policy(tmp_path / "student"), exam) > 0.95


@pytest.mark.slow
def test_it_learns_to_act_as_its_teacher(data_file):
    result = podracer.train("cartpole_cloning", environment=f"data:{data_file}", frames=256_000)
    assert result.evaluation.returns.mean() > 400
    assert result.metrics["accuracy"] > 0.95
