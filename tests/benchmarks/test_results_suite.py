"""The results suite: its statistics, one tiny cell from its command to its page, and its table."""

import argparse
import json
import math
import sys
from pathlib import Path

import numpy as np
import pytest
from child import environment
from scipy import stats

from podracer.io.entry_points import PACKAGES, installed

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))  # scripts; behind the tests, which have the same names

import cells  # noqa: E402
import published  # noqa: E402
import records  # noqa: E402
import references  # noqa: E402
import results_page  # noqa: E402
import results_suite  # noqa: E402
import scores  # noqa: E402

TINY = cells.Cell(
    "Catch", "catch", "a2c",
    "catch_a2c --frames 2048 --num-envs 16 --updates-per-chunk 1 --evaluations 2 "
    "--evaluation-episodes 8",
    2, 1, ("rejax/a2c",),
)  # fmt: skip
HOST = TINY._replace(agent="host", command="cartpole_sebulba --frames 2048", seeds=2, references=())


# --- statistics -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seeds", [1, 2, 3, 4, 5, 10, 11])
def test_the_interquartile_mean_pools_tasks_and_is_scipys_trimmed_mean(seeds):
    generator = np.random.default_rng(seeds)
    tasks = [generator.normal(size=seeds), generator.normal(size=seeds + 3)]
    expected = stats.trim_mean(np.concatenate(tasks), 0.25)
    assert scores.interquartile_mean(tasks) == pytest.approx(expected)


def test_the_probability_of_improvement_is_that_of_the_mann_whitney_statistic():
    generator = np.random.default_rng(0)
    pairs = [
        (generator.integers(5, size=n), generator.integers(5, size=m)) for n, m in ((7, 5),) * 3
    ]
    ours, theirs = zip(*pairs, strict=True)
    expected = [stats.mannwhitneyu(x, y).statistic / (len(x) * len(y)) for x, y in pairs]
    assert scores.improvement(ours, theirs) == pytest.approx(np.mean(expected))
    assert scores.improvement(theirs, ours) == pytest.approx(1 - np.mean(expected))


@pytest.mark.slow
def test_intervals_are_those_of_a_slow_stratified_bootstrap():
    generator = np.random.default_rng(5)
    ours = [generator.normal(size=6), generator.normal(1, size=10)]
    theirs = [generator.normal(size=4), generator.normal(size=10)]
    slow = np.random.default_rng(11)
    means, chances = [], []
    for _ in range(2000):
        drawn = [[slow.choice(task, len(task)) for task in side] for side in (ours, theirs)]
        means.append(stats.trim_mean(np.concatenate(drawn[0]), 0.25))
        wins = [
            np.mean([(a > b) + 0.5 * (a == b) for a in x for b in y])
            for x, y in zip(*drawn, strict=True)
        ]
        chances.append(np.mean(wins))
    for interval, sample in (
        (scores.interquartile_interval(ours), means),
        (scores.improvement_interval(ours, theirs), chances),
    ):
        np.testing.assert_allclose(interval, np.percentile(sample, [2.5, 97.5]), atol=0.04)


# --- a tiny cell ----------------------------------------------------------------------------------


@pytest.fixture
def options(tmp_path, monkeypatch):
    monkeypatch.setattr(cells, "CELLS", (TINY, HOST))
    for name, value in environment().items():  # of the child
        monkeypatch.setenv(name, value)
    out = tmp_path / "suite.jsonl"
    return argparse.Namespace(scratch=tmp_path / "runs", out=out, devices=1, seeds=None)


def worse(row):
    """A reference that is a little worse than a row of ours."""
    other = {"library": "rejax", "configuration": "x", "score": row["score"] - 0.5, "settings": {}}
    return {**row, **other}


@pytest.mark.slow
def test_a_cell_runs_is_skipped_when_it_has_its_scores_and_gives_a_page(options, tmp_path, capsys):
    assert results_suite.measure(TINY, options, math.inf)
    rows = records.read(options.out)
    assert [row["seed"] for row in rows] == [100, 101]
    for row in rows:
        assert row["frames"] == row["curve"][-1][0] == 2048
        assert row["score"] == pytest.approx(row["curve"][-1][1], abs=1e-4)
        assert len(row["curve"]) == 2
        assert row["evaluation"]["episodes"] == 8
        assert 1 <= row["distinct_episodes"] <= 8
        assert row["cpu_seconds"] > 0
        assert len(row["commit"].removesuffix("-dirty")) == 40
    assert results_suite.measure(TINY, options, -math.inf)  # no time, and none is needed
    assert records.read(options.out) == rows

    records.append(options.out, map(worse, rows))
    results_page.write(options.out, tmp_path)
    page = (tmp_path / "benchmarks" / "results.md").read_text()
    assert "| catch | **podracer a2c** | 2 | 2.05 k | greedy, 8 episodes" in page
    assert "| | rejax a2c | 2 | 2.05 k | the same |" in page
    assert "| Catch | 0 | 0 | 0 | 1 |  |" in page  # two seeds are too few
    assert "podracer sweep catch_a2c --frames 2048" in page
    assert "--seed 100 --seeds 2" in page
    assert "host" not in page  # was not measured
    assert (tmp_path / "docs" / "images" / "results-catch.png").read_bytes()[1:4] == b"PNG"

    results_suite.show(cells.CELLS, options.out)
    shown = capsys.readouterr().out.splitlines()
    assert "2/2" in shown[1]
    assert "0/2" in shown[2]


def page_of(options, folder, ours, theirs):
    """Return the page about scores of ours and of a reference, a seed each."""
    row = {
        "task": "catch", "library": "podracer", "agent": "a2c", "frames": 2048, "cpu_seconds": 1.0,
        "configuration": "y", "evaluation": {"policy": "greedy", "epsilon": 0.0, "episodes": 8},
        "distinct_episodes": 8,
    }  # fmt: skip
    for library, found in (("podracer", ours), ("rejax", theirs)):
        records.append(options.out, [
            {**row, "library": library, "seed": 100 + i, "score": x, "curve": [[2048, x]]}
            for i, x in enumerate(found)
        ])  # fmt: skip
    results_page.write(options.out, folder)
    return (folder / "benchmarks" / "results.md").read_text()


def test_five_seeds_of_each_have_an_interval_and_a_verdict(options, tmp_path):
    page = page_of(options, tmp_path, [3.0, 4, 5, 6, 7], [0.0, 0, 1, 1, 2])
    assert "| Catch | 1 | 0 | 0 | 0 | 1.00 [1.00, 1.00] |" in page
    assert "distinct) | 5 [3.67, 6.67] |" in page
    assert "| 1.00 [1.00, 1.00] | win |" in page


def test_scores_that_were_not_measured_alike_are_not_compared(options, tmp_path, capsys):
    row = {
        "task": "catch", "library": "podracer", "agent": "a2c", "seed": 100, "frames": 2048,
        "score": 1.0, "curve": [[2048, 1.0]], "configuration": "y", "cpu_seconds": 1.0,
        "evaluation": {"policy": "sampled", "epsilon": 0.0, "episodes": 8},
        "distinct_episodes": 8,
    }  # fmt: skip
    greedy = {**row["evaluation"], "policy": "greedy"}
    records.append(options.out, [row, {**worse(row), "evaluation": greedy}])
    results_page.write(options.out, tmp_path)
    assert "rejax" not in (tmp_path / "benchmarks" / "results.md").read_text().partition("##")[2]
    assert "not measured alike" in capsys.readouterr().err


# --- the table ------------------------------------------------------------------------------------

OF_ABSENT_PACKAGES = {x for names in PACKAGES.values() for x in names} - installed("recipes").keys()
HERE = [cell for cell in cells.CELLS if cell.command.split()[0] not in OF_ABSENT_PACKAGES]


@pytest.mark.slow
def test_names_in_the_table_are_unique_and_commands_are_experiments():
    names = [item.name for item in (*cells.CELLS, *cells.REFERENCES)]
    assert len(set(names)) == len(names)
    for cell in HERE:
        assert cells.experiment_of(cell.command).evaluations > 0
    known = {*names}
    assert {name for cell in cells.CELLS for name in cell.reference_names} <= known


def test_what_was_measured_has_the_settings_of_its_cell():
    """A field or a recipe's default that is new must not make old scores those of other settings.

    When these were measured, rates fell over whole chunks, and Craftax had a long discount.
    """
    changed = {f"minatar-{game.lower()}/podracer/pqn" for game in cells.GAMES}
    changed |= {"craftax-classic/podracer/ppo-gtrxl"}
    groups = records.newest(records.read())
    measured = [cell for cell in HERE if cell.name in groups]
    assert len(measured) > 50
    different = {
        cell.name
        for cell in measured
        if groups[cell.name][0]["configuration"]
        != cells.configuration_of(cells.experiment_of(cell.command))
    }
    assert different == changed & {cell.name for cell in HERE}


def test_a_reference_has_the_frames_and_the_evaluation_of_its_cell():
    for reference in (x for x in cells.REFERENCES if x.cell() in HERE):
        arguments = references.arguments_of(reference)
        experiment = cells.experiment_of(reference.cell().command)
        assert arguments["frames"] == experiment.frames
        assert arguments["episodes"] == experiment.evaluation_episodes
        json.dumps(reference.settings)


# --- published results ----------------------------------------------------------------------------


def test_the_published_scores_of_crossq_are_those_of_its_ten_seeds():
    found = published.curves()["halfcheetah", "crossq"][100_000]
    assert len(found) == 10
    assert np.mean(found) == pytest.approx(8112, abs=1)
