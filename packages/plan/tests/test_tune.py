"""`podracer tune`: what it tries, and what it says."""

import dataclasses
import json
import os
import sys

import jax
import pytest
from child import call
from hosts import Counters

from podracer.agents.impala import Impala
from podracer.cli.main import main
from podracer.drivers.driver import blueprint_for
from podracer.drivers.sebulba import SebulbaConfig
from podracer.drivers.sebulba.actor_pool import native_threads
from podracer_plan import trials


@pytest.fixture(autouse=True)
def sixteen_cores(monkeypatch):
    monkeypatch.setattr("podracer_plan.trials.num_cores", lambda: 16)
    monkeypatch.setattr("podracer.drivers.sebulba.actor_pool.num_cores", lambda: 16)


@pytest.mark.parametrize(("fastest", "tried"), [(1, [16, 1, 24, 32]), (2, [8, 1, 12, 16])])
def test_tune_tries_native_threads_for_the_fastest_number_of_actors(monkeypatch, fastest, tried):
    """One for each actor, and one, one and a half and two for each core: none of them twice."""
    drivers = []

    def measure(driver, seconds):
        drivers.append(driver)
        is_fastest = driver.config.num_threads == fastest and driver.config.num_envs == 16
        metrics = dict.fromkeys(("actor_idle", "learner_idle", "lag_mean"), 0.0)
        return 1.0 + is_fastest + (driver.config.env_threads == tried[2]), metrics

    monkeypatch.setattr(trials, "measure", measure)
    env, config = Counters(), SebulbaConfig(num_envs=16, rollout_length=4)
    blueprint = blueprint_for(Impala(), env, config)
    found = list(trials.trials(blueprint, env, config, jax.devices()[:1], 60.0))
    with_fastest = [x for x in drivers if x.config.num_threads == fastest]
    at_size = [x for x in with_fastest if x.config.num_envs == 16]
    assert [native_threads(x.config, x.split) for x in at_size] == tried
    settings = [dataclasses.replace(x.config, updates_per_chunk=1) for x in drivers]
    assert len(settings) == len(set(settings)) == len(found)
    best = max(found, key=lambda trial: trial.steps_per_second)
    assert best.settings["env_threads"] == tried[2]


def test_a_process_of_tune_that_fails_fails_it_and_other_words_do_not(capfd, monkeypatch, tmp_path):
    trial = {
        "settings": {"devices": 1, "num_envs": 64}, "steps_per_second": 9.0, "actor_idle": 0.0,
        "learner_idle": 0.0, "lag_mean": 0.0,
    }  # fmt: skip
    python = tmp_path / "python"
    python.write_text(
        f"#!/bin/sh\necho $* >> {tmp_path}/calls\n"
        f"echo '{{a greeting}}'\necho '{json.dumps(trial)}'\n"
        "case \"$*\" in *'--devices 1 '*) exit 0;; esac\nexit 71\n"
    )
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr("podracer_plan.tune.has_one_cpu_device", lambda: True)
    monkeypatch.setattr("podracer_plan.tune.initialize_devices", lambda *_: None)
    with pytest.raises(SystemExit) as leaving:
        main(
            [
                "tune",
                "cartpole_sebulba",
                "--driver.num-envs",
                "8",
                "--arch",
                "sebulba",
                "--seed",
                "3",
                "--seconds",
                "0.1",
            ]
        )
    calls = (tmp_path / "calls").read_text().splitlines()
    assert [call.partition("--seconds ")[2].split()[0] for call in calls] == ["0.1", "0.1"]
    assert leaving.value.code == 71
    assert (
        "Fastest: podracer train cartpole_sebulba --seed 3 --arch sebulba --devices 1"
        in capfd.readouterr().out
    )


@pytest.mark.slow
def test_tune_names_the_fastest():
    """Of one CPU device, and of one for acting beside one for each core to learn."""
    arguments = ("tune", "cartpole_sebulba", "--num-envs", 8, "--seconds", 12)
    code, out, error = call(*arguments, XLA_FLAGS="")
    assert code == 0, error
    cores = len(os.sched_getaffinity(0))
    rows = [line.split() for line in out.splitlines() if "--devices" in line]
    rates = {tuple(row[4:]): int(row[0].replace(",", "")) for row in rows[:-1]}
    assert {row[row.index("--devices") + 1] for row in rows[:-1]} == {"1", str(1 + cores)}
    fastest = " ".join(max(rates, key=rates.__getitem__))
    command = "podracer train cartpole_sebulba --arch sebulba"
    assert f"Fastest: {command} {fastest}" in out


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("lpg", "tune measures Sebulba, and it trains under Anakin alone."),
        ("catch --arch anakin", "leave --driver out."),
        ("catch --environment gymnasium:Nope-v0", "Gymnasium has no environment 'Nope-v0'"),
    ],
)
def test_what_cannot_be_measured_is_refused_once(capfd, monkeypatch, command, error):
    monkeypatch.setattr("podracer_plan.tune.has_one_cpu_device", lambda: True)
    with pytest.raises(SystemExit) as leaving:
        main(["tune", *command.split()])
    out, errors = capfd.readouterr()
    assert (leaving.value.code, out, errors.count(error)) == (78, "", 1)


def test_a_time_that_is_none_is_refused(capfd):
    with pytest.raises(SystemExit) as leaving:
        main(["tune", "catch_a2c", "--seconds", "nan"])
    assert leaving.value.code == 78
    assert "--seconds must lie in" in capfd.readouterr().err
