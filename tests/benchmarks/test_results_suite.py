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


def test_the_interquartile_mean_is_the_mean_of_the_middle_half():
    assert scores.interquartile_mean([np.array([9.0, 1.0, 2.0, 3.0, 100.0, 4.0, -50.0, 2.5])]) == (
        pytest.approx((2.0 + 2.5 + 3.0 + 4.0) / 4)
    )


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


def test_a_known_probability_of_improvement():
    """Of 3 x 2 pairs ours wins 4 and draws 1."""
    ours, theirs = np.array([1.0, 3.0, 5.0]), np.array([1.0, 2.0])
    assert scores.improvement([ours], [theirs]) == pytest.approx(4.5 / 6)


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


def test_an_interval_that_holds_one_half_is_a_tie():
    low, high = np.arange(5.0), np.arange(5.0) + 10
    assert [scores.verdict(*pair) for pair in ((high, low), (low, high), (low, low))] == [
        "win", "loss", "tie",
    ]  # fmt: skip


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


def test_fewer_than_five_seeds_are_listed_and_count_nowhere(options, tmp_path):
    page = page_of(options, tmp_path, [3.0, 4, 5, 6, 7], [0.0, 2, 1])
    assert "| Catch | 0 | 0 | 0 | 1 |  |" in page
    assert "the same (8 distinct) | 1 (0, 1, 2) |" in page
    assert "|  | 3 seeds |" in page


def test_the_best_and_the_last_tenth_stand_beside_a_last_policy_that_collapsed(options, tmp_path):
    page_of(options, tmp_path, [3.0, 4, 5, 6, 7], [0.0, 0, 1, 1, 2])
    rows = records.read(options.out)
    for row in rows:  # ours was at its score plus 100, and plus 10 in its last tenth
        top, before = (x * (row["library"] == "podracer") for x in (100, 10))
        row["curve"] = [
            [1800, row["score"] + top], [1900, row["score"] + before], [2048, row["score"]],
        ]  # fmt: skip
    rows[-1]["curve_of"] = "training episodes"
    options.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    results_page.write(options.out, tmp_path)
    page = (tmp_path / "benchmarks" / "results.md").read_text()
    assert "distinct) | 5 [3.67, 6.67] | 10 | 105 | " in page
    assert "| 0.667 [0, 1.67] |  |  | " in page  # of training episodes


def test_each_seed_is_shown_where_they_are_in_two_groups(options, tmp_path):
    page = page_of(options, tmp_path, [500.0, 140, 500, 220, 500, 500], [100.0, 103, 101, 104, 110])
    assert "| 430 [250, 500] (140, 220, 4 x 500) |" in page
    assert "the same (8 distinct) | 103 [100, 108] |" in page  # half of a range of little


def test_what_was_not_measured_is_listed_with_its_hours(options, tmp_path, monkeypatch):
    alone = TINY._replace(agent="ppo", seeds=4, cpu_minutes=30, references=())
    monkeypatch.setattr(cells, "CELLS", (TINY._replace(seeds=5), alone))
    compiled = {"recipe": "catch_a2c", "target": "h100", "steps_per_update": 16}
    path = tmp_path / "compiled.jsonl"
    path.write_text(json.dumps({**compiled, "update_seconds_at_least": 0.5}) + "\n")
    monkeypatch.setattr(results_page, "COMPILED", path)
    page = page_of(options, tmp_path, [3.0, 4, 5, 6, 7], [0.0, 2, 1])
    _, _, missing = page.partition("## Not measured")
    assert missing.count("| catch |") == 1
    assert "| podracer ppo | 0 of 4 | 0.5 | 64 | catch |" in missing  # 2,048 frames of 1/32 s


def test_what_was_spent_is_the_sum_over_seeds_of_each_side(options, tmp_path):
    row = {"frames": 3_600_000, "cpu_seconds": 720.0}
    assert results_page.effort([row, row, row]) == "3 | 10.8 M | 0.6"
    page = page_of(options, tmp_path, [3.0, 4, 5, 6, 7], [0.0, 2, 1])
    (line,) = (line for line in page.splitlines() if line.startswith("| Catch | 5 |"))
    assert line.split(" | ")[4] == "3"


def test_an_interrupted_cell_continues_and_its_seconds_add_up(options, monkeypatch):
    calls = []

    def run(arguments, run, deadline):
        calls.append(arguments)
        run.mkdir(parents=True, exist_ok=True)
        (run / "config.json").write_text(json.dumps({"versions": {}, "device": {}}))
        with run.with_name(run.name + ".spent").open("a") as spent:
            print(1.5, 2.5, file=spent)
        record = {"updates": 8, "frames": 2048, "evaluation_return": 4.0}
        record["evaluation_distinct_episodes"] = 3.0
        (run / "metrics.jsonl").write_text(json.dumps(record) + "\n")
        return 75 if len(calls) == 1 else 0

    monkeypatch.setattr(results_suite, "run_podracer", run)
    assert not results_suite.measure(HOST, options, math.inf)
    assert records.read(options.out) == []
    assert results_suite.measure(HOST, options, math.inf)
    first, second, third = calls
    assert first[:2] == ["train", "cartpole_sebulba"]
    assert first[first.index("--seed") + 1] == "100"
    assert second == ["resume", first[first.index("--run-dir") + 1]]
    assert third[third.index("--seed") + 1] == "101"
    assert [row["cpu_seconds"] for row in records.read(options.out)] == [5.0, 2.5]


def test_the_first_seeds_of_a_cell_run_alone_and_the_others_later(options, monkeypatch):
    ran = []
    monkeypatch.setattr(results_suite, "run_podracer", lambda arguments, *_: ran.append(arguments))
    monkeypatch.setattr(
        results_suite, "rows_of",
        lambda cell, experiment, run, seeds: [
            {
                "task": cell.task, "library": "podracer", "agent": cell.agent, "seed": seed,
                "configuration": cells.configuration_of(experiment),
            }
            for seed in seeds
        ],
    )  # fmt: skip
    cell = TINY._replace(seeds=5)
    options.seeds = 2
    assert results_suite.measure(cell, options, math.inf)
    options.seeds = None
    assert results_suite.measure(cell, options, math.inf)
    assert [x[x.index("--seed") + 1 :][:3] for x in ran] == [
        ["100", "--seeds", "2"], ["102", "--seeds", "3"],
    ]  # fmt: skip


def test_a_queue_goes_on_with_the_first_line_that_lacks_a_seed(options, monkeypatch, tmp_path):
    ran = []
    monkeypatch.setattr(results_suite, "measure", lambda cell, *_: ran.append(cell) or len(ran) < 3)
    queue = tmp_path / "queue.txt"
    queue.write_text(f"# long ones\n{HOST.name} 1\n\n{TINY.name} 2  # then\n{HOST.name} 2\n")
    monkeypatch.setattr(sys, "argv", ["results_suite.py", "--queue", str(queue)])
    results_suite.main()
    assert ran == [HOST._replace(seeds=1), TINY._replace(seeds=2), HOST._replace(seeds=2)]


def test_the_projects_queue_names_cells_and_no_more_seeds_than_they_have():
    seeds = {cell.name: cell.seeds for cell in cells.CELLS}
    queue = results_suite.queued(Path(results_suite.__file__).with_name("queue.txt"))
    assert all(0 < cell.seeds <= seeds[cell.name] for cell in queue)


def test_a_run_that_fails_ends_the_suite_with_the_place_of_its_output(options, monkeypatch):
    monkeypatch.setattr(results_suite, "run_podracer", lambda *_: 72)
    with pytest.raises(SystemExit, match=r"ended with code 72: see .*\.log"):
        results_suite.measure(HOST, options, math.inf)


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


def test_published_scores_stand_beside_a_cell_and_count_nowhere(options, tmp_path, monkeypatch):
    """HalfCheetah's page with the scores of CrossQ's ten seeds, and P where ours has five."""
    cell = cells.Cell(
        "MuJoCo", "halfcheetah", "crossq", TINY.command, 5, 1, published=("crossq", "nobody")
    )
    monkeypatch.setattr(cells, "CELLS", (cell,))
    row = {
        "task": "halfcheetah", "library": "podracer", "agent": "crossq", "frames": 102_000,
        "cpu_seconds": 1.0, "configuration": "y", "distinct_episodes": 8,
        "evaluation": {"policy": "greedy", "epsilon": 0.0, "episodes": 8},
    }  # fmt: skip
    records.append(options.out, [
        {**row, "seed": 100 + i, "score": 20_000.0 + i, "curve": [[102_000, 20_000.0 + i]]}
        for i in range(5)
    ])  # fmt: skip
    results_page.write(options.out, tmp_path)
    page = (tmp_path / "benchmarks" / "results.md").read_text()
    (line,) = (line for line in page.splitlines() if "published" in line and line.startswith("|"))
    scores_of_paper = published.curves()["halfcheetah", "crossq"][100_000]
    assert len(scores_of_paper) == 10
    assert np.mean(scores_of_paper) == pytest.approx(8112, abs=1)
    middle = stats.trim_mean(sorted(scores_of_paper), 0.25)
    assert line.startswith("| | published crossq | 10 | 100 k | the authors' | ")
    assert middle == pytest.approx(
        float(line.split(" | ")[5].split(" ")[0].replace(",", "")), rel=0.02
    )
    assert line.endswith("| | 1.00 [1.00, 1.00] | |")
    assert "| wins |" not in page
    assert "nobody" not in page
