"""The results suite: its statistics, one tiny cell from its command to its page, and its table."""

import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from podracer.io.entry_points import PACKAGES, installed

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))  # scripts; behind the tests, which have the same names

import cells  # noqa: E402
import records  # noqa: E402
import scores  # noqa: E402

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


# --- the table ------------------------------------------------------------------------------------

OF_ABSENT_PACKAGES = {x for names in PACKAGES.values() for x in names} - installed("recipes").keys()
HERE = [cell for cell in cells.CELLS if cell.command.split()[0] not in OF_ABSENT_PACKAGES]


def test_what_was_measured_has_the_settings_of_its_cell():
    """A field or a recipe's default that is new must not make old scores those of other settings.

    When these were measured, rates fell over whole chunks, Craftax had a long discount, and CrossQ,
    now of a package, was the core's SAC with settings.
    """
    changed = {f"minatar-{game.lower()}/podracer/pqn" for game in cells.GAMES}
    changed |= {"craftax-classic/podracer/ppo-gtrxl"}
    groups = records.newest(records.read())
    changed |= {name for name in groups if "/podracer/crossq" in name}
    measured = [cell for cell in HERE if cell.name in groups]
    assert len(measured) > 30  # more with packages
    different = {
        cell.name
        for cell in measured
        if groups[cell.name][0]["configuration"]
        != cells.configuration_of(cells.experiment_of(cell.command))
    }
    assert different == changed & {cell.name for cell in HERE}
