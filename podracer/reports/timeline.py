"""Utilization of a Sebulba run: how actors and learner spend their time, and which one waits."""

from __future__ import annotations

import html
import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from podracer.reports.console import compact, percent
from podracer.reports.curves import COLORS, legend, render, style_axes
from podracer.scores.runs import RunRecords
from podracer.scores.statistics import running_mean

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
_SHARED = ("lag_mean", "queue_occupancy")
_UNKNOWN = "This run did not record how long each waited."
_RUNS = 4  # drawn at most
_BINS = 150  # of wall time in one panel at most
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
    """Return the utilization section of a report: verdicts, and panels of the first runs."""
    kinds = (("Actors", ACTOR_STAGES), ("Learner", LEARNER_STAGES))
    recorded = {title: [key for key, *_ in stages] for title, stages in kinds}
    drawn_keys = [*_SHARED, *itertools.chain(*recorded.values())]
    named, runs = len(runs) > 1, [run for run in runs if verdict(run) or _has(run, drawn_keys)]
    legends = [
        legend([(words, color) for _, words, color in stages], title)
        for title, stages in kinds
        if any(_has(run, recorded[title]) for run in runs)
    ]
    parts = []
    for index, run in enumerate(runs):
        name = f"<b>{html.escape(run.name)}</b>: " if named else ""
        parts.append(f"<p>{name}{html.escape(verdict(run) or _UNKNOWN)}</p>")
        parts += legends if index == 0 else []
        if index < _RUNS and _has(run, drawn_keys):
            parts.append(_panels(run, in_a_row=len(runs) > 1))
    if len(runs) > _RUNS:
        parts.append(f"<small>Panels are shown for the first {_RUNS} runs.</small>")
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


def _panels(run: RunRecords, *, in_a_row: bool) -> str:
    """Return the panels of a run: in two rows, or in one if runs are compared."""
    stages = {
        title: partial(
            _areas,
            stretches=segments(run, [key for key, *_ in parts]),
            colors=[color for *_, color in parts],
        )
        for title, parts in (
            ("Actors: share of time", ACTOR_STAGES),
            ("Learner: share of time", LEARNER_STAGES),
        )
        if _has(run, [key for key, *_ in parts])
    }
    distance = {
        title: partial(draw, run=run)
        for title, key, draw in (
            ("Policy lag (thin: maximum)", "lag_mean", _lag),
            ("Queues that are full", "queue_occupancy", _occupancy),
        )
        if _has(run, [key])
    }
    rows = [row for row in ([stages | distance] if in_a_row else [stages, distance]) if row]
    columns = max(map(len, rows))
    mosaic: Any = [[title for title in row for _ in range(columns // len(row))] for row in rows]
    heights = [2.3 if row.keys() & stages.keys() else 1.7 for row in rows]
    widths = [1.4 if title in stages else 1.0 for title in mosaic[0]] if in_a_row else None
    end = run.series("seconds", "seconds")[0].max()
    drawn = [stretch for part in stages.values() for stretch in part.keywords["stretches"]]
    begin = min((start[0] for start, *_ in drawn), default=0.0)

    def draw(figure: Figure) -> None:
        axes = figure.subplot_mosaic(mosaic, height_ratios=heights, width_ratios=widths)
        for title, panel in (stages | distance).items():
            style_axes(axes[title], title, "seconds")
            panel(axes[title])
            axes[title].set_xlim(begin, end + (end - begin or 1.0) / 100)

    return render(", ".join(stages | distance), sum(heights), draw)


def _areas(axes: Axes, stretches: list[tuple[np.ndarray, ...]], colors: list[str]) -> None:
    """Draw stages stacked to the whole; nothing where nothing ran, as during compilation."""
    for start, end, seconds in stretches:
        edges = np.stack([start, end], axis=1).ravel()
        shares = np.repeat(seconds / seconds.sum(axis=1, keepdims=True), 2, axis=0)
        axes.stackplot(edges, shares.T, colors=colors, lw=0)
    axes.set_axisbelow(True)
    _as_share(axes)


def segments(run: RunRecords, keys: Sequence[str]) -> list[tuple[np.ndarray, ...]]:
    """Split a run into contiguous stretches of bins: start `[n]`, end `[n]`, seconds `[n, keys]`.

    A record describes the time before it, as long as the learner's stages in it took.
    """
    seconds = _table(run, keys)
    lengths = _table(run, [key for key, *_ in LEARNER_STAGES]).sum(axis=1)
    end = _table(run, ["seconds"])[:, 0]
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
    return list(zip(*(np.split(of, cuts[cuts > 0]) for of in bins), strict=True))


def _lag(axes: Axes, run: RunRecords) -> None:
    x, y = run.series("lag_max", "seconds")
    some = np.arange(0, len(x), max(1, len(x) // _BINS))
    if len(x):
        highest = np.maximum.reduceat(y, some)
        axes.step(x[some], highest, where="post", color=COLORS[0], alpha=0.6, lw=0.7)
    _smooth(axes, *run.series("lag_mean", "seconds"))
    axes.set_ylim(0, max(1.0, axes.get_ylim()[1]) * 1.1)
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))


def _occupancy(axes: Axes, run: RunRecords) -> None:
    x, y = run.series("queue_occupancy", "seconds")
    axes.plot(x, y, color=COLORS[0], alpha=0.25, lw=0.7)
    _smooth(axes, x, y)
    _as_share(axes)


def _smooth(axes: Axes, x: np.ndarray, y: np.ndarray) -> None:
    axes.plot(x, running_mean(y), color=COLORS[0], lw=1.6, marker="." if len(x) == 1 else "")


def _as_share(axes: Axes) -> None:
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))
