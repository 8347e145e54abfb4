"""Figures of a tournament: scores, lineage, hyperparameters, and the pods over time.

All pods have one color, so the figures read the same with four pods and with sixty-four. Only the
winner, which is the best entry, and its ancestors stand out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.collections import LineCollection
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from podracer.reports.curves import POD, WINNER, legend, logarithmic, render, style_axes
from podracer.reports.tournament_log import (
    Link,
    TournamentLog,
    score_name,
    varying_hyperparameters,
)
from podracer.tournament.events import Entry, Stopped

OUTCOMES = {
    "reported": "#3f8fdb",
    "failed": "#e15759",
    "running": "#2ca58d",
    "interrupted": "#8a919a",
    "retired": "#8a919a",
    "quarantined": "#a06cd5",
}
# Low to high, each to be seen on a light and on a dark page.
_SCALE = LinearSegmentedColormap.from_list("scores", ["#5b4b9e", "#2f86b8", "#35b38c", "#aed137"])
_UNITS = (("seconds", 1, 180), ("minutes", 60, 10_800), ("hours", 3600, 259_200))
_STEPS = np.linspace(0, 1, 16)  # along a curved line

Where = Callable[[Entry], float]


# --- scores and hyperparameters -------------------------------------------------------------------


def scores(log: TournamentLog) -> str:
    """Draw scores over wall time with the best so far, and over the frames of the lineage."""
    entries, title = list(log.entries.values()), score_name(log.state).capitalize()
    name, unit = time_unit(log.seconds)

    def time(entry: Entry) -> float:
        return log.since(entry.created) / unit

    def draw(figure: Figure) -> None:
        strong = matplotlib.rcParams["text.color"]
        axes = figure.add_subplot(1, 2, 1)
        _lines(axes, log, log.pods(), time, _score)
        if log.state.ratings:
            intervals = [1.96 * entry.standard_error for entry in entries]
            points = [*map(time, entries)], [*map(_score, entries)]
            axes.errorbar(*points, intervals, fmt="none", ecolor=POD, elinewidth=0.7, alpha=0.5)
        best = np.maximum.accumulate([entry.score for entry in entries])
        at = [*map(time, entries), log.seconds / unit]
        axes.step(at, [*best, best[-1]], where="post", color=strong, lw=1.8, zorder=4)
        style_axes(axes, f"{title} over wall time", name)
        axes.set_xlim(0, 1.03 * at[-1] or None)
        axes = figure.add_subplot(1, 2, 2)
        _lines(axes, log, log.links(entries), lambda entry: entry.frames, _score)
        style_axes(axes, f"{title} over the frames of the lineage", "frames")
        axes.set_xlim(0, 1.03 * max(entry.frames for entry in entries) or None)

    if not entries:
        return ""
    names = [("a pod", POD), ("the winner and its ancestors", WINNER)]
    names.append(("the best so far", "var(--text)"))
    return legend(names) + render(f"{title}s over wall time, over frames", 3.4, draw)


def hyperparameters(log: TournamentLog) -> str:
    """Draw each hyperparameter that varies, over the rounds, on a logarithmic scale if possible."""
    entries = list(log.entries.values())
    names = varying_hyperparameters(entries)
    columns = min(3, max(2, len(names)))
    rows = -(-len(names) // columns)

    def draw(figure: Figure) -> None:
        for index, name in enumerate(names):
            axes = figure.add_subplot(rows, columns, index + 1)

            def value(entry: Entry, name: str = name) -> float:
                return entry.hyperparameters.get(name, float("nan"))

            _lines(axes, log, log.pods(), lambda entry: entry.round, value)
            style_axes(axes, name, "round")
            _rounds(axes, log, 6)
            if np.nanmin([value(entry) for entry in entries]) > 0:
                logarithmic(axes)

    return render(", ".join(names), 2.6 * rows, draw) if names else ""


def _score(entry: Entry) -> float:
    return entry.score


def _lines(axes: Axes, log: TournamentLog, links: Sequence[Link], x: Where, y: Where) -> None:
    """Draw thin lines and dots for all entries, and the winner's ancestors over them."""
    thin = {"color": POD, "alpha": 0.35 if len(log.state.pods) > 16 else 0.6}
    bold = {"color": WINNER, "alpha": 1.0, "zorder": 3}
    winners = log.links(log.ancestry)
    for style, width, links_, entries in (
        (thin, 0.8, links, log.entries.values()),
        (bold, 2.0, winners, log.ancestry),
    ):
        ends = [[(x(a), y(a)), (x(b), y(b))] for a, b in links_]
        axes.add_collection(LineCollection(ends, lw=width, **style))
        points = np.array([(x(entry), y(entry)) for entry in entries]).reshape(-1, 2)
        axes.scatter(*points.T, s=(3 * width) ** 2, lw=0, **style)
    axes.margins(x=0.02, y=0.08)


def time_unit(seconds: float) -> tuple[str, float]:
    """Return the unit that suits a duration, and its seconds."""
    fitting = ((name, unit) for name, unit, limit in _UNITS if seconds < limit)
    return next(fitting, ("days", 86_400))


# --- the lineage and the pods ---------------------------------------------------------------------


def lineage(log: TournamentLog) -> str:
    """Draw entries by round and pod, with lines from parents to children and colors by score."""
    entries = list(log.entries.values())
    if not entries:
        return ""
    height = _height(log)
    label = score_name(log.state)
    size = 72 * min(0.5 * height / len(log.state.pods), 5 / log.rounds, 0.13)

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        soft = matplotlib.rcParams["xtick.color"]
        every, winners = log.links(entries), log.links(log.ancestry)
        alpha = float(np.clip(500 / max(len(every), 1), 0.1, 0.45))  # many, if they are fused
        axes.add_collection(_curved(every, color=soft, lw=0.7, alpha=alpha))
        width = 2.2 if len(winners) < len(log.ancestry) else 1.0
        axes.add_collection(_curved(winners, color=WINNER, lw=width))
        values = [entry.score for entry in entries]
        norm = Normalize(float(np.percentile(values, 5)), max(values))  # one may be far below
        for group, edge in ((entries, "none"), (log.ancestry, WINNER)):
            x, y, score = np.array([(e.round, e.pod, e.score) for e in group]).T
            style = {"cmap": _SCALE, "norm": norm, "ec": edge, "lw": 1.6, "zorder": 3}
            axes.scatter(x, y, s=size**2, c=score, **style)
        _rows(axes, log, "round")
        _rounds(axes, log, 20)
        bar = figure.colorbar(
            ScalarMappable(norm, _SCALE), ax=axes, aspect=8 * height, pad=0.01, label=label
        )
        bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]

    names = [("the winner and its ancestors", WINNER)]
    return legend(names) + render("Lineage by round and pod", height, draw)


def _curved(links: Iterable[Link], **style: Any) -> LineCollection:
    """Return curves that start and end horizontally, so that crossings can be followed."""
    ease = _STEPS**2 * (3 - 2 * _STEPS)
    paths = []
    for a, b in links:
        aside = 1.2 * (_STEPS - _STEPS**2) * (a.round == b.round)  # else it would cross other dots
        x, y = a.round + (b.round - a.round) * _STEPS + aside, a.pod + (b.pod - a.pod) * ease
        paths.append(np.column_stack([x, y]))
    return LineCollection(paths, **style)


def pods_in_time(log: TournamentLog) -> str:
    """Draw a bar for each attempt at a round, and a mark where one failed or a pod was stopped."""
    attempts = log.attempts()
    if not attempts:
        return ""
    name, unit = time_unit(log.seconds)
    gap = 0.0015 * log.seconds  # so that rounds are distinguishable
    marks = [(a.pod, a.end, a.outcome, "x") for a in attempts if a.outcome == "failed"]
    stops = [event for event in log.events if isinstance(event, Stopped)]
    marks += [(e.pod, log.since(e.time), e.status, "s") for e in stops]

    def draw(figure: Figure) -> None:
        axes = figure.add_subplot()
        axes.barh(
            [attempt.pod for attempt in attempts],
            [max(attempt.end - attempt.start - gap, gap) / unit for attempt in attempts],
            left=[attempt.start / unit for attempt in attempts],
            height=0.6,
            color=[OUTCOMES[attempt.outcome] for attempt in attempts],
            alpha=0.8,
        )
        for pod, at, outcome, mark in marks:
            axes.plot(at / unit, pod, mark, color=OUTCOMES[outcome], ms=5, mew=1.6)
        _rows(axes, log, name)
        axes.set_xlim(left=0)

    kinds = {attempt.outcome for attempt in attempts} | {event.status for event in stops}
    names = [(outcome, color) for outcome, color in OUTCOMES.items() if outcome in kinds]
    return legend(names) + render("Pods in time", _height(log), draw)


def _rounds(axes: Axes, log: TournamentLog, ticks: int) -> None:
    """Give axes a column for each round, with room for curved lines."""
    axes.set_xlim(-0.35, log.rounds - 0.65)
    axes.xaxis.set_major_locator(MaxNLocator(ticks, integer=True, min_n_ticks=1))


def _height(log: TournamentLog) -> float:
    """Return the height in inches of a figure with a row for each pod."""
    return min(1.0 + 0.2 * len(log.state.pods), 9.0)


def _rows(axes: Axes, log: TournamentLog, over: str) -> None:
    """Give axes a row for each pod, the first one on top."""
    style_axes(axes, "", over)
    axes.grid(visible=False)
    axes.set(ylabel="pod", ylim=(len(log.state.pods) - 0.4, -0.6))
    axes.yaxis.set_major_locator(MaxNLocator(17, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1))
    axes.margins(x=0.02)
