"""Steps that only reset an environment count as nothing: what agents learn, report and count is the
same with and without them.

A device environment restarts in the step of a terminal. One of the host shows the terminal, and
then takes a step that only resets it; a lost episode leaves such steps in both.
"""

import dataclasses
import functools
import math
from functools import partial, partialmethod

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from agents import AGENTS as SMALL_AGENTS
from agents import blueprint
from off_policy import OFF_POLICY as REPLAY_AGENTS
from walk import BOX, WALK, Walk, built, methods_of, network

import podracer
from podracer.agents.a2c import A2C
from podracer.agents.common.recurrent import Recurrence
from podracer.agents.ddpg import DDPG
from podracer.agents.impala import Impala
from podracer.agents.ppo import PPO
from podracer.agents.pqn import PQN
from podracer.agents.q_lambda import QLambda
from podracer.config.experiment import Experiment
from podracer.devices.reductions import global_grad
from podracer.drivers.anakin import AnakinConfig
from podracer.drivers.sebulba import SebulbaConfig
from podracer.environment import auto_reset
from podracer.envs.host.device import DeviceEnvironments
from podracer.means import Mean
from podracer.replay import Buffer, Replay, Sample
from podracer.schedules import Linear
from podracer.types import Step, TimeStep, Trajectory

COLUMNS = 8
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
    "frodo": SMALL_AGENTS["frodo"],
    "lpg_student": SMALL_AGENTS["lpg_student"],
}
# Their losses divide by all steps on purpose, see the docstrings.
OF_ALL_STEPS = ("stacx", "frodo", "lpg_student")


def timestep(rng, reward, discount, first, last):
    shape = (COLUMNS,)
    return TimeStep(
        rng.normal(size=(COLUMNS, 2)).astype(np.float32),
        np.where(first, 0.0, reward * np.ones(shape)).astype(np.float32),
        np.full(shape, discount, np.float32),
        np.full(shape, first),
        np.full(shape, last),
    )


def twins(length, tail=0, shows_terminal=True):
    """The timesteps of one stream: as a device shows it, as a host does, and with lost rows.

    There are four episodes, the third of which ends by a time-out, and the first `tail` steps of a
    fifth. Values of steps that do not count are different in each, and so are the observations of
    terminals, unless `shows_terminal` is False.
    """
    rng, other = np.random.default_rng(length), np.random.default_rng(100 + length)
    first = timestep(rng, 0.0, 1.0, True, False)
    device, host, lost = streams = [first], [first], [first]

    def in_all(*steps):
        for stream in streams:
            stream.extend(steps)

    for episode in range(5):
        for time in range(1, (tail if episode == 4 else length) + 1):
            ends = time == length and episode < 4
            step = timestep(rng, rng.normal(size=COLUMNS), 1.0 - ends, ends, False)
            step = dataclasses.replace(step, reward=rng.normal(size=COLUMNS).astype(np.float32))
            if not ends:
                in_all(step)
                continue
            if episode == 2:
                timeout = timestep(rng, 0.0, 1.0, False, True)
                timeout = dataclasses.replace(timeout, reward=step.reward)
                in_all(timeout, timestep(rng, 0.0, 1.0, True, False))
                continue
            device.append(step)
            terminal = timestep(other, 0.0, 0.0, False, True)
            terminal = dataclasses.replace(terminal, reward=step.reward)
            if not shows_terminal:
                terminal = dataclasses.replace(terminal, observation=step.observation)
            restart = dataclasses.replace(
                step, reward=np.zeros(COLUMNS, np.float32), discount=np.ones(COLUMNS, np.float32)
            )
            cut = timestep(other, 0.0, 1.0, True, True)
            host += [terminal, restart]
            lost += [terminal, cut, cut, restart]
    return streams


def trajectory_of(agent, params, timesteps):
    """The agent acts by one key for each transition, whatever lies between them."""
    carry, steps, number = agent.carry(COLUMNS), [], 0
    start, act = carry, jax.jit(agent.act, static_argnums=4)
    timesteps = jax.tree.map(jnp.asarray, timesteps)
    for step in timesteps[:-1]:
        seed = number if not step.last[0] else 10_000 + len(steps)
        number += not step.last[0]
        keys = jax.random.split(jax.random.key(seed), COLUMNS)
        action, extras, carry = act(params, carry, step, keys, True)
        steps.append(Step(step, action, extras))
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *steps)
    return Trajectory(stacked, timesteps[-1], start, carry)


def values_of(metrics):
    return {name: float(metric) for name, metric in metrics.items()}


@functools.cache
def learned(name, length, kind):
    agent = blueprint(ON_POLICY[name], WALK.spec).build()
    timesteps = twins(length)[kind]
    state = agent.init(jax.random.key(0), COLUMNS)
    trajectory = trajectory_of(agent, agent.actor_params(state), timesteps)
    state, metrics = jax.jit(agent.learn, static_argnums=3)(
        state, trajectory, jax.random.key(2), None
    )
    return state, values_of(metrics)


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
    (state, expected), *others = (learned(name, length, kind) for kind in range(3))
    for other, metrics in others:
        if name in OF_ALL_STEPS:
            names = ("gradient_norm", "outer", "meta_", "inconsistency")
            metrics = {x: v for x, v in metrics.items() if not any(name in x for name in names)}
        assert metrics == pytest.approx({x: expected[x] for x in metrics}, rel=2e-4, abs=1e-5)
        assert int(other.shared.frames) == int(state.shared.frames) == 4 * length * COLUMNS
        if name in OF_ALL_STEPS:
            continue
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, 2e-3, 2e-5),
            (other.shared, other.local),
            (state.shared, state.local),
        )


# --- agents with a replay ------------------------------------------------------------------------

TAIL = 6  # common steps at the end, so that the last one that is learned is the same
RECURRENCE = Recurrence(burn_in_length=1, unroll_length=1, head_size=6)
OFF_POLICY = {
    **{name: REPLAY_AGENTS[name] for name in ("dqn", "c51", "td3", "sac", "qt_opt", "r2d2")},
    "ddpg-gru": DDPG(network=network("gru"), random_frames=0, n_step=2, recurrence=RECURRENCE),
    "disco": SMALL_AGENTS["disco"],
}
CONTINUOUS = ("td3", "sac", "qt_opt", "ddpg-gru")


def with_replay(agent, name, num_steps):
    """Return a blueprint with a replay of these timesteps, one sequence if it takes any."""
    replay = Replay(COLUMNS * 512, batch_size=COLUMNS, updates_per_rollout=2, warmup=0)
    spec = auto_reset(Walk(BOX)).spec if name in CONTINUOUS else WALK.spec
    settings = {"replay": replay}
    if name == "r2d2":
        settings |= {"burn_in_length": 1, "unroll_length": num_steps - 1 - agent.n_step}
    elif name == "ddpg-gru":
        unroll_length = num_steps - 1 - agent.n_step
        settings["recurrence"] = dataclasses.replace(RECURRENCE, unroll_length=unroll_length)
    return blueprint(dataclasses.replace(agent, **settings), spec, num_steps)


def every_sample(num_steps, scale, buffer, state, *_):
    """Return all samples of a replay, those that begin with a transition first."""
    num_starts = (num_steps - buffer.length) // buffer.stride + 1
    starts, rows = jnp.indices((num_starts, COLUMNS)).reshape(2, -1)
    trajectory = buffer.trajectory_at(state, rows, starts)
    order = jnp.argsort(~trajectory.valid()[0], stable=True)
    trajectory = Trajectory(
        jax.tree.map(lambda x: x[:, order], trajectory.steps),
        *jax.tree.map(lambda x: x[order], (trajectory.final, trajectory.carry)),
        (),
    )
    weights = scale / (1.0 + jnp.arange(order.size))
    return Sample(trajectory, weights, rows[order], starts[order])


@functools.cache
def learned_from_replay(name, length, kind):
    # A discovered rule reads what a transition leads to, at terminals as well, as published.
    timesteps = twins(length, TAIL, shows_terminal=name != "disco")[kind]
    num_steps = len(timesteps) - 1
    plan = with_replay(OFF_POLICY[name], name, num_steps)
    agent = plan.build()
    state = agent.init(jax.random.key(0), COLUMNS)
    trajectory = trajectory_of(agent, agent.actor_params(state), timesteps)
    # A loss of R2D2 is a sum over a sequence, whose length is another for each twin.
    scale = 1.0 / plan.settings.unroll_length if name == "r2d2" else 1.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Buffer, "sample", partialmethod(partial(every_sample, num_steps, scale)))
        state, metrics = jax.jit(agent.learn, static_argnums=3)(
            state, trajectory, jax.random.key(2), None
        )
    return state.shared, values_of(metrics)


@pytest.mark.parametrize(
    ("name", "length"),
    [
        pytest.param(name, length, marks=() if (name, length) == ("td3", 1) else pytest.mark.slow)
        for name in OFF_POLICY
        for length in (1, 2, 5, 20)
    ],
)
def test_a_replay_with_steps_that_only_reset_teaches_the_same(name, length):
    (state, expected), *others = (learned_from_replay(name, length, kind) for kind in range(3))
    for other, metrics in others:
        assert metrics == pytest.approx(expected, rel=2e-4, abs=1e-5)
        assert int(other.frames) == int(state.frames) == (4 * length + TAIL) * COLUMNS
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 2e-3, 2e-5), other, state)


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
    results = [
        global_grad(methods_of(agent).loss, params, target, x, jax.random.key(1), axis=None)
        for x in (sample, few)
    ]
    (grads, (metrics, _)), (expected_grads, (expected, _)) = results
    assert values_of(metrics) == pytest.approx(values_of(expected), rel=1e-5)
    assert all(isinstance(metric, Mean) for metric in metrics.values())
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-6), grads, expected_grads)
    assert optax.tree.norm(grads) > 1e-3


# --- runs ----------------------------------------------------------------------------------------


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


@pytest.mark.slow
def test_a_run_resumed_for_a_few_more_frames_makes_these(tmp_path):
    experiment = Experiment(
        environment=WALK, agent=A2C(network=network()), driver=AnakinConfig(8, 8, 10),
        frames=640, evaluations=0, devices=1,
    )  # fmt: skip
    podracer.train(experiment, run_dir=tmp_path / "run")
    more = dataclasses.replace(experiment, frames=700)
    resumed = podracer.train(more, run_dir=tmp_path / "run", resume=True)
    assert 700 <= resumed.metrics["frames"] < 764
    once = podracer.train(more, run_dir=tmp_path / "once")
    assert once.metrics["frames"] == resumed.metrics["frames"]
    jax.tree.map(np.testing.assert_array_equal, resumed.state, once.state)
