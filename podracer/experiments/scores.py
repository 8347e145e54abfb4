"""The one reader of scores: what a table, a report, the live page and the terminal say of runs.

    records --final_score--> score of a run
    runs of one configuration --score_of_runs--> their mean and interval, and what is wrong with it

A score is never more than what was measured. A learner that met a fault has none, and an
evaluation whose episodes did not end, or whose mean is not finite, is no final score; an earlier
one does not take its place. A seed counts once.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from podracer.experiments.statistics import (
    ENOUGH,
    bootstrap_interval,
    final_mean,
    score_of_seeds,
)

if TYPE_CHECKING:
    from podracer.experiments.run_records import RunRecords

DIVERGED, UNFINISHED = "diverged", "unfinished evaluation"
NOT_FINITE, NOT_EVALUATED = "evaluation without a finite mean", "no evaluation"
_NAMED = 8  # runs or seeds in a sentence


# --- one run --------------------------------------------------------------------------------------


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
    if has_fault(evaluations[-1]):  # as of a pod that started again from a sound one since
        return math.nan, DIVERGED
    is_partial = evaluations[-1].get("evaluation_unfinished")
    return math.nan, UNFINISHED if is_partial else NOT_FINITE


# --- runs of one configuration --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Score:
    """Score of a configuration over its seeds, and what it leaves out."""

    values: np.ndarray
    """Final scores of the seeds that have one, f64 `[n]`."""
    num_seeds: int
    num_runs: int
    are_independent: bool
    is_evaluation: bool
    marks: tuple[str, ...]
    """What a reader must know before he takes the score, in words."""

    @property
    def is_whole(self) -> bool:
        """Whether every seed has a final score."""
        return 0 < len(self.values) == self.num_seeds

    @functools.cached_property
    def mean(self) -> float:
        """Score of the seeds that have one, see `score_of_seeds`; NaN if none has."""
        return float(score_of_seeds(self.values)) if len(self.values) else math.nan

    @property
    def rank(self) -> tuple[bool, float]:
        """Key to sort by, best first: a score that leaves out a seed comes after the others."""
        return not self.is_whole, -self.mean if math.isfinite(self.mean) else math.inf

    @functools.cached_property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of the score, None for few seeds and for pods that are dependent."""
        if len(self.values) < ENOUGH or not self.are_independent:
            return None
        low, high = bootstrap_interval(self.values)
        return float(low), float(high)


def score_of_runs(
    members: Sequence[RunRecords], beside: Iterable[Sequence[RunRecords]] = ()
) -> Score:
    """Return the score of runs of one configuration.

    `beside` are runs of other configurations: a seed that one of these has is missing here.
    """
    counted, repeated = count_seeds(members)
    is_evaluation = any("evaluation_return" in record for run in counted for record in run.records)
    finals = {run.name: run.final for run in counted}
    if is_evaluation:  # a run without one has another measure
        finals = {
            run.name: finals[run.name]
            if any("evaluation_return" in r for r in run.records) or run.has_diverged
            else (math.nan, NOT_EVALUATED)
            for run in counted
        }
    reasons: dict[str, list[str]] = {}
    for run in counted:
        if reason := finals[run.name][1]:
            reasons.setdefault(reason, []).append(run.label)
    if unfinished := [run.label for run in counted if run.is_unfinished]:
        reasons["not at the end of training"] = unfinished
    marks = [
        f"{len(names)} of {len(counted)} {reason}"
        + (f" ({_listed(names)})" if len(names) < len(counted) else "")
        for reason, names in reasons.items()
    ]
    independent = are_independent(counted)
    others = {r.seed for runs in beside if are_independent(runs) for r in count_seeds(runs)[0]}
    if missing := others - {run.seed for run in counted} if independent else set():
        marks.append(f"missing: seed {_listed(_in_order(missing))}")
    if repeated:
        marks.append(_listed([f"{name} is a {what}" for name, what in repeated.items()]))
    marks += _mixed_versions(counted)
    marks += dict.fromkeys(f"{(r.whole or r).name}: {edit}" for r in members for edit in r.edits)
    values = np.array([value for value, reason in finals.values() if not reason], float)
    return Score(values, len(counted), len(members), independent, is_evaluation, tuple(marks))


def count_seeds(members: Sequence[RunRecords]) -> tuple[list[RunRecords], dict[str, str]]:
    """Return the runs that count, one for each seed in order, and by name what each other one is.

    Of runs with one configuration and seed the one counts that came to its end, and of several the
    one that began last. A copy has the id of its run, be it under another seed. Runs whose
    configuration was edited come after the others.
    """

    def precedence(run: RunRecords) -> tuple[bool, bool, str, int, str]:
        started, updates = str(run.config.get("started", "")), run.last("updates") or 0
        return not run.edits, not run.is_unfinished, started, updates, str(run.identity)

    of_seed: dict[str, RunRecords] = {}
    of_identity: dict[Any, RunRecords] = {}
    repeated = {}
    for run in sorted(members, key=precedence, reverse=True):
        identity = run.identity or id(run)
        if original := of_identity.get(identity):
            repeated[run.name] = f"copy of {original.name}"
        elif original := of_seed.get(run.seed):
            repeated[run.name] = f"repetition of {original.name}"
        else:
            of_seed[run.seed] = of_identity[identity] = run
    # In one order, as resamples of the seeds depend on it.
    counted = [of_seed[seed] for seed in _in_order(of_seed)]
    return counted, {run.name: repeated[run.name] for run in members if run.name in repeated}


def _in_order(seeds: Iterable[str]) -> list[str]:
    return sorted(seeds, key=lambda seed: (len(seed), seed))


def are_independent(runs: Iterable[RunRecords]) -> bool:
    """Return whether no run is a pod that selects or averages."""
    return not any(run.config.get("experiment", {}).get("exchange") for run in runs)


def _mixed_versions(runs: Sequence[RunRecords]) -> list[str]:
    texts: dict[str, dict[str, None]] = {}
    for run in runs:
        for name, versions in run.versions.items():
            texts.setdefault(name, {}).update(dict.fromkeys(versions))
    return [f"{name} {' and '.join(of_name)}" for name, of_name in texts.items()
            if len(of_name) > 1]  # fmt: skip


def _listed(names: Sequence[str]) -> str:
    more = [f"{len(names) - _NAMED:,} more"] if len(names) > _NAMED else []
    return ", ".join([*names[:_NAMED], *more])
