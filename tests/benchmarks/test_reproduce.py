"""Published figures: they are complete, verdicts are no better than the points, runs resume."""

import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest
from child import environment, records, wait_for_lines

from podracer.io.checkpoint import stored_fingerprint

sys.path.append(str(Path(__file__).parents[2]))
sys.path.append(str(Path(__file__).parents[2] / "packages/plan"))  # it starts what is measured

from benchmarks.reproduce import measure
from benchmarks.reproduce.figure import (
    Axes,
    Case,
    Curve,
    Figure,
    Outcome,
    Paper,
    Record,
    Verdict,
    verdict,
)
from benchmarks.reproduce.figures import FIGURES
from benchmarks.reproduce.read import learning_curve
from benchmarks.reproduce.records import project_records

ROOT = Path(__file__).parents[2]
WITH_BENCHMARKS = environment(PYTHONPATH=f"{ROOT}:{ROOT}/packages/plan")
COMMAND = ("train", "catch", "--frames", "2048", "--num-envs", "8", "--rollout-length", "8")
COMMAND += ("--updates-per-chunk", "8", "--evaluations", "2", "--run-dir", "{folder}/run")


def a_figure(outcome=Outcome.REPRODUCED, cases=("one",), timed=False, **changes):
    made = [Case(name, (COMMAND,), learning_curve("run"), timed=timed) for name in cases]
    return Figure(
        **{
            "name": "figure",
            "title": "A figure",
            "paper": Paper("Paper", "A paper (2021)"),
            "place": "Figure 1",
            "claim": "It learns.",
            "measures": "learning",
            "axes": Axes("frames", "return"),
            "cases": lambda scale: made if scale == "laptop" else [],
            "judge": lambda measured: Verdict(outcome, "It did."),
            "curves": lambda measured: [Curve("return", ((1.0, 2.0),))],
            **changes,
        }
    )


def a_record(case="one", scale="laptop", busy=0.0, error=""):
    return Record("figure", case, scale, {}, {"busy": busy}, error)


@pytest.mark.parametrize("figure", FIGURES.values(), ids=FIGURES)
def test_the_projects_records_give_curves_and_a_verdict(figure):
    records = project_records()
    assert {record.figure for record in records} <= FIGURES.keys()
    figure.our_curves(records)
    assert verdict(figure, records).reason.endswith(".")


def test_a_verdict_waits_for_all_cases():
    figure = a_figure(cases=("one", "two"))
    assert verdict(figure, []).outcome is Outcome.NOT_RUN
    partial = verdict(figure, [a_record("one")])
    assert (partial.outcome, partial.reason[:6]) == (Outcome.NOT_RUN, "1 of 2")
    failed = [a_record("one"), a_record("two", error="exit code 71")]
    assert verdict(figure, failed).outcome is Outcome.NOT_RUN
    both = [a_record("one"), a_record("two")]
    assert verdict(figure, both).outcome is Outcome.REPRODUCED


def test_measuring_resumes_and_repeats_only_what_failed(tmp_path, monkeypatch):
    figure = a_figure(cases=("one", "two"))
    calls = []

    def run(arguments):
        calls.append(arguments[0])
        (tmp_path / "runs" / "figure" / "run").mkdir(parents=True, exist_ok=True)
        for file in ("config.json", "metrics.jsonl"):
            (tmp_path / "runs" / "figure" / "run" / file).touch()
        return (0, []) if len(calls) != 2 else (71, ["out of memory"])

    monkeypatch.setattr(measure, "run_command", run)
    said = []
    for _ in range(3):
        measure.measure_figures([figure], "laptop", tmp_path, said.append, lambda: None)
    assert calls == ["train", "resume", "resume"]  # two fails, and is tried again once
    lines = (tmp_path / "records.jsonl").read_text().splitlines()
    errors = [json.loads(line)["error"] for line in lines]
    assert errors == ["", "exit code 71: out of memory", ""]
    assert any("measured before" in line for line in said)


@pytest.mark.figure(12)
@pytest.mark.parametrize("lines", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_the_command_that_runs_ends_where_this_one_is_killed(lines, tmp_path):
    """At any moment; once it trains, it saves."""
    run = tmp_path / "run"
    command = ["train", "catch_a2c", "--frames", "1e9", "--save-seconds", "1e9", "--devices", "1"]
    arguments = [*command, "--run-dir", str(run)]
    code = f"from benchmarks.reproduce import measure\nmeasure.run_command({arguments})"
    with subprocess.Popen([sys.executable, "-c", code], env=WITH_BENCHMARKS) as parent:
        task = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
        while not (pids := task.read_text().split()):
            assert parent.poll() is None
            time.sleep(0.01)
        child = os.pidfd_open(int(pids[0]))
        if lines:
            wait_for_lines(parent, run, lines)
        parent.kill()
    assert select.select([child], [], [], 60)[0]
    os.close(child)
    if lines:
        assert stored_fingerprint(run)[0] == records(run)[-1]["updates"]
