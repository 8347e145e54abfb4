"""Native threads of the environments: how many by default, and what `tune` tries."""

import dataclasses
from types import SimpleNamespace

import jax
import pytest
from hosts import Counters

from podracer.agents.impala import Impala
from podracer.drivers.driver import blueprint_for
from podracer.drivers.sebulba import SebulbaConfig, tune
from podracer.drivers.sebulba.actor_pool import native_threads


@pytest.fixture(autouse=True)
def sixteen_cores(monkeypatch):
    for module in ("tune", "actor_pool"):
        monkeypatch.setattr(f"podracer.drivers.sebulba.{module}.num_cores", lambda: 16)


@pytest.mark.parametrize(
    ("platform", "actors", "threads"),
    [
        ("cpu", 1, 16), ("cpu", 2, 8), ("cpu", 4, 4), ("cpu", 32, 1),
        ("gpu", 1, 16), ("gpu", 2, 16), ("gpu", 4, 8), ("tpu", 16, 2), ("gpu", 64, 1),
    ],
)  # fmt: skip
def test_beside_an_accelerator_actors_have_two_threads_for_each_core(platform, actors, threads):
    split = SimpleNamespace(actors=[SimpleNamespace(platform=platform)], threads=actors)
    assert native_threads(SebulbaConfig(), split) == threads
    assert native_threads(SebulbaConfig(env_threads=3), split) == 3


@pytest.mark.parametrize(("fastest", "tried"), [(1, [16, 1, 24, 32]), (2, [8, 1, 12, 16])])
def test_tune_tries_native_threads_for_the_fastest_number_of_actors(monkeypatch, fastest, tried):
    """One for each actor, and one, one and a half and two for each core: none of them twice."""
    drivers = []

    def measure(driver, seconds):
        drivers.append(driver)
        is_fastest = driver.config.num_threads == fastest and driver.config.num_envs == 16
        metrics = dict.fromkeys(("actor_idle", "learner_idle", "lag_mean"), 0.0)
        return 1.0 + is_fastest + (driver.config.env_threads == tried[2]), metrics

    monkeypatch.setattr(tune, "measure", measure)
    env, config = Counters(), SebulbaConfig(num_envs=16, rollout_length=4)
    blueprint = blueprint_for(Impala(), env, config)
    found = list(tune.trials(blueprint, env, config, jax.devices()[:1], 60.0))
    with_fastest = [x for x in drivers if x.config.num_threads == fastest]
    at_size = [x for x in with_fastest if x.config.num_envs == 16]
    assert [native_threads(x.config, x.split) for x in at_size] == tried
    settings = [dataclasses.replace(x.config, updates_per_chunk=1) for x in drivers]
    assert len(settings) == len(set(settings)) == len(found)
    best = max(found, key=lambda trial: trial.steps_per_second)
    assert best.settings["env_threads"] == tried[2]
