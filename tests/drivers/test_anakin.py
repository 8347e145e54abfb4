"""The Anakin driver: one program, any number of devices, nothing non-finite ever applied."""

import contextlib
import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from agents import AGENTS, SMALL, environment_for
from programs import unordered
from runs import anakin_setup, sebulba_setup, train_anakin
from variants import variants
from walk import Walk

from podracer.agent import DEFAULT_CONTEXT, Fused
from podracer.agents.a2c import A2C
from podracer.devices import memory
from podracer.drivers.progress import Orders
from podracer.environment import auto_reset
from podracer.envs import make
from podracer.envs.cartpole import CartPole
from podracer.errors import ConfigError, NonFiniteError
from podracer.fields import struct
from podracer.io.checkpoint import fingerprint
from podracer.rollout import Purpose, environment_keys, purpose_key


@variants("devices", [8], [1, 2, 4])
def test_replicas_are_equal_to_the_bit_after_50_updates(devices):
    state, _ = train_anakin(*anakin_setup(AGENTS["a2c"], devices=devices), 50)
    for leaf in jax.tree.leaves(state.learner.shared):
        copies = [np.asarray(shard.data) for shard in leaf.addressable_shards]
        assert len(copies) == devices
        assert all(np.array_equal(copies[0], copy) for copy in copies[1:])


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_the_first_rollout_does_not_depend_on_the_number_of_devices(devices):
    """One update moves every environment and the episode statistics exactly alike."""
    one, _ = train_anakin(*anakin_setup(AGENTS["a2c"], updates_per_chunk=1), 1)
    many, _ = train_anakin(*anakin_setup(AGENTS["a2c"], devices=devices, updates_per_chunk=1), 1)
    for a, b in zip(jax.tree.leaves(one.actor), jax.tree.leaves(many.actor), strict=True):
        assert np.array_equal(a, b)
    for a, b in zip(jax.tree.leaves(one.learner), jax.tree.leaves(many.learner), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@variants("name", ["a2c"], AGENTS)
def test_going_on_from_a_state_equals_never_having_stopped(name):
    whole, _ = train_anakin(*anakin_setup(AGENTS[name], environment_for(name)), 20)
    driver, state = anakin_setup(AGENTS[name], environment_for(name))
    half, _ = train_anakin(driver, state, 10)
    rest, _ = train_anakin(driver, half, 20)
    assert fingerprint(rest) == fingerprint(whole)


def test_metrics_come_for_every_chunk_and_the_state_at_boundaries_only():
    driver, state = anakin_setup(AGENTS["a2c"])
    progresses = driver.run(state, Orders(30, {15}.__contains__))
    seen = [(p.updates, p.state is not None) for p in progresses]
    expected = [5, 10, 15, 20, 25, 30]
    assert seen == [(updates, updates in (15, 30)) for updates in expected]


def test_a_request_makes_a_boundary():
    driver, state = anakin_setup(AGENTS["a2c"])
    progresses = driver.run(state, Orders(500, request=lambda: 2))
    progress = next(progresses)
    assert progress.updates == 5
    assert progress.request == 2
    assert int(progress.state.update) == 5


def test_a_request_of_several_processes_counts_where_each_chunk_is_a_boundary(monkeypatch):
    driver, state = anakin_setup(AGENTS["a2c"])
    monkeypatch.setattr("jax.process_count", lambda: 2)
    orders = Orders(20, is_boundary=lambda _: True, request=lambda: 1)
    progresses = driver.run(state, orders)
    assert [progress.request for progress in progresses] == [1, 1, 1, 1]


def test_counts_frames_and_episodes_exactly():
    """Catch episodes last nine steps and never time out."""
    driver, state = anakin_setup(AGENTS["a2c"], num_envs=18, rollout_length=9, updates_per_chunk=4)
    _, (progress,) = train_anakin(driver, state, 4)
    assert progress.frames == 18 * 9 * 4
    assert progress.metrics["episodes"] == 18 * 4
    assert progress.metrics["episode_length"] == 9.0


def test_resets_after_a_time_out_are_no_frames():
    """The probe is cut every five steps and then spends one on its reset."""
    driver, state = anakin_setup(
        AGENTS["a2c"], "probe:timeout", rollout_length=6, updates_per_chunk=3
    )
    _, (progress,) = train_anakin(driver, state, 3)
    assert progress.frames == 16 * 5 * 3
    assert progress.metrics["episode_length"] == 5.0
    assert progress.metrics["episode_return"] == 5.0


def compiled_text(devices, agent="ppo"):
    driver, _ = anakin_setup(AGENTS[agent], environment_for(agent), devices=devices)
    return driver.compile_in_thread().result().func.as_text()


def test_the_program_has_no_callback_and_no_collective_but_reductions():
    text = compiled_text(devices=2)
    assert "all-reduce" in text
    for word in ("all-gather", "all-to-all", "collective-permute", "reduce-scatter"):
        assert word not in text
    assert not re.search(r"custom-call.*callback|infeed|outfeed", text)


@variants("name", ["ppo"], AGENTS)
def test_no_reduction_can_overtake_another(name):
    """XLA gives all of a program's reductions one channel; on a CPU, two that do not depend on
    each other may meet, mix their numbers and overwrite memory."""
    assert not unordered(compiled_text(devices=2, agent=name))


def test_one_device_needs_no_collective():
    assert "all-reduce" not in compiled_text(devices=1, agent="a2c")


def test_a_program_that_would_not_fit_does_not_run(monkeypatch):
    """What it needs beside its state is known once it is compiled."""
    driver, state = anakin_setup(AGENTS["a2c"])
    monkeypatch.setattr(memory, "free_bytes", lambda mesh: 1000)
    with pytest.raises(ConfigError, match=r"beside its state, but 1000 B are free"):
        train_anakin(driver, state, 5)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_the_state_is_donated():
    driver, state = anakin_setup(AGENTS["a2c"])
    train_anakin(driver, state, 5)
    donated = [leaf for leaf in jax.tree.leaves(state) if leaf.size > 1]
    assert all(leaf.is_deleted() for leaf in donated)


class WalkWithNothing(Walk):
    """A walk whose state has an empty array, as a world without cells has."""

    def reset(self, key):
        state, timestep = super().reset(key)
        return (state, jnp.zeros((0,), jnp.int32)), timestep

    def step(self, key, state, action):
        state, nothing = state
        state, timestep = super().step(key, state, action)
        return (state, nothing), timestep


def test_an_empty_array_of_a_state_goes_from_chunk_to_chunk_on_several_devices():
    setup = anakin_setup(AGENTS["a2c"], auto_reset(WalkWithNothing()), devices=2)
    state, _ = train_anakin(*setup, num_updates=15)
    assert int(state.update) == 15


def test_nothing_is_compiled_after_the_first_chunk():
    driver, state = anakin_setup(AGENTS["a2c"])
    progresses = driver.run(state, Orders(100))
    next(progresses)
    compiles = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiles.append(name) if "compile" in name else None
    )
    try:
        assert len(list(progresses)) == 19
    finally:
        jax.monitoring.clear_event_listeners()
    assert compiles == []


@pytest.mark.parametrize("make_setup", [anakin_setup, sebulba_setup])
def test_a_second_seed_and_other_numbers_compile_nothing(make_setup):
    agent = dataclasses.replace(AGENTS["impala"], learning_rate=1e-3)
    driver, state = make_setup(agent)
    faster = dataclasses.replace(driver.blueprint.settings, learning_rate=2e-3)
    changed = dataclasses.replace(driver.blueprint, settings=faster)
    evaluate = driver.evaluator(2)

    def train(state, change=None):
        orders = Orders(10, change=lambda: change)
        with contextlib.closing(driver.run(state, orders)) as progresses:
            last = [*progresses][-1].state
        evaluate(last)
        return fingerprint(last.learner.shared)

    first = train(state)
    compiles = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **about: "backend_compile" in name and compiles.append(about)
    )
    try:
        states = [driver.init(jax.random.key(seed)) for seed in (7, 8, 7)]
        again, second, other = train(states[0]), train(states[1]), train(states[2], changed)
    finally:
        jax.monitoring.clear_event_listeners()
    assert first == again
    assert len({first, second, other}) == 3
    assert compiles == []


def test_no_key_is_used_twice():
    """Over environments, steps and purposes; shards own slices of the environments."""
    run_key = jax.random.key(3)
    steps = jnp.arange(50, dtype=jnp.uint32)
    keys = [
        jax.random.key_data(
            environment_keys(
                purpose_key(run_key, purpose), jnp.arange(256, dtype=jnp.uint32), steps
            )
        ).reshape(-1, 2)
        for purpose in (Purpose.ACT, Purpose.STEP)
    ]
    everything = np.concatenate(keys)
    assert len(np.unique(everything, axis=0)) == len(everything) == 2 * 256 * 50


# --- faults --------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Poisoned:
    """Catch whose reward or observation turns bad in one environment's episode."""

    inner: object
    where: str
    value: float

    @property
    def spec(self):
        return self.inner.spec

    def reset(self, key):
        return self.inner.reset(key)

    def step(self, key, state, action):
        state, timestep = self.inner.step(key, state, action)
        bad = jax.random.bits(key) < 2**32 // 500  # about once in 500 steps
        leaf = getattr(timestep, self.where)
        poisoned = jnp.where(bad, jnp.full_like(leaf, self.value), leaf)
        return state, dataclasses.replace(timestep, **{self.where: poisoned})


@struct
class BadGradient:
    """A2C whose gradients turn bad in the eighth update."""

    def build(self, spec, context=DEFAULT_CONTEXT):
        good = A2C(network=SMALL).build(spec, context)

        def apply_gradients(state, grads, num_frames):
            count = state.shared.optimizer_state[1].count
            grads = jax.tree.map(lambda g: jnp.where(count == 7, jnp.inf, g), grads)
            return good.learn.apply_gradients(state, grads, num_frames)

        return dataclasses.replace(good, learn=Fused(good.learn.loss, apply_gradients))


def collect(agent, env, devices, num_updates=100, **config):
    driver, state = anakin_setup(agent, env, devices, **config)
    seen = []

    def consume():
        orders = Orders(num_updates, is_boundary=lambda _: True)
        for progress in driver.run(state, orders):
            assert all(
                np.isfinite(x).all()
                for x in jax.tree.leaves(progress.state and progress.state.learner.shared)
                if jnp.issubdtype(x.dtype, jnp.floating)
            )
            seen.append(progress.updates)

    with pytest.raises(NonFiniteError) as raised:
        consume()
    return str(raised.value), seen


@pytest.mark.figure(9)
@variants("devices", [4], [1])
@variants(
    ("where", "value"),
    [("reward", np.nan), ("observation", -np.inf)],
    itertools.product(("reward", "observation"), (np.nan, np.inf, -np.inf)),
)
def test_bad_data_stops_the_run_before_it_is_applied(where, value, devices):
    message, seen = collect(AGENTS["a2c"], Poisoned(make("catch"), where, value), devices)
    update = int(re.search(r"update (\d+)", message)[1])
    assert where in message
    # Every chunk before the bad update was reported, and none with it.
    assert seen == list(range(5, 5 * ((update - 1) // 5) + 1, 5))


@pytest.mark.figure(9)
@variants("devices", [4], [1])
def test_a_bad_gradient_stops_the_run_in_the_same_update(devices):
    message, seen = collect(BadGradient(), "catch", devices)
    assert "update 8" in message
    assert "gradient" in message
    assert seen == [5]


class NeverFirst(CartPole):
    """Has ends alone; to tell so, its program would have to run."""

    def step(self, key, state, action):
        state, timestep = super().step(key, state, action)
        return state, dataclasses.replace(timestep, first=timestep.last & False)


class NeverLast(NeverFirst):
    """Has a `discount` of 0 alone."""

    def step(self, key, state, action):
        state, timestep = super().step(key, state, action)
        return state, dataclasses.replace(timestep, last=timestep.first)


@pytest.mark.parametrize("env", [NeverFirst(), NeverLast()])
def test_an_environment_that_does_not_restart_is_named(env):
    driver, state = anakin_setup(AGENTS["a2c"], env, rollout_length=64, updates_per_chunk=1)
    with pytest.raises(ConfigError, match="auto_reset"):
        list(driver.run(state, Orders(10)))


# --- what cannot run -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("agent", "environment", "devices", "config", "message"),
    [
        ("a2c", "catch", 8, {"num_envs": 12}, "num_envs is 12.*8 devices.*8 or 16"),
        ("a2c", "catch", 4, {"num_envs": 2}, "4 devices.*in a new run 4"),
        ("a2c", "catch", 1, {"rollout_length": 0}, "rollout_length must be at least 1"),
        ("a2c", "catch", 1, {"updates_per_chunk": -1}, "updates_per_chunk"),
        ("ppo", "catch", 1, {"num_envs": 3, "rollout_length": 5}, "4 equal minibatches"),
        ("ppo", "catch", 1, {"fused": True}, "PPO has no fused form"),
        ("q_lambda", "pendulum", 1, {}, "discrete actions"),
    ],
)
def test_what_cannot_run_is_refused_in_a_sentence(agent, environment, devices, config, message):
    compiles = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiles.append(name) if "backend_compile" in name else None
    )
    try:
        with pytest.raises(ConfigError, match=message):
            anakin_setup(AGENTS[agent], environment, devices, **config)
    finally:
        jax.monitoring.clear_event_listeners()
    assert compiles == []
