"""Compute a run's score, for tables, reports and the terminal alike.

A score is never more than what was measured. A learner that met a fault has none, and an
evaluation whose episodes did not end, or whose mean is not finite, is no final score; an earlier
one does not take its place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from podracer.scores.statistics import final_mean

DIVERGED, UNFINISHED = "diverged", "unfinished evaluation"
NOT_FINITE, NOT_EVALUATED = "evaluation without a finite mean", "no evaluation"


def has_fault(record: Mapping[str, Any]) -> bool:
    """Return whether the learner of a record met a fault, from which on it learned no more."""
    return record.get("episodes", 0) is None


def whole_return(record: Mapping[str, Any]) -> float | None:
    """Return the mean return of a record's evaluation.

    None without one, after a fault, and if episodes did not end: such a mean is no score, never the
    best, and reaches no target.
    """
    value = record.get("evaluation_return")
    is_whole = (
        isinstance(value, int | float)
        and math.isfinite(value)
        and not record.get("evaluation_unfinished")
        and not has_fault(record)
    )
    return value if is_whole else None


def best_return(records: Iterable[Mapping[str, Any]]) -> float | None:
    """Return the highest mean return of the evaluations of whole episodes, None without one."""
    returns = map(whole_return, records)
    return max((value for value in returns if value is not None), default=None)


def returns_of(record: Mapping[str, Any], key: str) -> np.ndarray:
    """Return each pod's mean return in a record, f64 `[P]`, NaN where there is no `whole_return`.

    A fault leaves the returns of the last sound state in an evaluation.
    """
    returns = np.array(record[key], float)
    if key == "evaluation_return" and "episodes" in record:
        returns[[episodes is None for episodes in record["episodes"]]] = np.nan
    if key == "evaluation_return":
        returns[np.asarray(record.get("evaluation_unfinished", 0)) > 0] = np.nan
    returns[~np.isfinite(returns)] = np.nan
    return returns


def final_score(
    records: Sequence[Mapping[str, Any]], *, has_diverged: bool = False
) -> tuple[float, str]:
    """Return a run's mean return in its last evaluation and "", or NaN and why there is none.

    Of a run that is not evaluated it is the mean return at the end of training.
    """
    if has_diverged:
        return math.nan, DIVERGED
    evaluations = [record for record in records if "evaluation_return" in record]
    if not evaluations:
        values = (record.get("episode_return") for record in records)
        finite = [x for x in values if isinstance(x, int | float) and math.isfinite(x)]
        mean = final_mean(np.array(finite, float))
        return (math.nan, NOT_EVALUATED) if mean is None else (mean, "")
    value = whole_return(evaluations[-1])
    if value is not None:
        return value, ""
    if has_fault(evaluations[-1]):  # also if the pod started again from a sound one since
        return math.nan, DIVERGED
    is_partial = evaluations[-1].get("evaluation_unfinished")
    return math.nan, UNFINISHED if is_partial else NOT_FINITE
