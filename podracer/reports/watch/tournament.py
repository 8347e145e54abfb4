"""What the live page shows of a tournament."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from podracer.reports.console import number
from podracer.reports.curves import legend
from podracer.reports.page import section, tiles
from podracer.reports.tournament import ancestry, facts, failures, leaderboard, matches
from podracer.reports.tournament_figures import OUTCOMES, POD, WINNER, time_unit
from podracer.reports.tournament_log import TournamentLog, score_name
from podracer.reports.watch.chart import Chart, extent
from podracer.tournament.events import Stopped

_SHADES = ("#5b4b9e", "#2f86b8", "#35b38c", "#aed137")  # from low to high scores
_NAMED = 16  # pods at an axis


def tournament_sections(log: TournamentLog) -> Iterator[tuple[str, str]]:
    """Yield the parts of the page: a name and HTML, empty where there is nothing to show."""
    yield "overview", tiles(facts(log))
    tables = section("Leaderboard", leaderboard(log)) + section("Matches", matches(log))
    yield "leaderboard", tables
    charts = f'<div class="panels">{_scores(log)}{_pods_in_time(log)}</div>'
    names = {**_SCORES, **_outcomes(log)}
    yield "timeline", section("Scores and pods in time", legend(names.items()) + charts)
    yield "lineage", section("Lineage", ancestry(log) + _lineage(log))
    yield "failures", section("Failures", failures(log))


_SCORES = {"the best so far": "var(--text)", "the winner and its ancestors": WINNER}


def _scores(log: TournamentLog) -> str:
    """Draw scores over wall time, with the best so far."""
    entries = list(log.entries.values())
    if not entries:
        return ""
    name, unit = time_unit(log.seconds)
    times = np.array([log.since(entry.created) / unit for entry in entries])
    scores = np.array([entry.score for entry in entries])
    title = f"{score_name(log.state).capitalize()} over wall time"
    chart = Chart(title, name, (0, log.seconds / unit), extent([scores], 0.04))
    for first, second in log.pods():
        ends = [log.since(entry.created) / unit for entry in (first, second)]
        chart.line(ends, [first.score, second.score], POD, width=0.7, opacity=0.5)
    winners = {entry.id for entry in log.ancestry}
    colors = [WINNER if entry.id in winners else POD for entry in entries]
    texts = [f"{entry.id}: {number(entry.score)}" for entry in entries]
    chart.dots(times, scores, colors, radius=2.6, texts=texts)
    best = np.maximum.accumulate(scores)
    at = [*times, log.seconds / unit]
    chart.line(at, [*best, best[-1]], "var(--text)", width=1.4, steps=True)
    return chart.svg()


def _pods_in_time(log: TournamentLog) -> str:
    """Draw a bar for each attempt at a round."""
    attempts = log.attempts()
    if not attempts:
        return ""
    name, unit = time_unit(log.seconds)
    chart = _rows(log, "Pods in time", name, (0, log.seconds / unit))
    for attempt in attempts:
        start, end = attempt.start / unit, attempt.end / unit
        text = f"pod {attempt.pod}, {attempt.outcome}"
        color = OUTCOMES[attempt.outcome]
        chart.bar(start, end, attempt.pod - 0.3, attempt.pod + 0.3, color, text)
    for event in log.events:
        if isinstance(event, Stopped):
            color = OUTCOMES[event.status]
            chart.dots([log.since(event.time) / unit], [event.pod], color, texts=[event.status])
    return chart.svg()


def _outcomes(log: TournamentLog) -> dict[str, str]:
    kinds = {attempt.outcome for attempt in log.attempts()}
    return {name: color for name, color in OUTCOMES.items() if name in kinds}


def _lineage(log: TournamentLog) -> str:
    """Draw entries by round and pod, with lines from parents and colors by score."""
    entries = list(log.entries.values())
    if not entries:
        return ""
    chart = _rows(log, "Entries by round and pod", "round", (-0.2, log.rounds - 0.8))
    for links, color, width in (
        (log.links(entries), "var(--line)", 1.0),
        (log.links(log.ancestry), WINNER, 2.0),
    ):
        for parent, child in links:
            chart.link((parent.round, parent.pod), (child.round, child.pod), color, width)
    scores = np.array([entry.score for entry in entries])
    ranks = scores.argsort().argsort() * len(_SHADES) // len(scores)
    texts = [f"{entry.id}: {number(entry.score)}" for entry in entries]
    chart.dots(
        [entry.round for entry in entries],
        [entry.pod for entry in entries],
        [_SHADES[rank] for rank in ranks],
        radius=4,
        texts=texts,
    )
    quarters = ("lowest scores", "lower", "higher", "highest scores")
    names = [*zip(quarters, _SHADES, strict=True), ("the winner and its ancestors", WINNER)]
    return legend(names) + f'<div class="panels wide-panels">{chart.svg()}</div>'


def _rows(log: TournamentLog, title: str, over: str, x: tuple[float, float]) -> Chart:
    """Return a chart with a row for each pod, the first one on top."""
    pods = len(log.state.pods)
    every = -(-pods // _NAMED)
    names = {float(pod): f"pod {pod}" for pod in range(0, pods, every)}
    height = min(70 + 18 * pods, 420)
    whole = over == "round"
    return Chart(title, over, x, (pods - 0.5, -0.5), height=height, names=names, whole=whole)
