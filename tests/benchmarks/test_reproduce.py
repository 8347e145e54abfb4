"""Published figures: they are complete, verdicts are no better than the points, runs resume."""

import dataclasses
import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from charts import blocks
from child import environment, records, wait_for_lines

from podracer.errors import PodracerError
from podracer.io.checkpoint import stored_fingerprint

sys.path.append(str(Path(__file__).parents[2]))


from benchmarks import machine
from benchmarks.reproduce import measure
from benchmarks.reproduce.__main__ import main
from benchmarks.reproduce.figure import (
    SCALES,
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
from benchmarks.reproduce.page import html_page, markdown_page
from benchmarks.reproduce.read import learning_curve
from benchmarks.reproduce.records import (
    SHIPPED,
    accelerator_records,
    append_record,
    project_records,
    read_records,
    shown_records,
)

ROOT = Path(__file__).parents[2]
WITH_BENCHMARKS = environment(PYTHONPATH=str(ROOT))
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
def test_a_figure_is_complete(figure):
    for text in (figure.title, figure.paper.reference, figure.place, figure.claim):
        assert text.strip()
    assert figure.claim.endswith(".")
    for sentence in (*figure.deviations, figure.run, figure.impossible):
        assert not sentence or sentence.endswith(".")
    for curve in figure.published:
        assert curve.kind == "published"
        assert curve.reading is not None, "how was it read?"
    runs = any(figure.cases(scale) for scale in SCALES)
    assert figure.run if runs else figure.impossible, "neither run nor a reason"
    assert bool(figure.cases("laptop")) == bool(figure.minutes)
    for scale in SCALES:
        names = [case.name for case in figure.cases(scale)]
        assert len(names) == len(set(names))
        assert all(re.fullmatch(r"[a-z0-9-]+", name) for name in names)


def test_all_figures_fit_into_two_hours_of_a_laptop():
    assert sum(figure.minutes for figure in FIGURES.values()) <= 120


@pytest.mark.parametrize("figure", FIGURES.values(), ids=FIGURES)
def test_the_projects_records_give_curves_and_a_verdict(figure):
    records = project_records()
    assert {record.figure for record in records} <= FIGURES.keys()
    figure.our_curves(records)
    assert verdict(figure, records).reason.endswith(".")


def test_the_projects_points_were_measured_by_the_commands_of_the_figures():
    for record in read_records(SHIPPED):
        cases = {case.name: case for case in FIGURES[record.figure].cases(record.scale)}
        assert len(record.context["commands"]) == len(cases[record.case].commands)
        assert not record.context["commit"].endswith("-dirty")
        assert not (record.is_busy and cases[record.case].timed)


def test_the_page_in_the_documentation_is_that_of_the_projects_records():
    page = markdown_page(list(FIGURES.values()), project_records())
    assert (ROOT / "benchmarks" / "reproduction.md").read_text() == page, (
        "python -m benchmarks.reproduce --page --out build/figures && "
        "cp build/figures/reproduction.md benchmarks/reproduction.md"
    )


def test_a_verdict_waits_for_all_cases():
    figure = a_figure(cases=("one", "two"))
    assert verdict(figure, []).outcome is Outcome.NOT_RUN
    partial = verdict(figure, [a_record("one")])
    assert (partial.outcome, partial.reason[:6]) == (Outcome.NOT_RUN, "1 of 2")
    failed = [a_record("one"), a_record("two", error="exit code 71")]
    assert verdict(figure, failed).outcome is Outcome.NOT_RUN
    both = [a_record("one"), a_record("two")]
    assert verdict(figure, both).outcome is Outcome.REPRODUCED


def test_a_laptop_reproduces_the_shape_of_a_rate_only():
    figure = a_figure(measures="rate")
    judged = verdict(figure, [a_record()])
    assert judged.outcome is Outcome.SHAPE
    assert "not the rate" in judged.reason
    missed = verdict(a_figure(Outcome.NOT_REPRODUCED, measures="rate"), [a_record()])
    assert missed.outcome is Outcome.NOT_REPRODUCED


def test_a_task_that_stands_in_reproduces_no_more_than_a_shape():
    judged = verdict(a_figure(stand_in="Catch"), [a_record()])
    assert judged.outcome is Outcome.SHAPE
    assert "Catch stands in" in judged.reason


def test_a_rate_of_a_busy_machine_counts_for_nothing():
    assert verdict(a_figure(timed=True), [a_record(busy=0.4)]).outcome is Outcome.NOT_RUN
    assert verdict(a_figure(timed=False), [a_record(busy=0.4)]).outcome is Outcome.REPRODUCED


def test_what_an_accelerator_measured_counts_before_a_laptop():
    case = Case("one", (COMMAND,), learning_curve("run"))
    figure = dataclasses.replace(a_figure(measures="rate"), cases=lambda scale: [case])
    records = [a_record(scale="laptop"), a_record(scale="accelerator")]
    assert verdict(figure, records).outcome is Outcome.REPRODUCED
    assert verdict(figure, records[:1]).outcome is Outcome.SHAPE


def test_what_accelerator_py_measured_counts_and_the_kernels_of_commands_come_first(tmp_path):
    row = {"platform": "gpu", "device": "1 x G", "cores": 4, "jax": "1", "commit": "a"}
    row |= {"case": "lpg/61440", "environments": 61_440, "case_seconds": 9.0}
    flags = {"XLA_FLAGS": "--xla_gpu_deterministic_ops=true"}
    rows = [row | {"value": 6e6, "settings": flags}, row | {"value": 9e6, "settings": {}}]
    rows += [row | {"platform": "cpu", "value": 1.0, "settings": flags}]
    for measured, times, note in ((rows, "2 times", False), (rows[1:], "3 times", True)):
        path = tmp_path / "accelerator.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in measured))
        judged = verdict(FIGURES["lpg-rate"], accelerator_records(path))
        assert judged.outcome is Outcome.REPRODUCED
        assert f", {times} the published" in judged.reason
        assert "Measured on 1 x G with 4 cores" in judged.reason
        assert ("fastest kernels" in judged.reason) == note


def test_a_run_without_a_final_score_gives_no_curve(tmp_path):
    """An earlier evaluation does not take the place of one whose episodes did not end."""
    run = tmp_path / "run"
    run.mkdir()
    sound = {"updates": 1, "frames": 9, "seconds": 1.0, "evaluation_return": 1.0}
    last = {**sound, "updates": 2, "evaluation_return": 5.0}
    for cut, returns in (({}, [1.0, 5.0]), ({"evaluation_unfinished": 1}, None)):
        lines = (json.dumps(record) + "\n" for record in (sound, last | cut))
        (run / "metrics.jsonl").write_text("".join(lines))
        if returns is None:
            with pytest.raises(PodracerError, match="no final score: unfinished evaluation"):
                learning_curve("run")([], tmp_path)
        else:
            assert learning_curve("run")([], tmp_path)["returns"] == returns


def test_what_is_impossible_says_why():
    judged = verdict(a_figure(cases=(), impossible="It needs a pod."), [])
    assert judged == Verdict(Outcome.NOT_POSSIBLE, "It needs a pod.")


def test_a_modeled_point_is_always_called_one():
    curve = Curve("hours", ((1.0, 7.1),), "modeled")
    figure = a_figure(curves=lambda measured: [curve])
    for page in (html_page, markdown_page):
        assert "hours (modeled, not measured)" in page([figure], [a_record()])
    for figure in FIGURES.values():  # a curve named so is drawn in this style, and no other
        for ours in figure.our_curves(project_records()):
            assert ("modeled" in ours.name) == (ours.kind == "modeled")


def test_the_page_is_self_contained_and_draws_published_points_with_ours():
    whole = html_page(list(FIGURES.values()), project_records())
    assert len(whole.encode()) < 6e6
    text = re.sub("<script>.*?</script>", "", whole, flags=re.DOTALL)
    assert not re.search(r'(src|href)="(?!#|data:)', text)
    chart = blocks(text)["notebook"][0]
    assert {x["name"] for x in chart["data"] if not x["showlegend"]} == {"published", "measured"}
    (figure,) = [figure for figure in FIGURES.values() if figure.name == "notebook"]
    first, *_ = figure.published
    drawn = chart["data"][0]
    assert pytest.approx(np.array(first.points), rel=1e-5) == np.array([drawn["x"], drawn["y"]]).T


def test_records_of_two_machines_are_not_mixed():
    shipped = [Record("a", "one", "laptop", {}, {}), Record("b", "one", "laptop", {}, {})]
    own = [Record("a", "two", "laptop", {}, {})]
    assert shown_records(own, shipped) == [own[0], shipped[1]]


def test_a_case_that_failed_hides_no_measured_points():
    shipped = [Record("a", "one", "laptop", {}, {})]
    failed = [Record(figure, "two", "laptop", {}, {}, error="lost") for figure in ("a", "b")]
    assert shown_records(failed, shipped) == [failed[1], shipped[0]]


def test_a_torn_line_of_records_is_replaced(tmp_path):
    path = tmp_path / "records.jsonl"
    append_record(path, a_record("one"))
    with path.open("a") as file:
        file.write('{"figure": "fig')
    assert [record.case for record in read_records(path)] == ["one"]
    append_record(path, a_record("two"))
    assert [record.case for record in read_records(path)] == ["one", "two"]


def test_records_before_a_torn_line_survive_a_write_that_fails(tmp_path):
    path = tmp_path / "records.jsonl"
    append_record(path, a_record("one"))
    with path.open("a") as file:
        file.write('{"figure": "fig')
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))  # bytes, as if the disk were full
    try:
        with pytest.raises(OSError, match="File too large"):
            append_record(path, a_record("two"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [record.case for record in read_records(path)] == ["one"]


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


def test_a_case_that_cannot_be_read_loses_no_other_and_fails_the_command(
    tmp_path, monkeypatch, capsys
):
    cases = [
        Case("one", (COMMAND,), lambda printed, folder: printed[1]),
        Case("two", (COMMAND,), lambda printed, folder: printed[0]),
    ]
    figure = dataclasses.replace(a_figure(), cases=lambda scale: cases)
    monkeypatch.setitem(FIGURES, "figure", figure)
    monkeypatch.setattr(
        measure, "run_command", lambda arguments: (0, ["{hello}", '{"value": 1}', "[]"])
    )
    with pytest.raises(SystemExit) as leaving:
        main(["figure", "--out", str(tmp_path)])
    one, two = read_records(tmp_path / "records.jsonl")
    assert one.error == "its output cannot be read: IndexError: list index out of range"
    assert (two.error, two.values) == ("", {"value": 1})
    assert leaving.value.code == 70
    assert "cases failed, which the same command repeats: one of figure." in capsys.readouterr().err
    cases[0] = cases[1]
    with pytest.raises(SystemExit) as leaving:
        main(["figure", "--out", str(tmp_path)])
    assert leaving.value.code == 0


@pytest.mark.slow
def test_the_command_that_runs_is_stopped_and_may_save(tmp_path):
    podracer = tmp_path / "podracer"
    podracer.write_text(
        "#!/bin/sh\ntrap 'sleep 0.3; touch saved; exit 75' TERM\ntouch begun\n"
        "while [ -e begun ]; do sleep 0.05; done\n"
    )
    podracer.chmod(0o755)
    code = (
        "import sys\nfrom podracer.io.signals import exit_on_stop\n"
        "from benchmarks.reproduce.measure import run_command\n"
        f"sys.executable = {str(podracer)!r}\nwith exit_on_stop():\n    run_command(['train'])"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=WITH_BENCHMARKS)
    try:
        while not (tmp_path / "begun").exists() and process.poll() is None:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 75
        assert (tmp_path / "saved").exists()
    finally:
        process.kill()
        (tmp_path / "begun").unlink(missing_ok=True)


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


@pytest.mark.slow
def test_a_small_figure_from_the_command_to_the_page(tmp_path, monkeypatch, capsys):
    figure = a_figure(curves=lambda measured: [Curve("return", ((1.0, 0.5),))])
    monkeypatch.setitem(FIGURES, "figure", figure)
    with pytest.raises(SystemExit) as leaving:
        main(["figure", "--out", str(tmp_path)])
    assert leaving.value.code == 0
    assert "figure: reproduced. It did." in capsys.readouterr().out
    (record,) = read_records(tmp_path / "records.jsonl")
    assert record.values["frames"] == [1024, 2048]
    assert record.context["cpu_seconds"] > 0
    assert 'id="figure"' in (tmp_path / "index.html").read_text()


def test_a_figure_that_needs_what_is_not_here_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "run_command", lambda arguments: pytest.fail("it ran"))
    figure = a_figure(missing=lambda: "put the file into this directory.")
    said = []
    measure.measure_figures([figure], "laptop", tmp_path, said.append, lambda: None)
    assert "    not run: put the file into this directory." in said
    assert read_records(tmp_path / "records.jsonl") == []  # the project's own points are shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["notebok"], "did you mean notebook"),
        (["--page", "--out", "s3://bucket/run"], "is an address"),
    ],
)
def test_wrong_arguments_are_refused_with_a_reason(arguments, words, capsys):
    with pytest.raises(SystemExit) as leaving:
        main(arguments)
    assert leaving.value.code == 78
    assert words in capsys.readouterr().err


def test_a_record_names_no_commit_of_another_project(tmp_path, monkeypatch):
    git = ("git", "-c", "user.name=me", "-c", "user.email=me@here", "-C", str(tmp_path))
    (tmp_path / ".gitignore").write_text(".venv\n")
    installed = tmp_path / ".venv" / "machine.py"
    installed.parent.mkdir()
    installed.touch()
    for arguments in (("init", "-q"), ("add", "."), ("commit", "-q", "-m", "theirs")):
        subprocess.run([*git, *arguments], check=True)
    monkeypatch.setattr(machine, "__file__", str(installed))
    assert machine.commit() is None
    subprocess.run([*git, "add", "-f", str(installed)], check=True)
    assert re.fullmatch("[0-9a-f]{40}-dirty", machine.commit() or "")


def test_records_are_plain_json(tmp_path):
    record = dataclasses.replace(a_record(), values={"frames": [1, 2], "returns": [0.5, 1.0]})
    append_record(tmp_path / "records.jsonl", record)
    assert read_records(tmp_path / "records.jsonl") == [record]


def test_seconds_of_a_busy_machine_are_not_kept(tmp_path, monkeypatch):
    spent = iter([0.0, 1e6])
    monkeypatch.setattr(measure, "seconds_of_machine", lambda: next(spent))
    monkeypatch.setattr(measure, "run_command", lambda arguments: (0, []))
    case = Case("one", (COMMAND,), lambda printed, folder: {"frames": [1], "seconds": [2.0]})
    figure = dataclasses.replace(a_figure(), cases=lambda scale: [case])
    measure.measure_figures([figure], "laptop", tmp_path, print, lambda: None)
    (record,) = read_records(tmp_path / "records.jsonl")
    assert record.is_busy
    assert record.values == {"frames": [1]}


def test_larger_networks_are_judged_by_frames_and_by_seconds_where_they_count():
    figure = FIGURES["larger-networks"]
    curve = {"frames": [1000, 2000, 3000], "seconds": [5.0, 9.0, 12.0]}
    measured = {
        case.name: {**curve, "returns": [1, 16, 20] if "-8-" in case.name else [16, 18, 20]}
        for case in figure.cases("laptop")
    }
    judged = figure.judge(measured)
    assert judged.outcome is Outcome.REPRODUCED
    assert "8 channels and 1 block: 2 K in 9 s" in judged.reason
    worse = {name: {**values, "returns": [1, 2, 3]} for name, values in measured.items()}
    assert figure.judge(worse).outcome is Outcome.NOT_REPRODUCED
    records = [Record(figure.name, name, "laptop", v, {}) for name, v in measured.items()]
    assert verdict(figure, records).outcome is Outcome.SHAPE
