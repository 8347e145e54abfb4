"""Compute a configuration's score from its seeds, and list what is wrong with it.

A seed counts once, however many copies and repetitions of its run there are.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from podracer.scores.format import number
from podracer.scores.runs import RunRecords
from podracer.scores.score import NOT_EVALUATED
from podracer.scores.statistics import ENOUGH, bootstrap_interval, score_of_seeds

_NAMED = 8  # runs or seeds in a sentence


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

    @property
    def spread(self) -> str:
        """The 95 % interval in words; of few seeds the score of each."""
        if self.interval:
            return " to ".join(map(number, self.interval))
        is_listed = self.are_independent and 1 < len(self.values) < ENOUGH
        return ", ".join(map(number, self.values.tolist())) if is_listed else "-"


def score_of_runs(
    members: Sequence[RunRecords], other_configurations: Iterable[Sequence[RunRecords]] = ()
) -> Score:
    """Return the score of runs of one configuration.

    `other_configurations` are their runs: a seed that one of these has is missing here.
    """
    counted, repeated = count_seeds(members)
    is_evaluation = any(run.is_evaluated for run in counted)
    values, reasons = list[float](), dict[str, list[str]]()
    for run in counted:
        value, reason = run.final
        if is_evaluation and not run.is_evaluated and not run.has_diverged:
            reason = NOT_EVALUATED  # its return is another measure
        if reason:
            reasons.setdefault(reason, []).append(run.label)
        else:
            values.append(value)
    if unfinished := [run.label for run in counted if run.is_unfinished]:
        reasons["not at the end of training"] = unfinished
    marks = [
        f"{len(names)} of {len(counted)} {reason}"
        + (f" ({_listed(names)})" if len(names) < len(counted) else "")
        for reason, names in reasons.items()
    ]
    independent = are_independent(counted)
    other_seeds = {
        r.seed
        for runs in other_configurations
        if are_independent(runs)
        for r in count_seeds(runs)[0]
    }
    if missing := other_seeds - {run.seed for run in counted} if independent else set():
        marks.append(f"missing: seed {_listed(_in_order(missing))}")
    if repeated:
        marks.append(_listed([f"{name} is a {relation}" for name, relation in repeated.items()]))
    texts = dict[str, dict[str, None]]()
    for name, versions in (pair for run in counted for pair in run.versions.items()):
        texts.setdefault(name, {}).update(dict.fromkeys(versions))
    marks += [f"{name} {' and '.join(x)}" for name, x in texts.items() if len(x) > 1]
    return Score(
        np.array(values), len(counted), len(members), independent, is_evaluation, tuple(marks)
    )


def count_seeds(members: Sequence[RunRecords]) -> tuple[list[RunRecords], dict[str, str]]:
    """Return the runs that count, one for each seed in order, and by name what each other one is.

    Of runs with one configuration and seed the one counts that came to its end, and of several the
    one that began last. A copy has the id of its run, be it under another seed.
    """

    def precedence(run: RunRecords) -> tuple[bool, str, int, str]:
        started, updates = str(run.config.get("started", "")), run.last("updates") or 0
        return not run.is_unfinished, started, updates, str(run.identity)

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


def _listed(names: Sequence[str]) -> str:
    omitted = [f"{len(names) - _NAMED:,} more"] if len(names) > _NAMED else []
    return ", ".join([*names[:_NAMED], *omitted])
