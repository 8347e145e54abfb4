"""The measurements of parts behind the benchmarks, and the command `bench.py`."""

import json
import sys
import threading
from pathlib import Path

import jax
import pytest
from agents import AGENTS
from hosts import Counters
from runs import anakin_setup

from podracer.agents.impala import Impala
from podracer.drivers.sebulba import Sebulba, SebulbaConfig

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # scripts

from anakin_parts import prepare, training
from bench import main
from sebulba import waiting
from sebulba_parts import acting_turns, measure_simulator, measure_waits


def test_a_chunk_is_timed_each_time_on_the_state_before_it():
    driver, _ = anakin_setup(AGENTS["a2c"])
    prepared = prepare(*training(driver), calls=2)
    assert prepared.lap().seconds > 0
    assert prepared.lap().cpu_seconds > 0
    assert prepared.compile_seconds > 0


@pytest.mark.parametrize(("failing", "visit"), [("reset", 2), ("step", 9)])
def test_an_environment_that_fails_says_why(failing, visit):
    """In one of two threads: while the other waits for it, or while both are measured."""
    lock, visits = threading.Lock(), []

    def at(place, batch):
        with lock:
            visits.extend([batch] if place == failing else [])
            if place == failing and len(visits) == visit:
                raise ValueError("no display")

    config = SebulbaConfig(num_envs=8, rollout_length=4, threads_per_actor=2)
    driver = Sebulba(Impala(), Counters(at=at), config, jax.devices()[:1])
    with pytest.raises(ValueError, match="no display"):
        measure_simulator(driver, 60)


def test_an_emulated_device_serves_one_batch_after_another():
    """So four threads are no faster than it, and one waits for simulator and device in turn."""
    (one,), (four,) = acting_turns([waiting(5.0, 1), waiting(5.0, 4)], 0.2, 1, pause=0.2)
    assert 0 < one[0] / 8 < 1e3 / 10
    assert 0 < four[0] / 8 < 1e3 / 5
    assert one[1] > 0
    assert 0 < measure_waits(4, 5.0, 5.0, 0.2) < 1e3 / 5 * 1.1


@pytest.fixture
def figures(capsys, monkeypatch):
    """Run the command in this process; return its exit code and what it printed."""
    monkeypatch.setattr("bench.initialize_devices", lambda *_: None)
    monkeypatch.setattr("anakin_parts.use_compilation_cache", lambda: None)
    monkeypatch.setattr("sebulba_parts.use_compilation_cache", lambda: None)

    def run(*arguments):
        main([*arguments, "--json"])
        return json.loads(capsys.readouterr().out)

    return run


@pytest.mark.slow
def test_the_parts_of_anakin_are_measured_without_compile_time(figures):
    found = figures("anakin", "--repetitions", "1", "--envs-per-device", "8", "--devices", "1")
    for part in ("environment", "environment_and_acting", "training"):
        assert found[part]["steps_per_second"] > 0
        assert found[part]["compile_seconds"] > 0


@pytest.mark.slow
def test_a_recipe_is_measured_with_its_flags(figures):
    found = figures(
        "recipe", "catch_a2c", "--devices", "1", "--rollout-length", "4", "--sizes", "8",
        "--repetitions", "1",
    )  # fmt: skip
    assert (found["rollout_length"], found["num_envs"]) == (4, 8)
    assert found["training"]["steps_per_second"] > 0


@pytest.mark.slow
def test_every_part_of_sebulba_is_measured(figures):
    found = figures(
        "sebulba", "--num-envs", "8", "--rollout-length", "4", "--threads-per-actor", "1",
        "--devices", "1", "--seconds", "0.2", "--repetitions", "1",
    )  # fmt: skip
    assert all(rate > 0 for rate in found["steps_per_second"].values())
    assert found["share_of_simulator"]["training"] > 0
