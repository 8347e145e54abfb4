"""A table, a report and the last lines say the same of runs, and no more than that.

What they should say is computed here once more, from how the files were made.
"""

from __future__ import annotations

import dataclasses
import hashlib
import html
import io
import json
import math
import re
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from charts import figures
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from podracer import recipes
from podracer.cli.pods import finish_sweep
from podracer.config.serialization import read_experiment, to_json
from podracer.drivers.population import Hyperparameter, Pod
from podracer.io.seal import seal_json
from podracer.reports import charts
from podracer.reports.run import write_report
from podracer.run.console import summarize
from podracer.run.sweep import configurations
from podracer.scores.format import number
from podracer.scores.runs import RunRecords, members_of, read_run
from podracer.scores.seeds import count_seeds, score_of_runs
from podracer.scores.statistics import bootstrap_interval

EXPERIMENT = dataclasses.replace(
    recipes.find("catch"), frames=10 * 128 * 16, evaluations=2, target_return=None
)
RATES = (0.001, 0.5)
UPDATES = 10  # of the whole run
STEPS = 128 * 16  # of an update
NO_SCORE = {
    "diverged": "diverged",
    "unfinished": "unfinished evaluation",
    "null": "evaluation without a finite mean",
}


@dataclasses.dataclass(frozen=True)
class Learner:
    """One learner: its place among the others, and what happened to it in its last evaluation."""

    seed: int
    rate: float
    outcome: str  # sound, or a key of NO_SCORE
    value: float  # return of the last evaluation


@dataclasses.dataclass(frozen=True)
class Made:
    """A directory with one learner or, as a sweep, several."""

    learners: tuple[Learner, ...]
    is_sweep: bool
    age: int  # of two runs of one seed the one of lower age began last
    is_finished: bool
    version: str
    copies: int


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def records_of(learner, updates):
    """Two evaluations, of which the first is sound and better than any last one."""
    sound = {"episodes": 8, "episode_return": 0.5}
    first, last = (
        {"updates": count, "frames": count * STEPS, **sound} for count in (updates // 2, updates)
    )
    first |= {"evaluation_return": 1000.0}
    last |= {"evaluation_return": learner.value}
    match learner.outcome:
        case "diverged":
            last |= {"episodes": None, "episode_return": None}
        case "unfinished":
            last |= {"evaluation_unfinished": 3}
        case "null":
            last |= {"evaluation_return": None}
    return [first, last]


def make(directory, made, name):
    """Write what a run or a sweep writes, sealed."""
    updates = UPDATES if made.is_finished else UPDATES - 4
    first, *_ = made.learners
    rate = [Hyperparameter("learning_rate", learner.rate) for learner in made.learners]
    pods = [Pod(learner.seed, (r,)) for learner, r in zip(made.learners, rate, strict=True)]
    experiment = EXPERIMENT.with_fields(
        {
            "agent": {"learning_rate": first.rate},
            "seed": first.seed,
            "pods": tuple(pods) if made.is_sweep else (),
        }
    )
    directory.mkdir()
    config = {
        "recipe": "catch", "experiment": to_json(experiment),
        "run": {"id": name, "experiment": name}, "started": f"2030-01-{28 - made.age:02}",
        "versions": {"podracer": "1", "jax": made.version, "python": "3"},
    }  # fmt: skip
    seal_json(directory / "config.json", config)
    series = [records_of(learner, updates) for learner in made.learners]
    if not made.is_sweep:
        write_lines(directory / "metrics.jsonl", series[0])
    else:
        keys = ("episodes", "episode_return", "evaluation_return")
        rows = [
            {"updates": at_once[0]["updates"]}
            | {key: [record[key] for record in at_once] for key in keys}
            | {"evaluation_unfinished": [r.get("evaluation_unfinished", 0) for r in at_once]}
            | {"frames": [updates // 2 * STEPS for _ in at_once]}  # since the one before
            for at_once in zip(*series, strict=True)
        ]
        write_lines(directory / "pods.jsonl", rows)
        whole = [
            {"updates": count, "frames": count * STEPS * len(pods), "evaluation_return": 5.0}
            for count in (row["updates"] for row in rows)
        ]
        write_lines(directory / "metrics.jsonl", whole)
    return experiment


values = st.floats(-100, 100).map(lambda x: round(x, 2))
outcomes = st.sampled_from(["sound", "sound", "sound", *NO_SCORE])


def learners(seed, rate):
    return st.builds(Learner, st.just(seed), st.just(rate), outcomes, values)


lone = st.tuples(st.integers(0, 6), st.sampled_from(RATES)).flatmap(
    lambda place: st.tuples(learners(*place))
)
grid = st.integers(1, 7).flatmap(
    lambda seeds: st.tuples(*(learners(seed, rate) for rate in RATES for seed in range(seeds)))
)


def directories(is_sweep, kind):
    return st.builds(
        Made, kind, st.just(is_sweep), st.integers(0, 20), st.sampled_from([True, True, False]),
        st.sampled_from(["0.10", "0.10", "0.11"]), st.sampled_from([0, 0, 1]),
    )  # fmt: skip


def expected(names, all_made):
    """What is to be said of each rate: counted learners, and the runs that count no seed."""
    groups = {}
    for rate in RATES:
        rows = [
            (made.is_finished or x.outcome == "diverged", -made.age, name, x)
            for name, made in zip(names, all_made, strict=True)
            for x in made.learners
            if x.rate == rate
        ]
        rows.sort(key=lambda row: row[:3], reverse=True)
        of_seed = {}
        for *_, name, learner in rows:
            of_seed.setdefault(learner.seed, (name, learner))
        num_runs = sum(
            1 + made.copies
            for made in all_made
            for learner in made.learners
            if learner.rate == rate
        )
        groups[rate] = (dict(sorted(of_seed.items())), num_runs)
    return groups


def words(of_seed):
    """The score in the words of a page: its mean, and its interval or none."""
    finals = np.array([x.value for _, x in of_seed.values() if x.outcome == "sound"])
    if not len(finals):
        return "-", None
    if len(finals) < 5:
        return number(float(finals.mean())), None
    low, high = bootstrap_interval(finals)
    mean = number(float(scipy.stats.trim_mean(finals, 0.25)))
    return mean, f"{number(float(low))} to {number(float(high))}"


def rows(page):
    """The rows of the table of scores by their first cells, as text."""
    table = page.partition("<h2>Scores</h2>")[2].partition("</section>")[0]
    found = (re.findall(r"<t[hd]>(.*?)</t", row) for row in re.findall("<tr>(.*?)</tr>", table))
    return {html.unescape(cells[0]): html.unescape(" | ".join(cells[1:])) for cells in found}


@settings(
    max_examples=40, deadline=None, derandomize=True, phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
@given(
    all_made=st.lists(directories(False, lone) | directories(True, grid), min_size=1, max_size=6)
)
@pytest.mark.slow
def test_all_outputs_say_the_same_scores_counts_and_intervals(all_made, monkeypatch, capsys):
    # The words count here, not the charts.
    monkeypatch.setattr(charts, "charts", lambda *_, **__: "")
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "runs"
        root.mkdir()
        names = [f"{index}" for index in range(len(all_made))]
        for name, made in zip(names, all_made, strict=True):
            make(root / name, made, name)
            for copy in range(made.copies):
                shutil.copytree(root / name, root / f"{name}-copy{copy}")
        paths = sorted(root.iterdir(), key=lambda path: path.name)
        page = write_report(paths, Path(folder) / "report.html").read_text()
        check_groups(page, expected(names, all_made), all_made)
        for name, made in zip(names, all_made, strict=True):
            if made.is_sweep:
                check_sweep(root / name, made, folder, capsys)
            else:
                check_lone(root / name, made.learners[0], page)


def check_groups(page, groups, all_made):
    """The report says of each configuration what is right."""
    reported = rows(page)
    for rate, (of_seed, num_runs) in groups.items():
        apart = f"learning_rate {rate}, " if all(of_seed for of_seed, _ in groups.values()) else ""
        seeds = f"{len(of_seed)} {'seed' if len(of_seed) == 1 else 'seeds'}"
        runs = "" if num_runs == len(of_seed) else f", {num_runs} runs"
        found = reported.get(f"catch, {apart}{seeds}{runs}")
        assert (found is not None) == (num_runs > 1)
        if found is None:
            continue
        mean, interval = words(of_seed)
        assert found.startswith(f"{mean} | {interval or ''}")
        assert (" to " in found.split(" | ")[1]) == (interval is not None)
        outcomes = [learner.outcome for _, learner in of_seed.values()]
        for outcome, reason in NO_SCORE.items():
            count = outcomes.count(outcome)
            assert (f"{count} of {len(of_seed)} {reason}" in found) == (count > 0), found
        others = {seed for other, _ in groups.values() for seed in other} - of_seed.keys()
        assert ("missing: seed " in found) == bool(others)
        counted = [all_made[int(name)] for name, _ in of_seed.values()]
        assert ("jax 0.1" in found) == (len({made.version for made in counted}) > 1)
        unfinished = sum(
            not made.is_finished and learner.outcome != "diverged"
            for made, (_, learner) in zip(counted, of_seed.values(), strict=True)
        )
        assert (f"{unfinished} of {len(of_seed)} not at the end" in found) == (unfinished > 0)


def check_sweep(directory, made, folder, capsys):
    """The table and the report of one sweep say the same."""
    alone = expected(["0"], [dataclasses.replace(made, copies=0)])
    finish_sweep(directory, read_experiment(directory))
    table = capsys.readouterr().out
    (directory / "best.json").unlink(missing_ok=True)
    reported = rows(write_report([directory], Path(folder) / "one.html").read_text())
    for configuration in configurations(directory):
        rate = configuration.hyperparameters[0].value
        of_seed, _ = alone[rate]
        (mean, interval), score = words(of_seed), configuration.score
        assert (number(score.mean), score.num_seeds) == (mean, len(of_seed))
        assert score.is_whole == all(x.outcome == "sound" for _, x in of_seed.values())
        assert (score.interval is None) == (interval is None)
        row = next(text for text in table.splitlines() if text.startswith(f"{rate} "))
        count = sum(x.outcome == "sound" for _, x in of_seed.values())
        assert row.split()[1] == mean
        assert row.split()[-1] == str(count)
        assert (interval or "") in row
        for mark in score.marks:
            assert f"learning_rate {rate}" in table
            assert mark in table
        found = [text for name, text in reported.items() if f"learning_rate {rate}," in name]
        assert len(found) == (len(of_seed) > 1)
        for text in found:
            assert text.startswith(f"{mean} | {interval or ''}")
            assert all(mark in text for mark in score.marks)


def check_lone(directory, learner, page):
    """The last lines of a run say what the row of the page says."""
    value = number(learner.value) if learner.outcome == "sound" else "-"
    out = io.StringIO()
    summarize(directory, file=out)
    reason = NO_SCORE.get(learner.outcome, "")
    assert f"evaluation {value} ({reason}{', ' if reason else ''}best " in out.getvalue()
    row = re.search(rf"<tr><th>{directory.name}</th>(.*?)</tr>", page)
    first = re.search(r"<dd>(.*?)</dd>", page) if row is None else re.search(">(.*?)<", row[1])
    assert first is not None
    assert first[1] == value
    assert reason in page


# --- one run --------------------------------------------------------------------------------------


def alone(directory, **changes):
    """Write one run that came to its end, and return its directory."""
    learner = Learner(0, RATES[0], "sound", 1.5)
    made = Made((learner,), False, 0, True, "0.10", 0)
    make(directory, dataclasses.replace(made, **changes), directory.name)
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


def test_pods_with_a_metric_of_several_numbers_have_records_and_scores():
    pods = [{"seed": seed, "hyperparameters": []} for seed in range(2)]
    run = RunRecords("run", {"experiment": {"agent": {}, "pods": pods}}, [], {})
    sound = {"evaluation_return": [1.0, 2.0], "share": [[0.2, None], [0.5, 0.5]]}
    nested = {"evaluation_return": [[1.0], [2.0]], "share": [[[0.2]], [[0.5]]]}
    series = [
        {"updates": 1, **sound},
        {"updates": 2, **sound, "share": nested["share"]},
        {"updates": 3, **sound, "evaluation_return": nested["evaluation_return"]},
    ]
    members = members_of(run, series)
    assert [[record["updates"] for record in member.records] for member in members] == [[1], [1]]
    assert [member.records[0]["share"] for member in members] == sound["share"]
    assert [member.final for member in members] == [(1.0, ""), (2.0, "")]


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
