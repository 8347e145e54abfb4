"""Averaging within a population: who meets whom, how far pods drift apart, and that it is exact."""

from __future__ import annotations

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from programs import request
from runs import resumed_and_whole

from podracer.agents.a2c import A2C
from podracer.config.experiment import Experiment
from podracer.config.serialization import from_json, to_json
from podracer.drivers import population
from podracer.drivers.anakin import AnakinConfig
from podracer.drivers.exchange import Averaging, average_states
from podracer.drivers.population import Pod, Population, population_mesh, run_keys
from podracer.envs import make
from podracer.io.checkpoint import fingerprint
from podracer.networks import MLP, TorsoNetwork

CONFIG = AnakinConfig(num_envs=2, rollout_length=3, updates_per_chunk=2)


EXPERIMENT = Experiment(
    environment="catch",
    agent=A2C(network=TorsoNetwork(MLP((4,)))),
    driver=CONFIG,
    frames=2 * 3 * 12,
    pods=tuple(map(Pod, range(4))),
    exchange=Averaging("ring", 2),
    evaluations=0,
    devices=1,
)


def mixing_matrix(peers, num_pods):
    """The weights `[P, P]` of the others' values in an average, which is that of the identity."""
    mesh = population_mesh(jax.devices()[:1], num_pods)
    sound = jnp.ones(num_pods, bool)
    return np.asarray(average_states(Averaging(peers, 1), jnp.eye(num_pods), sound, mesh))


def test_after_an_average_of_all_each_pod_has_the_mean():
    np.testing.assert_allclose(mixing_matrix("all", 6), np.full((6, 6), 1 / 6), rtol=1e-6)


def test_in_a_ring_each_pod_hears_the_one_before_and_no_sum_changes():
    matrix = mixing_matrix("ring", 5)
    np.testing.assert_array_equal(matrix, 0.5 * (np.eye(5) + np.roll(np.eye(5), 1, axis=0)))
    np.testing.assert_allclose(matrix.sum(0), 1.0)


def test_gossip_keeps_pods_that_learn_apart_within_the_papers_bound():
    """Proposition 1 of GALA: with changes of at most delta between averages, no pod is further from
    the mean than sqrt(P) delta beta / (1 - beta), for the second singular value beta."""
    num_pods, delta, rng = 8, 0.3, np.random.default_rng(0)
    matrix = mixing_matrix("ring", num_pods)
    beta = np.linalg.svd(matrix - 1 / num_pods, compute_uv=False)[0]
    bound = np.sqrt(num_pods) * delta * beta / (1 - beta)
    x = np.zeros((num_pods, 16))
    halves = np.where(np.arange(num_pods) < num_pods // 2, 1.0, -1.0)
    drift = halves[:, None] * rng.normal(size=(1, 16))  # always apart, which is the worst
    distances = []
    for _ in range(200):
        x = matrix @ (x + delta * drift / np.linalg.norm(drift, axis=1, keepdims=True))
        distances.append(np.linalg.norm(x - x.mean(0), axis=1).max())
    assert max(distances) < bound
    assert distances[-1] > 0.05 * bound  # it is no empty statement
    apart = np.cumsum(np.full(200, delta))[-1]
    assert distances[-1] < 0.1 * apart  # where pods that do not average would be


def test_a_pod_with_a_fault_is_not_averaged_and_counters_stay():
    tree = {"weight": jnp.array([1.0, jnp.nan, 3.0, 5.0]), "count": jnp.arange(4)}
    sound = jnp.array([True, False, True, True])
    mesh = population_mesh(jax.devices()[:1], 4)
    for peers, expected in (("all", [3, np.nan, 3, 3]), ("ring", [3, np.nan, 3, 4])):
        result = average_states(Averaging(peers, 1), tree, sound, mesh)
        np.testing.assert_array_equal(result["weight"], expected)
        np.testing.assert_array_equal(result["count"], np.arange(4))


@pytest.mark.slow
def test_pods_are_equal_after_an_average_and_learn_apart_between():
    env = make("catch")
    config = dataclasses.replace(CONFIG, updates_per_chunk=1)
    parts = (EXPERIMENT.pods, env, config, jax.devices()[:1], Averaging("all", 2))
    driver = Population(EXPERIMENT.agent, *parts)
    state, program = driver.init(run_keys(EXPERIMENT.pods)), driver.lower()()
    spreads = []
    for _ in range(5):
        before = jax.tree.map(jnp.copy, state.learner.shared)
        state, _ = program(state, request(1))
        mean = jax.tree.map(lambda x: jnp.mean(x, axis=0, keepdims=True), before.params)
        spreads.append(
            max(float(jnp.abs(x - m).max()) for x, m in
                zip(jax.tree.leaves(before.params), jax.tree.leaves(mean), strict=True))
        )  # fmt: skip
    assert min(spreads) > 0  # what is seen before a chunk has been learned apart
    # An update of Adam moves a weight by the learning rate at most: pods met before the last one.
    assert spreads[3] < 3 * 2 * EXPERIMENT.agent.learning_rate


@pytest.mark.parametrize("peers", ["all", "ring"])
def test_the_number_of_devices_changes_no_bit_of_an_average(peers):
    tree = {"a": jax.random.normal(jax.random.key(0), (4, 5)), "b": jnp.arange(4.0)}
    prints = set()
    for count in (1, 2, 4):
        mesh = population_mesh(jax.devices()[:count], 4)
        average = partial(average_states, Averaging(peers, 2), mesh=mesh)
        placed = jax.device_put(tree, NamedSharding(mesh, population.PODS))
        result = jax.jit(average)(placed, jnp.ones(4, bool))
        prints.add(fingerprint(jax.device_get(result)))
    assert len(prints) == 1


@pytest.mark.parametrize("num_pods", [4, 8])
def test_pods_of_a_ring_send_no_more_than_their_own_numbers(num_pods):
    mesh = population_mesh(jax.devices()[:4], num_pods)
    placed = [
        jax.device_put(x, NamedSharding(mesh, population.PODS))
        for x in (jnp.zeros((num_pods, 5)), jnp.ones(num_pods, bool))
    ]
    average = jax.jit(partial(average_states, Averaging("ring", 2), mesh=mesh))
    text = average.lower(*placed).compile().as_text()
    assert "all-gather" not in text
    assert "all-reduce" not in text
    sent = re.findall(r"= f32\[([\d,]+)\]\S* collective-permute", text)
    assert {np.prod(list(map(int, shape.split(",")))) for shape in sent} == {5}


@pytest.mark.slow
def test_resumed_equals_uninterrupted(tmp_path):
    resumed_and_whole(EXPERIMENT, tmp_path, frames=2 * 3 * 6)
    assert from_json(to_json(EXPERIMENT)) == EXPERIMENT
