"""Utilization of a Sebulba run: how actors and learner spend their time, and which one waits."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from podracer.reports.charts import COLORS, Figure, LegendEntry, charts, figure, trace
from podracer.reports.console import compact, percent
from podracer.scores.runs import RunRecords

# Stages from the bottom up: key, label, color. Warm colors are for waiting.
ACTOR_STAGES = (
    ("actor_time_environment", "steps environments", "#3f8fdb"),
    ("actor_time_inference", "chooses actions", "#2ca58d"),
    ("actor_time_transfer", "sends trajectories", "#a99be6"),
    ("actor_time_parameters", "waits for parameters", "#f5bf57"),
    ("actor_time_queue", "waits for the learner", "#e8746d"),
)
LEARNER_STAGES = (
    ("learner_time_learn", "learns", "#3f8fdb"),
    ("learner_time_report", "reports and saves", "#8fa3b8"),
    ("learner_time_collect", "waits for trajectories", "#e8746d"),
)
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
_DISTANCE = (
    ("Policy lag, mean", "lag_mean", {"rangemode": "tozero"}),
    ("Policy lag, maximum", "lag_max", {"rangemode": "tozero"}),
    ("Queues that are full", "queue_occupancy", {"range": [0, 1], "tickformat": ".0%"}),
)
_DRAWN = (
    *(key for key, *_ in (*ACTOR_STAGES, *LEARNER_STAGES)),
    *(key for _, key, _ in _DISTANCE),
)
_UNKNOWN = "This run did not record how long each waited."
_RUNS = 4  # curve at most
_BINS = 150  # in one chart at most
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
    """Return the utilization section of a report: verdicts, and charts of the first runs."""
    named, runs = len(runs) > 1, [run for run in runs if verdict(run) or _has(run, _DRAWN)]
    parts = []
    for index, run in enumerate(runs):
        name = f"<b>{html.escape(run.name)}</b>: " if named else ""
        parts.append(f"<p>{name}{html.escape(verdict(run) or _UNKNOWN)}</p>")
        parts.append(_charts(run) if index < _RUNS else "")
    if len(runs) > _RUNS:
        parts.append(f"<small>Charts are shown for the first {_RUNS} runs.</small>")
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
    keys = [key for key, *_ in (*ACTOR_STAGES, *LEARNER_STAGES)]
    table = _table(run, (*keys, "time_compile"))
    warm = table[table[:, -1] == 0]
    total = dict(zip(keys, (warm if warm[:, :-1].any() else table).sum(axis=0), strict=False))
    acting = {key: total[key] for key in _ADVICE}
    waits = total["actor_time_parameters"] + total["actor_time_queue"]
    actor, learner = sum(acting.values()) + waits, sum(total[key] for key, *_ in LEARNER_STAGES)
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


def _has(run: RunRecords, keys: Sequence[str]) -> bool:
    return any(len(run.series(key, "seconds")[1]) for key in keys)


def _table(run: RunRecords, keys: Sequence[str]) -> np.ndarray:
    """Return metrics as f64 `[records, keys]`; missing and non-finite values are 0."""
    rows = [[record.get(key) for key in keys] for record in run.records]
    return np.nan_to_num(np.array(rows, float).reshape(-1, len(keys)), posinf=0, neginf=0)


def _charts(run: RunRecords) -> str:
    """Draw the stages of actors and learner over time, and how far actors are behind."""
    figures, legend = [], []
    for title, stages in (("Actors", ACTOR_STAGES), ("Learner", LEARNER_STAGES)):
        stretches = segments(run, [key for key, *_ in stages])
        if stretches:
            figures.append(_stages(f"{title}: share of time", stages, stretches))
            legend += [LegendEntry(text, color) for _, text, color in stages]
    for title, key, layout in _DISTANCE:
        x, y = run.series(key, "seconds")
        if len(x):
            line = {"color": COLORS[0], "width": 1.2}
            mode = "markers" if len(x) == 1 else "lines"
            curve = trace(x, y, text=title, line=line, mode=mode)
            figures.append(figure(title, [curve], "seconds", yaxis=layout))
    return charts(f"waiting {run.name}", figures, legend)


def _stages(
    title: str,
    stages: Sequence[tuple[str, str, str]],
    stretches: Sequence[tuple[np.ndarray, ...]],
) -> Figure:
    """Stack stages to the whole; nothing stands where nothing ran, as during compilation."""
    traces = []
    for index, (start, end, seconds) in enumerate(stretches):
        edges = np.stack([start, end], axis=1).ravel()
        shares = np.repeat(seconds / seconds.sum(axis=1, keepdims=True), 2, axis=0)
        for (_, text, color), share in zip(stages, shares.T, strict=True):
            style = {"stackgroup": str(index), "line": {"width": 0, "color": color}}
            traces.append(trace(edges, share, text, text=text, fillcolor=color, **style))
    return figure(title, traces, "seconds", yaxis={"range": [0, 1], "tickformat": ".0%"})


def segments(run: RunRecords, keys: Sequence[str]) -> list[tuple[np.ndarray, ...]]:
    """Split a run into contiguous stretches of bins: start `[n]`, end `[n]`, seconds `[n, keys]`.

    A record describes the time before its evaluation, as long as the learner's stages in it took.
    """
    seconds = _table(run, keys)
    lengths = _table(run, [key for key, *_ in LEARNER_STAGES]).sum(axis=1)
    end = _table(run, ["seconds"])[:, 0] - _table(run, ["time_evaluate"])[:, 0]
    recorded = seconds.any(axis=1) & (end > 0)
    if not recorded.any():
        return []
    end, seconds, lengths = end[recorded], seconds[recorded], lengths[recorded]
    previous_end = np.concatenate([[0.0], end[:-1]])
    start = np.maximum(previous_end, end - np.where(lengths > 0, lengths, np.inf))
    width = end[-1] / (_BINS - 0.5)  # the last record is within the last bin
    gap = start - previous_end > width
    start = np.where(gap, start, previous_end)
    first = np.flatnonzero(gap | (np.diff(np.floor(end / width), prepend=-1) != 0))
    last = np.append(first[1:], len(end)) - 1
    bins = start[first], end[last], np.add.reduceat(seconds, first)
    cuts = np.flatnonzero(gap[first])
    return list(zip(*(np.split(column, cuts[cuts > 0]) for column in bins), strict=True))
