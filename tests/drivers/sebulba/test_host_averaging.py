"""Hosts that average parameters: what they learn between, whom they meet, and what is exact.

Learner devices of one process stand for those of several hosts; actors then have the parameters of
the first. Two processes on loopback run in `test_hosts.py`.
"""

import contextlib
import dataclasses
from functools import partial

import jax
import numpy as np
import pytest
from agents import AGENTS, SMALL, environment_for
from programs import unordered
from runs import sebulba_setup, train_sebulba
from variants import variants

from podracer.agents.impala import Impala
from podracer.devices.mesh import make_mesh
from podracer.drivers.sebulba import check, driver, lower_update, sebulba
from podracer.drivers.sebulba.config import DeviceSplit
from podracer.drivers.sebulba.trajectory import map_over_rows
from podracer.drivers.sebulba.update import make_update
from podracer.envs import make
from podracer.envs.host.device import DeviceEnvironments
from podracer.errors import ConfigError
from podracer.io.checkpoint import fingerprint
from podracer.schedules import Linear
from podracer.types import LearnerState

PEERS = ("all", "hypercube", "ring")


@pytest.fixture
def setup(monkeypatch):
    """`sebulba_setup` in lock-step, with so many hosts of one or two learners."""

    def on_hosts(hosts, learners=1, name=None, **config):
        monkeypatch.setattr(DeviceSplit, "num_hosts", property(lambda split: hosts))
        agent = Impala(network=SMALL, learning_rate=Linear(1e-3, 0.0, frames=1e4))
        env = DeviceEnvironments(make(environment_for(name) if name else "catch"))
        agent = AGENTS[name] if name else agent
        count = hosts * learners
        config = {"rollout_length": 5, "policy_lag": 0, "threads_per_actor": 2, **config}
        return sebulba_setup(agent, env, count + 1, learners=count, **config)

    return on_hosts


def shared(state):
    """Leaves of a learner's shared state as arrays of NumPy."""
    return [np.asarray(x) for x in jax.tree.leaves(state.learner.shared)]


@pytest.mark.parametrize("peers", ["all", "ring"])
def test_hosts_learn_apart_and_meet_after_every_third_update(setup, peers, monkeypatch):
    """As programs of two learners that know nothing of each other, averaged by hand."""
    *parts, state = setup(2, learners=2, average_hosts=peers, average_every=3)
    agent, env, split, config = parts
    program, seen = lower_update(agent, env.spec, split, config, state)(), []

    def spy(state, shards, request):
        before, rows = shared(state), jax.device_get(shards)
        result = program(state, shards, request)
        seen.append((before, rows, shared(result[0])))
        return result

    monkeypatch.setattr(driver, "lower_update", lambda *args: lambda: spy)
    train_sebulba(*parts, state, num_updates=6)
    alone = make_update(make_mesh(list(split.mesh.devices[:2])), split.threads, 1)
    template = sebulba_setup(agent.settings, env, 3, learners=2, num_envs=8, rollout_length=5)[-1]
    structure = jax.tree.structure(template.learner.shared)
    for update, (before, rows, after) in enumerate(seen):
        learned = []
        for host in (0, 1):
            tree = jax.tree.unflatten(structure, [jax.numpy.asarray(x[host]) for x in before])
            own = dataclasses.replace(
                template, learner=LearnerState(tree), actor=(), update=jax.numpy.uint32(update)
            )
            own = jax.tree.map(jax.numpy.copy, own)  # it is donated
            half = [map_over_rows(partial(half_of, host), shard) for shard in rows]
            learned.append(floats(shared(alone(agent, own, half, np.zeros((2, 2), np.int32))[0])))
        if update in (2, 5):
            learned = [[(a + b) / 2 for a, b in zip(*learned, strict=True)]] * 2
        for host in (0, 1):
            for have, want in zip(floats(after), learned[host], strict=True):
                np.testing.assert_allclose(have[host], want, rtol=2e-5, atol=1e-7)
    apart = [max(np.abs(x[0] - x[1]).max() for x in floats(after)) for _, _, after in seen]
    assert min(apart[0], apart[1], apart[3], apart[4]) > 1e-5
    assert apart[2] == apart[5] == 0


def floats(leaves):
    return [x for x in leaves if x.dtype == np.float32]


def half_of(host, axis, x):
    return np.split(x, 2, axis)[host]


@pytest.mark.parametrize("peers", PEERS)
def test_no_reduction_of_the_update_can_overtake_another(setup, peers):
    """See the same test of Anakin."""
    *parts, state = setup(4, average_hosts=peers, average_every=3)
    agent, env, split, config = parts
    text = lower_update(agent, env.spec, split, config, state)().func.as_text()
    assert not unordered(text)
    assert ("collective-permute" in text) == (peers != "all")


@variants("peers", PEERS[:1], PEERS)
def test_a_report_has_the_mean_of_all_hosts_and_changes_nothing(setup, peers):
    """Frames of schedules are those of all hosts."""
    *parts, state = setup(4, average_hosts=peers, average_every=3)
    copies = [jax.tree.map(jax.numpy.copy, state) for _ in range(2)]
    progress = sebulba(*parts, state, seed=7, num_updates=10, boundary=lambda updates: True)
    with contextlib.closing(progress):
        prints = [fingerprint(report.state) for report in progress]
    whole, _ = train_sebulba(*parts, copies[0], num_updates=10)
    assert fingerprint(whole) == prints[1]
    half, _ = train_sebulba(*parts, copies[1], num_updates=5)
    assert fingerprint(half) == prints[0]
    assert half.learner.shared.frames == 5 * 16 * 5
    assert train_sebulba(*parts, half, num_updates=10)[0].learner.shared.frames == 10 * 16 * 5


def test_a_resume_is_exact_where_all_hosts_have_just_met(setup):
    *parts, state = setup(4, average_hosts="all", average_every=5)
    copy = jax.tree.map(jax.numpy.copy, state)
    whole, _ = train_sebulba(*parts, copy, num_updates=10)
    half, _ = train_sebulba(*parts, state, num_updates=5)
    assert fingerprint(train_sebulba(*parts, half, num_updates=10)[0]) == fingerprint(whole)


@variants("name", ["dqn"], AGENTS)
def test_every_agent_learns_on_hosts_that_average(setup, name):
    """A replay of each learner stays its own."""
    *parts, state = setup(2, 2, name, average_hosts="all", average_every=2, rollout_length=8)
    before = shared(state)
    after, (report,) = train_sebulba(*parts, state, num_updates=5)
    assert report.frames > 0
    assert all(np.isfinite(x).all() for x in floats(shared(after)))
    assert any((x != y).any() for x, y in zip(before, shared(after), strict=True))


@pytest.mark.slow
def test_several_updates_from_a_batch_are_one_to_hosts_that_average(setup):
    *parts, state = setup(2, average_hosts="all", average_every=2, updates_per_batch=2)
    assert train_sebulba(*parts, state, num_updates=5)[0].learner.shared.frames == 5 * 16 * 5


def test_hosts_that_would_never_meet_are_refused(setup):
    agent, env, split, config, _ = setup(2, average_hosts="all", average_every=10)
    check(agent, env, config, split, num_updates=11)
    with pytest.raises(ConfigError, match="10` is never reached in a run of 10 updates"):
        check(agent, env, config, split, num_updates=10)


def test_a_hypercube_takes_a_power_of_two_of_hosts(setup):
    with pytest.raises(ConfigError, match="power of 2 of hosts, but there are 3"):
        setup(3, average_hosts="hypercube", num_envs=18)


def test_one_host_averages_gradients(setup):
    *parts, state = setup(1, average_hosts="all")
    copy = jax.tree.map(jax.numpy.copy, state)
    alone, _ = train_sebulba(*parts, state, num_updates=3)
    parts[3] = dataclasses.replace(parts[3], average_hosts=None)
    assert fingerprint(train_sebulba(*parts, copy, num_updates=3)[0]) == fingerprint(alone)
