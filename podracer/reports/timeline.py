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
# The working stages of an actor as a bottleneck: name, and advice.
_ADVICE = {
    "actor_time_environment": ("Environments are", "more environment threads or cores"),
    "actor_time_inference": ("Inference is", "more actor devices or a smaller network"),
    "actor_time_transfer": ("Transfer is", "smaller observations, such as bytes, not floats"),
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
    names = [f"<b>{html.escape(run.name)}</b>: " if len(runs) > 1 else "" for run in runs]
    texts = [html.escape(verdict(run)) for run in runs]
    return "".join(f"<p>{n}{text}</p>" for n, text in zip(names, texts, strict=True) if text)


def utilization_facts(run: RunRecords) -> dict[str, str]:
    """Return the facts about utilization for the summary of a Sebulba run."""
    facts = {}
    mean, maximum = (run.series(key, "updates")[1] for key in ("lag_mean", "lag_max"))
    if len(mean) and len(maximum):
        facts["Policy lag"] = f"{mean.mean():.2g} mean, {maximum.max():.0f} max"
    if shares := time_shares(run):
        actors, learner = percent(shares.actors_wait), percent(shares.learner_waits)
        facts["Idle"] = f"actors {actors}, learner {learner}"
    counts = run.series("environment_faults", "updates")[1]  # they restart at each resume
    if faults := counts[:-1][np.diff(counts) < 0].sum() + counts[-1:].sum():
        facts["Environment faults"] = f"{faults:,.0f}"
    if run.last("emulator_frames") is not None:
        facts["Emulator frames"] = compact(run.last("emulator_frames"))
    return facts


def time_shares(run: RunRecords) -> Shares | None:
    """Return the shares over the whole run, or None if they were not recorded.

    Records that include compilation are left out if there are others: each is the first after a
    start or a resume, when actors also create their environments and fill the queue.
    """
    keys = [*ACTOR_STAGES, *LEARNER_STAGES]
    rows = [[record.get(key) for key in (*keys, "time_compile")] for record in run.records]
    table = np.nan_to_num(np.array(rows, float).reshape(-1, len(keys) + 1), posinf=0, neginf=0)
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
    """Return which side is the bottleneck of a run, and what would help; empty if unknown."""
    shares = time_shares(run)
    if shares is None:
        return ""
    bottleneck, advice = _bottleneck(shares, has_lag=run.settings.get("driver.policy_lag") != "0")
    parts = [
        f"actors spend {percent(shares.actors_wait)} of their time waiting for the learner",
        f"it waits {percent(shares.learner_waits)} of its own",
    ]
    if shares.learner_reports >= 2 * _MATTERS:
        parts.append(f"and evaluates, saves and logs {percent(shares.learner_reports)}")
    stages = [f"{key.split('_')[-1]} {percent(x)}" for key, x in shares.acting.items()]
    is_of_actors = shares.learner_waits >= max(_MATTERS, _CLEAR * shares.actors_wait)
    details = f" Actors: {', '.join(stages)}." if stages and is_of_actors else ""
    return f"{bottleneck}: {', '.join(parts)}.{details} {advice}"


def _bottleneck(shares: Shares, *, has_lag: bool) -> tuple[str, str]:
    """Return the bottleneck and advice, each the beginning or the end of a sentence."""
    actors_wait, learner_waits, reports, acting = shares
    if max(actors_wait, learner_waits) < _MATTERS:
        return "Neither is the bottleneck", "More speed takes more of both."
    if actors_wait >= _CLEAR * learner_waits and reports > 1 - learner_waits - reports:
        return "Evaluating and saving is the bottleneck", "Try fewer evaluations."
    if actors_wait >= _CLEAR * learner_waits:
        return "The learner is the bottleneck", "Try more learner devices or a smaller batch."
    if learner_waits >= _CLEAR * actors_wait:
        name, advice = "Actors are", "more actor devices or threads"
        first, second = [*acting][:2] or ["", ""]
        if acting and acting[first] >= _STANDS_OUT * acting[second]:
            name, advice = _ADVICE[first]
        return f"{name} the bottleneck", f"Try {advice}."
    if not has_lag:
        return "They take turns, as the lag is 0", "A lag of 1 lets them work side by side."
    advice = "a larger queue or lag, which evens out bursts"
    advice = "fewer evaluations first" if reports >= 2 * _MATTERS else advice
    return "No bottleneck stands out", f"Try {advice}."
