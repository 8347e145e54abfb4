"""The command that measures an accelerator, in small on a CPU."""

import importlib.metadata
import itertools
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # scripts

import accelerator
from accelerator_cases import ACTING_OPTIONS, Case, DrawnFrames, Plan, all_cases, inference

from podracer.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of gymnax


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_cases_are_measured_once_and_recorded_as_they_end(tmp_path):
    words = ["catch/8", "convolution/minatar", "replay/vectors", "transfer", "sebulba"]
    flags = ["--quick", "--out", str(tmp_path / "new" / "out.jsonl"), "--only", *words]
    records = accelerator.main(flags)
    assert all(record.get("value", 1) > 0 and "error" not in record for record in records)
    assert all("value" in x for x in records if not x["case"].startswith("transfer"))
    assert len(records) >= 8
    assert records[0]["case"] == "catch/8"
    assert records[0]["goal"] == 50e6
    assert records[0]["temporary_bytes"] > 0
    assert rows(tmp_path / "new" / "out.jsonl") == json.loads(json.dumps(records))
    assert not [record for record in accelerator.main(flags) if "value" in record]


@pytest.mark.slow
def test_an_inference_is_taken_apart_and_a_gpus_options_are_left_out_on_a_cpu(tmp_path, capsys):
    flags = ["--quick", "--out", str(tmp_path / "out.jsonl"), "--only", "latency"]
    acting, as_commands, *others = accelerator.main(flags)
    uploads = {"upload_strided", "upload_contiguous", "upload_newest", "upload_columns"}
    assert uploads < acting["parts"].keys()
    assert acting["value"] > 0
    assert as_commands["parts"].keys() == {"fixed", "new", "host", "host_copy_asked_for"}
    assert as_commands["parts"]["new"].keys() == {"call", "ready", "copy"}
    assert as_commands["value"] == sum(as_commands["parts"]["host"].values()) > 0
    assert [record["case"] for record in others] == [
        f"latency/8-{kind}" for kind in ACTING_OPTIONS if kind != "as-commands"
    ]
    assert all("options of a GPU's compiler" in record["left_out"] for record in others)
    assert capsys.readouterr().out.count("left out") == len(others)


@pytest.mark.slow
def test_options_reach_the_compiler_of_the_acting_program(tmp_path, monkeypatch):
    """A CPU's compiler takes them without effect, but refuses a name that does not exist."""
    monkeypatch.setattr("jax.default_backend", lambda: "gpu")
    plan = Plan(True, tmp_path, time.monotonic(), None)
    for options in ACTING_OPTIONS.values():
        assert inference(plan, 2, options)["value"] > 0
    with pytest.raises(Exception, match="No such compile option: 'xla_gpu_wish'"):
        inference(plan, 2, {"xla_gpu_wish": True})


def test_drawn_frames_are_stacks_that_lie_in_memory_as_ale_pys():
    batch = DrawnFrames().make(2, 1)
    frames = [batch.reset(0, [0, 1], 0).observation]
    frames += [batch.step([0, 0]).observation for _ in range(10)]
    for old, new in itertools.pairwise(frames):
        assert (new[..., :-1] == old[..., 1:]).all()
    assert frames[0].shape == (2, 84, 84, 4)
    assert np.moveaxis(frames[0], -1, 1).flags.c_contiguous


class Games:
    """Games of which no step is measured."""

    spec = DrawnFrames.spec

    def make(self, num_envs, num_threads):
        raise AssertionError


def test_many_games_are_compared_with_what_all_processors_give(tmp_path, monkeypatch):
    plan = Plan(False, tmp_path, time.monotonic(), None)
    goals = {case.name: case for case in all_cases(plan) if case.name.startswith("sebulba")}
    monkeypatch.setattr("accelerator_cases.atari", Games)
    monkeypatch.setattr("accelerator_cases.measure_simulator", lambda driver, seconds: 100.0)
    monkeypatch.setattr("accelerator_cases.measure_acting", lambda driver, seconds: 50.0)
    monkeypatch.setattr("accelerator_cases.tune.measure", lambda driver, seconds: (45.0, {}))
    figures = {name: goals[name].measure() for name in ("sebulba/ppo-cleanrl", "sebulba/ppo-64")}
    assert figures["sebulba/ppo-cleanrl"]["first_goal"] == 6.8e3
    assert figures["sebulba/ppo-cleanrl"]["goal"] == 9e3
    assert figures["sebulba/ppo-64"]["goal"] == 90.0
    assert figures["sebulba/ppo-64"]["simulator"] == 100.0


def test_a_case_that_fails_costs_only_itself_and_is_tried_again(tmp_path, monkeypatch, capsys):
    def fail():
        raise MemoryError("too large")

    def leave_out():
        raise ConfigError("no such device here.")

    cases = [Case("one", fail), Case("two", leave_out), Case("three", lambda: {"value": 3.0})]
    monkeypatch.setattr(accelerator, "all_cases", lambda plan: iter(cases))
    flags = ["--quick", "--out", str(tmp_path / "out.jsonl")]
    first, second, third = accelerator.main(flags)
    assert first["error"] == "MemoryError: too large"
    assert second["left_out"] == "no such device here."
    assert third["value"] == 3.0
    assert [record["case"] for record in accelerator.main(flags)] == ["one", "two"]
    assert "no such device" in capsys.readouterr().out


def test_other_code_and_other_settings_are_measured_again(tmp_path, monkeypatch):
    cases = [Case("one", lambda: {"value": 1.0})]
    monkeypatch.setattr(accelerator, "all_cases", lambda plan: iter(cases))
    flags = ["--quick", "--out", str(tmp_path / "out.jsonl")]
    assert len(accelerator.main([*flags, "--commit", "a"])) == 1
    assert len(accelerator.main([*flags, "--commit", "b"])) == 1
    monkeypatch.setenv("JAX_DEFAULT_MATMUL_PRECISION", "highest")
    assert len(accelerator.main([*flags, "--commit", "b"])) == 1
    assert len(accelerator.main([*flags, "--commit", "b"])) == 0


def test_it_starts_as_commands_do_and_records_the_flags(tmp_path, monkeypatch):
    plugins = [SimpleNamespace(name="xla_cuda12")]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: plugins)
    monkeypatch.setattr(accelerator, "all_cases", lambda plan: [Case("one", lambda: {"value": 1})])
    flags = ["--quick", "--out", str(tmp_path / "out.jsonl")]
    monkeypatch.setenv("XLA_FLAGS", "")
    (fastest,) = accelerator.main([*flags, "--fastest-kernels"])
    (as_commands,) = accelerator.main(flags)
    assert fastest["settings"] == {}
    assert "--xla_gpu_deterministic_ops=true" in as_commands["settings"]["XLA_FLAGS"]


def test_no_case_starts_after_the_limit(tmp_path, monkeypatch, capsys):
    cases = [Case("one", lambda: {"value": 1.0})]
    monkeypatch.setattr(accelerator, "all_cases", lambda plan: iter(cases))
    assert accelerator.main(["--quick", "--seconds", "-1", "--out", str(tmp_path / "x")]) == []
    assert "no time left" in capsys.readouterr().out


def test_names_are_unique_and_the_most_valuable_come_first(tmp_path):
    names = [case.name for case in all_cases(Plan(False, tmp_path, time.monotonic(), None))]
    assert len(names) == len(set(names))
    assert names[0] == "doctor"
    goals = [
        "catch/16384",
        "ppo/cartpole-mlp",
        "lpg/61440",
        "sebulba/ppo-cleanrl",
        "simulator/CartPoles",
        "simulator/PointMasses",
        "population/16384",
    ]
    places = [names.index(name) for name in goals]
    assert places == sorted(places)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_case_runs(tmp_path):
    flags = ["--quick", "--seconds", "1200", "--out", str(tmp_path / "out.jsonl")]
    records = accelerator.main(flags)
    assert [record["case"] for record in records if "error" in record] == []
    assert {record["value"] for record in records if record["case"].startswith("repeat")} == {2}
