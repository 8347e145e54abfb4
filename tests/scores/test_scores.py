"""Scores of runs and seeds, from their files."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import shutil

import pytest
from charts import figures

from podracer import recipes
from podracer.config.serialization import to_json
from podracer.io.seal import seal_json
from podracer.reports import charts
from podracer.scores.facts import verdict
from podracer.scores.runs import RunRecords, members_of, read_run
from podracer.scores.seeds import count_seeds, score_of_runs

UPDATES = 10  # of the whole run
STEPS = 128 * 16  # of an update


EXPERIMENT = dataclasses.replace(
    recipes.find("catch"), frames=UPDATES * STEPS, evaluations=2, target_return=None
)


# --- one run --------------------------------------------------------------------------------------


def alone(directory):
    """Write one run that came to its end, and return its directory."""
    directory.mkdir()
    config = {
        "recipe": "catch", "experiment": to_json(EXPERIMENT), "started": "2030-01-28",
        "run": {"id": directory.name, "experiment": directory.name},
        "versions": {"podracer": "1", "jax": "0.10", "python": "3"},
    }  # fmt: skip
    seal_json(directory / "config.json", config)
    records = [
        {"updates": n, "frames": n * STEPS, "episodes": 8, "evaluation_return": value}
        for n, value in ((UPDATES // 2, 1000.0), (UPDATES, 1.5))
    ]
    lines = (json.dumps(record) + "\n" for record in records)
    (directory / "metrics.jsonl").write_text("".join(lines))
    return directory


def checkpoint(run, *names, updates=UPDATES, **metadata):
    """Write what a checkpoint says of the records."""
    seals = {}
    for name in names:
        content = (run / name).read_bytes()
        seals[name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    path = run / "checkpoints" / f"{updates:012}"
    path.mkdir(parents=True)
    totals = {"frames": updates * STEPS}
    meta = {"metadata": {"records": seals, "totals": totals, **metadata}}
    (path / "meta.json").write_text(json.dumps(meta))


def test_a_run_that_went_on_under_another_version_is_mixed(tmp_path):
    run = alone(tmp_path / "run")
    checkpoint(run, versions=[{"jax": "0.10"}, {"jax": "0.11"}, {"jax": "0.10"}])
    assert read_run(run).marks == ["jax 0.10, then 0.11"]
    for hostile in ("0.10", [5, None], {"jax": 1}, [{"jax": []}]):
        other = alone(tmp_path / f"{hash(str(hostile))}")
        checkpoint(other, versions=hostile)
        assert isinstance(read_run(other).marks, list)


@pytest.mark.parametrize(
    ("records", "crash", "score"),
    [
        ([{"evaluation_return": 2.0}, {}], {}, (2.0, "")),
        ([{"evaluation_return": 2.0}, {"evaluation_return": None}], {},
         "evaluation without a finite mean"),
        ([{"evaluation_return": 2.0}, {"evaluation_return": 9.0, "evaluation_unfinished": 1}], {},
         "unfinished evaluation"),
        ([{"evaluation_return": 2.0}, {"episodes": None}], {}, "diverged"),
        ([{"evaluation_return": 2.0, "episodes": None}, {"episodes": 3}], {}, "diverged"),
        ([{"evaluation_return": 2.0}], {"exception": "NonFiniteError"}, "diverged"),
        ([{"evaluation_return": 2.0}], {"exception": "OSError"}, (2.0, "")),
        ([{"episode_return": 3.0}, {"episode_return": None}], {}, (3.0, "")),
        ([{"episode_return": 3.0}, {"episodes": None}], {}, "diverged"),
        ([{}], {}, "no evaluation"),
        ([], {}, "no evaluation"),
    ],
)  # fmt: skip
def test_a_final_score_is_that_of_the_last_evaluation_or_there_is_none(records, crash, score):
    value, reason = RunRecords("run", {}, records, crash).final
    if isinstance(score, str):
        assert (math.isnan(value), reason) == (True, score)
    else:
        assert (value, reason) == score


def test_a_copy_under_another_seed_is_no_seed(tmp_path):
    run = alone(tmp_path / "run")
    copy = shutil.copytree(run, tmp_path / "copy")
    body = json.loads((copy / "config.json").read_text())
    body["experiment"]["seed"] = 5
    (copy / "config.json").write_text(json.dumps(body))
    counted, repeated = count_seeds([read_run(copy), read_run(run)])
    assert len(counted) == 1
    assert repeated in ({"copy": "copy of run"}, {"run": "copy of copy"})


def test_pods_under_a_selection_are_told_apart_by_their_place(tmp_path):
    """All of them may have one seed, as each was drawn with hyperparameters of its own."""
    pods = [{"seed": 0, "hyperparameters": [{"name": "x", "value": v}]} for v in range(3)]
    experiment = {"agent": {}, "exchange": {"kind": "Selection"}, "pods": pods}
    run = RunRecords("run", {"experiment": experiment, "run": {"id": "a"}}, [], {})
    series = [{"updates": 1, "evaluation_return": [1.0, 2.0, 6.0]}]
    members = members_of(run, series)
    other = RunRecords("copy", run.config, [], {})
    score = score_of_runs([*members, *members_of(other, series)])
    assert (score.num_seeds, score.num_runs, score.mean, score.interval) == (3, 6, 3.0, None)
    assert score.marks == tuple(
        [", ".join(f"copy pod {i} is a copy of run pod {i}" for i in (0, 1, 2))]
    )


@pytest.mark.parametrize(
    ("kind", "records", "score"),
    [
        ("DataEnvironment", [{"updates": 1, "episode_return": 9.0}], "no evaluation"),
        ("DataEnvironment", [{"updates": 1, "evaluation_return": 3.0}], ""),
        ("Catch", [{"updates": 1, "episode_return": 9.0}], ""),
        ("DataEnvironment", [{"updates": 1, "episodes": None}], "diverged"),
    ],
)
def test_returns_of_a_data_set_are_no_score(kind, records, score):
    run = RunRecords("run", {"environment": {"kind": kind}}, records, {})
    assert run.final[1] == score
    assert math.isnan(run.final_return) == (kind == "DataEnvironment")


# --- figures --------------------------------------------------------------------------------------


def test_a_mean_over_seeds_leaves_out_those_that_diverged():
    config = {"experiment": {}}
    sound, other = (
        RunRecords(name, config, [{"updates": i, "episode_return": value} for i in (1, 2)], {})
        for name, value in (("a", 1.0), ("b", 3.0))
    )
    records = [{"updates": 1, "episode_return": 99.0}, {"updates": 2, "episodes": None}]
    fault = RunRecords("c", config, records, {})
    panel = charts.Panel("Return", "episode_return")
    block = charts.curves("all", {"all": [sound, other, fault]}, [panel])
    traces = figures(block)["Return"]["data"]
    assert [x["meta"] for x in traces if "name" not in x] == ["a", "b", "c"]
    (mean,) = [x["curves"]["updates"][1] for x in traces if x.get("name") == "score"]
    assert set(mean) == {2}


def test_pods_of_a_later_round_go_on_with_its_frames():
    """Where the round began they had equally many, as far as is known."""
    config = {"experiment": {"pods": [{"seed": i, "hyperparameters": []} for i in range(2)]}}
    whole = [{"updates": 11, "frames": 340}, {"updates": 12, "frames": 370}]
    series = [{"updates": 11, "frames": [16, 14]}, {"updates": 12, "frames": [16, 14]}]
    members = members_of(RunRecords("p0r1", config, whole, {}), series)
    frames = [[record["frames"] for record in member.records] for member in members]
    assert frames == [[171, 187], [169, 183]]


def test_a_pod_has_its_own_start_of_a_schedule_and_a_selection_chooses_it():
    agent = {"learning_rate": {"kind": "Linear", "start": 0.5, "end": 0.0}, "discount": 0.9}
    values = [{"name": "learning_rate", "value": 0.1}, {"name": "discount", "value": 0.8}]
    pods = [{"seed": 0, "hyperparameters": values}]
    settings = []
    for exchange in (None, {"kind": "Selection"}):
        config = {"experiment": {"agent": agent, "pods": pods, "exchange": exchange}}
        (member,) = members_of(RunRecords("run", config, [], {}), [])
        names = ("learning_rate", "discount", "learning_rate.start", "learning_rate.end")
        settings.append([member.settings.get(f"agent.{name}") for name in names])
    chosen = "chosen by the selection"
    assert settings == [["0.1", "0.8", None, "0.0"], [chosen, chosen, None, "0.0"]]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        ({"actor_time_queue": 1.2}, "The learner is the bottleneck: actors spend 62 %"),
        ({"learner_time_collect": 0.9}, "Environments are the bottleneck: "),
        ({"learner_time_collect": 0.9, "actor_time_inference": 1.4}, "Inference is the bottleneck"),
        ({"learner_time_report": 2.0, "actor_time_queue": 1.2}, "Evaluating and saving is"),
        ({"actor_time_queue": 0.05, "learner_time_collect": 0.03}, "Neither is the bottleneck: "),
    ],
)
def test_a_sentence_names_the_bottleneck(seconds, words):
    busy = {"actor_time_environment": 0.52, "actor_time_inference": 0.2, "learner_time_learn": 0.9}
    start = {"time_compile": 20.0, "actor_time_transfer": 5.0, "learner_time_collect": 5.0}
    run = RunRecords("run", {"experiment": {}}, [start, busy | seconds], {})
    assert verdict(run).startswith(words)
