"""Steps that only reset an environment count as nothing, for each agent and for whole runs."""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from agents import AGENTS as SMALL_AGENTS
from agents import blueprint
from off_policy import BOXED
from off_policy import OFF_POLICY as REPLAY_AGENTS
from walk import WALK, built, methods_of, network, values_of

import podracer
from podracer.agents.a2c import A2C
from podracer.agents.common.recurrent import Recurrence
from podracer.agents.ddpg import DDPG
from podracer.agents.impala import Impala
from podracer.agents.ppo import PPO
from podracer.agents.pqn import PQN
from podracer.agents.q_lambda import QLambda
from podracer.config.experiment import Experiment
from podracer.devices.reductions import MaskedMean, global_grad
from podracer.drivers.anakin import AnakinConfig
from podracer.drivers.sebulba import SebulbaConfig
from podracer.envs.host.device import DeviceEnvironments
from podracer.replay import Sample
from podracer.schedules import Linear
from podracer.types import Step, TimeStep, Trajectory
from podracer_testing.reset_steps import COLUMNS, check_reset_steps, check_reset_steps_of_replay

ONE_BATCH = {"num_minibatches": 1, "num_epochs": 3, "network": network(shared=False)}
ON_POLICY = {
    "a2c": A2C(network=network()),
    "a2c-gru": A2C(network=network("gru")),
    "q_lambda": QLambda(network=network()),
    "impala": Impala(network=network()),
    "ppo": PPO(
        **ONE_BATCH,
        learning_rate=0.05,
        normalize_observations=True,
        normalize_rewards=True,
        target_kl=0.02,
    ),
    "pqn": PQN(num_minibatches=1, network=network(shared=False)),
    "stacx": dataclasses.replace(SMALL_AGENTS["stacx"], network=network()),
    "lpg_student": SMALL_AGENTS["lpg_student"],
}
# Their losses divide by all steps on purpose, see the docstrings.
OF_ALL_STEPS = ("gradient_norm", "outer", "meta_", "inconsistency")


CASES = [
    pytest.param(
        name,
        length,
        marks=() if (name, length) in {("ppo", 1), ("impala", 2), ("pqn", 5)} else pytest.mark.slow,
    )
    for name in ON_POLICY
    for length in (1, 2, 5, 20)
]


@pytest.mark.parametrize(("name", "length"), CASES)
def test_steps_that_only_reset_change_no_metric_no_moment_and_no_update(name, length):
    check_reset_steps(
        ON_POLICY[name],
        length,
        env=WALK,
        data=blueprint(ON_POLICY[name], WALK.spec).context.data,
        of_all_steps=OF_ALL_STEPS if name in ("stacx", "lpg_student") else (),
    )


# --- agents with a replay ------------------------------------------------------------------------

RECURRENCE = Recurrence(burn_in_length=1, unroll_length=1, head_size=6)
OFF_POLICY = {
    **{name: REPLAY_AGENTS[name] for name in ("dqn", "c51", "td3", "sac", "r2d2")},
    "ddpg-gru": DDPG(network=network("gru"), random_frames=0, n_step=2, recurrence=RECURRENCE),
    "disco": SMALL_AGENTS["disco"],
}
CONTINUOUS = ("td3", "sac", "ddpg-gru")


def fields_for(name, num_steps):
    """Return fields of settings by which one sequence covers a rollout, if the agent takes any."""
    n_step = OFF_POLICY[name].n_step if name in ("r2d2", "ddpg-gru") else 0
    if name == "r2d2":
        return {"burn_in_length": 1, "unroll_length": num_steps - 1 - n_step}
    if name == "ddpg-gru":
        unroll_length = num_steps - 1 - n_step
        return {"recurrence": dataclasses.replace(RECURRENCE, unroll_length=unroll_length)}
    return {}


@pytest.mark.parametrize(
    ("name", "length"),
    [
        pytest.param(name, length, marks=() if (name, length) == ("td3", 1) else pytest.mark.slow)
        for name in OFF_POLICY
        for length in (1, 2, 5, 20)
    ],
)
def test_a_replay_with_steps_that_only_reset_teaches_the_same(name, length):
    settings, env = OFF_POLICY[name], BOXED if name in CONTINUOUS else WALK
    check_reset_steps_of_replay(
        settings,
        length,
        env=env,
        data=blueprint(settings, env.spec).context.data,
        fields=partial(fields_for, name),
        # A loss of R2D2 is a sum over a sequence, whose length is another for each twin.
        scale=lambda full: 1.0 / full.unroll_length if name == "r2d2" else 1.0,
        # A discovered rule reads what a transition leads to, at terminals as well, as published.
        shows_terminal=name != "disco",
    )


def sample_of(name, length, num_masked):
    """Sequences, the last of which begin where an episode was cut."""
    num = 12
    keys = jax.random.split(jax.random.key(4), 4)
    shape = (length, num)
    last = jnp.zeros(shape, bool).at[0, num - num_masked :].set(True) if num_masked else None
    first = jnp.zeros(shape, bool)
    if last is not None:
        first = first.at[1, num - num_masked :].set(True)
    last = jnp.zeros(shape, bool) if last is None else last
    timesteps = TimeStep(
        jax.random.normal(keys[0], (*shape, 2)),
        jax.random.normal(keys[1], shape),
        jnp.ones(shape).at[-1, ::3].set(0.0),
        first,
        last,
    )
    actions = jax.random.randint(keys[2], shape, 0, 3)
    extras = ()
    if name == "muzero":
        policy = jax.nn.softmax(jax.random.normal(keys[3], (*shape, 3)))
        extras = {"policy": policy, "value": jax.random.normal(keys[3], shape)}
    steps = Step(
        jax.tree.map(lambda x: x[:-1], timesteps),
        actions[:-1],
        jax.tree.map(lambda x: x[:-1], extras),
    )
    final = jax.tree.map(lambda x: x[-1], timesteps)
    return Sample(Trajectory(steps, final, (), ()), jnp.linspace(0.5, 1.0, num), None, None)


@pytest.mark.parametrize(
    "name", ["dqn", *(pytest.param(x, marks=pytest.mark.slow) for x in ("c51", "qr", "muzero"))]
)
def test_samples_that_begin_at_an_end_count_in_no_loss_and_no_metric(name):
    agent = built(REPLAY_AGENTS[name])
    params = agent.init(jax.random.key(0), COLUMNS).shared.params
    target = jax.tree.map(lambda x: 0.9 * x, params)
    sample = sample_of(name, methods_of(agent).buffer.length, num_masked=5)
    kept = jax.tree.map(
        lambda x: x[:, :7] if x.ndim > 1 else x[:7], (sample.trajectory.steps, sample.weights)
    )
    final = jax.tree.map(lambda x: x[:7], sample.trajectory.final)
    few = Sample(Trajectory(kept[0], final, (), ()), kept[1], None, None)
    gradient = jax.jit(partial(global_grad, methods_of(agent).loss, axis=None))
    results = [gradient(params, target, x, jax.random.key(1)) for x in (sample, few)]
    (grads, (metrics, _)), (expected_grads, (expected, _)) = results
    np.testing.assert_allclose(*[[*values_of(x).values()] for x in (metrics, expected)], 1e-5)
    assert all(isinstance(metric, MaskedMean) for metric in metrics.values())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-6), grads, expected_grads)
    assert optax.tree.norm(grads) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("frames", [500, 1])
def test_a_run_ends_with_the_update_in_which_it_reaches_its_frames(tmp_path, frames):
    """Walks are cut by a time-out after four steps, so some steps only reset."""
    results = {}
    for driver in (
        AnakinConfig(8, 8, updates_per_chunk=4),
        AnakinConfig(8, 8, updates_per_chunk=7),
        SebulbaConfig(8, 8, updates_per_chunk=4, policy_lag=0, threads_per_actor=1),
    ):
        directory = tmp_path / f"{type(driver).__name__}{driver.updates_per_chunk}"
        experiment = Experiment(
            environment=WALK if isinstance(driver, AnakinConfig) else DeviceEnvironments(WALK),
            agent=A2C(network=network(), learning_rate=Linear(1e-3, 0.0)),
            driver=driver,
            frames=frames,
            evaluations=2,
            evaluation_episodes=4,
            devices=1,
        )
        result = podracer.train(experiment, run_dir=directory)
        assert result.reason == "frames"
        assert result.evaluation is not None
        results[directory.name] = result
    first, *others = results.values()
    made, updates = first.metrics["frames"], first.metrics["updates"]
    assert frames <= made < frames + 64
    assert made < updates * 64 or frames == 1
    assert updates >= math.ceil(frames / 64)
    assert int(first.state.shared.frames) == made
    for other in others:
        assert (other.metrics["frames"], other.metrics["updates"]) == (made, updates)
        jax.tree.map(partial(np.testing.assert_allclose, atol=1e-6), other.state, first.state)
