"""Utilization of a Sebulba run: how actors and learner spend their time, and which one waits."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from podracer.scores.format import compact, percent
from podracer.scores.runs import RunRecords

ACTOR_STAGES = (
    "actor_time_environment", "actor_time_inference", "actor_time_transfer",
    "actor_time_parameters", "actor_time_queue",
)  # fmt: skip
LEARNER_STAGES = ("learner_time_learn", "learner_time_report", "learner_time_collect")
# The working stages of an actor as a bottleneck: name, activity, advice.
_ADVICE = {
    "actor_time_environment": (
        "Environments are",
        "step environments",
        "more environment threads or cores",
    ),
    "actor_time_inference": (
        "Inference is",
        "choose actions",
        "more actor devices or a smaller network",
    ),
    "actor_time_transfer": (
        "Transfer is",
        "send trajectories",
        "smaller observations, such as bytes, not floats",
    ),
}
_MATTERS = 0.1  # share of waiting that is mentioned
_CLEAR = 2.0  # one side waits this many times as long as the other: it waits for it
_STANDS_OUT = 1.25  # a stage of actors that takes this many times as long as the next


class Shares(NamedTuple):
    """Fractions of time, from 0 to 1, that actors and learner spent in each stage."""

    actors_wait: float
    learner_waits: float
    learner_reports: float
    acting: dict[str, float]  # the working stages of actors by key, largest first, or nothing


def utilization_section(runs: Sequence[RunRecords]) -> str:
    """Return the utilization section of a report: a verdict on each run."""
    verdicts = {run.name: html.escape(verdict(run)) for run in runs}
    parts = [
        f"<p>{f'<b>{html.escape(name)}</b>: ' if len(runs) > 1 else ''}{text}</p>"
        for name, text in verdicts.items()
        if text
    ]
    return "".join(parts)


def utilization_facts(run: RunRecords) -> dict[str, str]:
    """Return the facts about utilization for the summary of a Sebulba run."""
    facts = {}
    mean, maximum = (run.series(key, "updates")[1] for key in ("lag_mean", "lag_max"))
    if len(mean) and len(maximum):
        facts["Policy lag"] = f"{mean.mean():.2g} mean, {maximum.max():.0f} max"
    if shares := time_shares(run):
        actors, learner = percent(shares.actors_wait), percent(shares.learner_waits)
        facts["Idle"] = f"actors {actors}, learner {learner}"
    if faults := _total(run.series("environment_faults", "updates")[1]):
        facts["Environment faults"] = f"{faults:,.0f}"
    if run.last("emulator_frames") is not None:
        facts["Emulator frames"] = compact(run.last("emulator_frames"))
    return facts


def _total(counts: np.ndarray) -> float:
    """Return the last value of a cumulative count `[n]` that restarts at each resume."""
    return float(counts[:-1][np.diff(counts) < 0].sum() + counts[-1:].sum())


def time_shares(run: RunRecords) -> Shares | None:
    """Return the shares over the whole run, or None if they were not recorded.

    Records that include compilation are left out if there are others: each is the first after a
    start or a resume, when actors also create their environments and fill the queue.
    """
    keys = [*ACTOR_STAGES, *LEARNER_STAGES]
    table = _table(run, (*keys, "time_compile"))
    warm = table[table[:, -1] == 0]
    total = dict(zip(keys, (warm if warm[:, :-1].any() else table).sum(axis=0), strict=False))
    acting = {key: total[key] for key in _ADVICE}
    waits = total["actor_time_parameters"] + total["actor_time_queue"]
    actor, learner = sum(acting.values()) + waits, sum(total[key] for key in LEARNER_STAGES)
    if actor and learner:
        ordered = sorted(acting.items(), key=lambda item: -item[1])
        collects, reports = total["learner_time_collect"], total["learner_time_report"]
        shares = {key: float(seconds / actor) for key, seconds in ordered}
        return Shares(float(waits / actor), float(collects / learner), reports / learner, shares)
    idle = [run.series(key, "updates")[1] for key in ("actor_idle", "learner_idle")]
    if not all(map(len, idle)):
        return None
    return Shares(float(idle[0].mean()), float(idle[1].mean()), 0.0, {})


def verdict(run: RunRecords) -> str:
    """Say which side is the bottleneck of a run and what would help; empty if unknown."""
    shares = time_shares(run)
    if shares is None:
        return ""
    actors, learner = percent(shares.actors_wait), percent(shares.learner_waits)
    sentence = f"actors spend {actors} of their time waiting for the learner"
    sentence += f", it waits {learner} of its own"
    if max(shares[:2]) < _MATTERS:
        return f"Neither is the bottleneck: {sentence}. More speed takes more of both."
    if shares.actors_wait >= _CLEAR * shares.learner_waits:
        return _learner_bound(shares)
    if shares.learner_waits >= _CLEAR * shares.actors_wait:
        return _actor_bound(shares)
    if run.settings.get("driver.policy_lag") == "0":
        return (
            f"They take turns, as the lag is 0: {sentence}. A lag of 1 lets them work side by side."
        )
    if shares.learner_reports >= 2 * _MATTERS:
        reports = percent(shares.learner_reports)
        return (
            f"No bottleneck stands out: {sentence}, and evaluating, saving and logging takes it "
            f"{reports}. Try fewer evaluations first."
        )
    return (
        f"No bottleneck stands out: {sentence}. Try a larger queue or lag, which evens out bursts."
    )


def _learner_bound(shares: Shares) -> str:
    actors = f"actors spend {percent(shares.actors_wait)} of their time waiting for it"
    if shares.learner_reports > 1 - shares.learner_waits - shares.learner_reports:
        return (
            f"Evaluating and saving is the bottleneck: {actors}, the learner does little else "
            f"for {percent(shares.learner_reports)} of its own. Try fewer evaluations."
        )
    return (
        f"The learner is the bottleneck: {actors}, it waits {percent(shares.learner_waits)} "
        "of its own. Try more learner devices or a smaller batch."
    )


def _actor_bound(shares: Shares) -> str:
    learner = f"the learner spends {percent(shares.learner_waits)} of its time waiting for"
    if not shares.acting:
        waits = f"they wait {percent(shares.actors_wait)} of their own"
        return (
            f"Actors are the bottleneck: {learner} them, {waits}. "
            "Try more actor devices or threads."
        )
    (key, largest), (second, next_most), *_ = shares.acting.items()
    name, does, helps = _ADVICE[key]
    does = f"{does} {percent(largest)}"
    if largest >= _STANDS_OUT * next_most:
        return f"{name} the bottleneck: {learner} actors, they {does} of theirs. Try {helps}."
    return (
        f"Actors are the bottleneck: {learner} them, they {does} and {_ADVICE[second][1]} "
        f"{percent(next_most)} of theirs. Try more actor devices or threads."
    )


def _table(run: RunRecords, keys: Sequence[str]) -> np.ndarray:
    """Return metrics as f64 `[records, keys]`; missing and non-finite values are 0."""
    rows = [[record.get(key) for key in keys] for record in run.records]
    return np.nan_to_num(np.array(rows, float).reshape(-1, len(keys)), posinf=0, neginf=0)
