"""The command that measures an accelerator, in small on a CPU."""

import sys
import time
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # scripts

import accelerator
from accelerator_cases import Case, Plan, all_cases

from podracer.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of gymnax


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
