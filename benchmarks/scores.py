"""Statistics of scores over seeds and tasks (Agarwal et al. 2021, arXiv 2108.13264).

Scores are a list with an array `[seeds]` for each task; tasks may differ in their seeds. Intervals
are 95 % percentile intervals of a bootstrap that is stratified: seeds are drawn with replacement
within each task. The same scores have the same interval at every call.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

RESAMPLES = 2000
Scores = Sequence[np.ndarray]


def interquartile_mean(scores: Scores) -> float:
    """Mean of the middle half of all scores of all tasks; of fewer than four scores, of all."""
    return float(_middle_mean(np.concatenate(scores)[None])[0])


def interquartile_interval(scores: Scores) -> tuple[float, float]:
    """Interval of the interquartile mean."""
    generator = np.random.default_rng(0)
    draws = [_resampled(task, generator) for task in scores]
    return _interval(_middle_mean(np.concatenate(draws, axis=1)))


def improvement(candidate: Scores, baseline: Scores) -> float:
    """Probability that a seed of the candidate beats one of the baseline, a draw counting half: the
    mean over the tasks of the Mann-Whitney statistic."""
    pairs = zip(candidate, baseline, strict=True)
    return float(np.mean([_wins(x[None], y[None])[0] for x, y in pairs]))


def improvement_interval(candidate: Scores, baseline: Scores) -> tuple[float, float]:
    """Interval of the probability of improvement; both sides are resampled."""
    generator = np.random.default_rng(0)
    draws = [
        _wins(_resampled(x, generator), _resampled(y, generator))
        for x, y in zip(candidate, baseline, strict=True)
    ]
    return _interval(np.mean(draws, axis=0))


def verdict(candidate: np.ndarray, baseline: np.ndarray) -> str:
    """Return `win`, `loss` or `tie`: on which side of one half the interval of the improvement
    lies, a tie where it holds one half."""
    low, high = improvement_interval([candidate], [baseline])
    return "win" if low > 0.5 else "loss" if high < 0.5 else "tie"


def is_split(values: np.ndarray) -> bool:
    """Return whether one gap parts seeds into two groups, each of which the mean hides.

    It is more than half of the range, and a fifth of the largest score without its sign.
    """
    gap = np.max(np.diff(np.sort(values)))
    return bool(gap > 0.5 * np.ptp(values) and gap > 0.2 * np.max(np.abs(values)))


def _resampled(task: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Return resamples `[RESAMPLES, seeds]` of the scores of a task."""
    return task[generator.integers(len(task), size=(RESAMPLES, len(task)))]


def _middle_mean(scores: np.ndarray) -> np.ndarray:
    """Return the mean over the middle half of the last axis."""
    cut = scores.shape[-1] // 4
    return np.sort(scores, axis=-1)[..., cut : scores.shape[-1] - cut].mean(axis=-1)


def _wins(candidate: np.ndarray, baseline: np.ndarray) -> np.ndarray:
    """Return the share of pairs that the candidate wins, for each row of `[rows, seeds]`."""
    difference = np.sign(candidate[:, :, None] - baseline[:, None, :])
    return (0.5 + 0.5 * difference).mean(axis=(1, 2))


def _interval(values: np.ndarray) -> tuple[float, float]:
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)
