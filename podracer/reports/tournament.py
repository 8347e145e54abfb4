"""Self-contained HTML report on a tournament, also while it runs, with its figures."""

from __future__ import annotations

import html
import math
from collections import Counter
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np

from podracer.io.addresses import local_run
from podracer.io.paths import user_path
from podracer.io.run_directory import write_bytes
from podracer.io.text import redact
from podracer.reports import charts, tournament_log
from podracer.reports.lineage import LEGEND, Family
from podracer.reports.page import page, section, table, tiles
from podracer.reports.run import configuration
from podracer.reports.tournament_log import TournamentLog, recipe_of, varying_hyperparameters
from podracer.scores.format import clock, compact, number
from podracer.scores.runs import RunRecords
from podracer.tournament import events
from podracer.tournament.events import Entry
from podracer.tournament.leaderboard import read_events

# Low to high, each to be seen on a light and on a dark page.
_SCALE = [[i / 3, x] for i, x in enumerate(("#5b4b9e", "#2f86b8", "#35b38c", "#aed137"))]
_UNITS = (("seconds", 1, 180), ("minutes", 60, 10_800), ("hours", 3600, 259_200))
_BEST = "the best so far"
_NAMED = 24  # ancestors
_ERRORS = "<p><small>Scores are mean returns &plusmn; their standard errors.</small></p>"


def write_tournament_report(directory: Path | str, file: Path, refresh: float = 0) -> Path:
    """Write the report on the tournament in `directory`, or at an address, and return its path.

    A browser that shows it loads it again every `refresh` seconds, if not 0.
    Raises `ConfigError` if there is no tournament, `CheckpointError` if its log is damaged.
    """
    directory, file = local_run(directory).resolve(), user_path(file)
    log = TournamentLog(read_events(directory))
    events.check_settings(log.state.header)
    head, rows = tournament_log.board_rows(log.state.board)
    note = _ERRORS if any(entry.episodes > 1 for entry in log.state.board) else ""
    failures = [
        [clock(log.since(event.time)), *cells] for event in log.events if (cells := _failure(event))
    ]
    failure_head = ["Time", "Pod", "Round", "What", "Reason"]
    body = [
        tiles(facts(log)),
        section("Leaderboard", note + table(head, rows) if rows else ""),
        section("Scores", scores(log)),
        section("Lineage", ancestry(log) + lineage(log)),
        section("Hyperparameters", hyperparameters(log)),
        section("Failures", table(failure_head, failures) if failures else ""),
        section("Configuration", configuration(_experiments(log))),
    ]
    write_bytes(file, page(directory.name, body, refresh).encode(errors="replace"))
    return file


def facts(log: TournamentLog) -> dict[str, str]:
    """Return the facts of the summary."""
    state, settings = log.state, log.state.header.tournament
    best = state.board[0] if state.board else None
    pods = state.pods.values()
    # An entry also counts the frames of its first parent.
    parents = [log.entries[entry.parents[0]] for entry in log.entries.values() if entry.parents]
    frames = sum(x.frames for x in log.entries.values()) - sum(x.frames for x in parents)
    statuses = Counter(pod.status for pod in pods)
    counts = [f"{statuses[s]} {s}" for s in ("running", "quarantined") if s in statuses]
    return {
        "Best entry": best.id if best else "-",
        "Score": tournament_log.score_text(best) if best else "-",
        "Frames in all": compact(frames),
        "Wall time": clock(log.seconds),
        "Rounds": f"{sum(pod.round for pod in pods)} of {settings['rounds'] * len(pods)}",
        "Entries": f"{len(log.entries)}, {len(state.board)} on the board",
        "Pods": ", ".join([str(len(pods)), *counts]),
        "Selection": settings["selection"]["kind"],
        "Failures": str(sum(isinstance(event, events.Failed) for event in log.events)),
        "Refused reports": str(state.rejected),
        "Episodes of an evaluation": ", ".join(
            [str(state.header.episodes), *tournament_log.ways_of_acting(state)]
        ),
        "Seed": str(state.header.seed),
    }


def ancestry(log: TournamentLog) -> str:
    """Return a sentence about the ancestors of the winner."""
    if not log.ancestry:
        return ""
    best, *ancestors = (html.escape(entry.id) for entry in log.ancestry)
    if not ancestors:
        return f"<p><b>{best}</b> began fresh.</p>"
    remainder = f" and {len(ancestors) - _NAMED} more" if len(ancestors) > _NAMED else ""
    return f"<p><b>{best}</b> descends from {', '.join(ancestors[:_NAMED])}{remainder}.</p>"


def _failure(event: events.Event) -> list[str]:
    match event:
        case events.Failed():
            return [str(event.pod), str(event.round), "failed", event.reason]
        case events.Rejected():
            return [str(event.pod), str(event.round), "report refused", event.reason]
        case events.Stopped():
            return [str(event.pod), "", event.status, event.reason]
    return []


def _experiments(log: TournamentLog) -> list[RunRecords]:
    """Return the configurations of the experiments that pods began with, and of the tournament."""
    settings = redact(log.state.header.tournament, stable=True)
    experiments = settings.pop("experiments")
    configs = [{"experiment": {"tournament": settings, "experiment": e}} for e in experiments]
    return [
        RunRecords(experiment["recipe"], config, records=[], crash={})
        for experiment, config in zip(experiments, configs, strict=True)
    ]


# --- figures --------------------------------------------------------------------------------------


def _family(log: TournamentLog) -> Family:
    return Family(
        list(log.entries.values()),
        log.ancestry,
        lambda entry: [log.entries[parent] for parent in entry.parents],
        describe,
    )


def scores(log: TournamentLog) -> str:
    """Draw scores over wall time with the best so far, and over the frames of the lineage."""
    entries = list(log.entries.values())
    if not entries:
        return ""
    units = ((name, unit) for name, unit, limit in _UNITS if log.seconds < limit)
    name, unit = next(units, ("days", 86_400))

    def time(entry: Entry) -> float:
        return log.since(entry.created) / unit

    family, score = _family(log), attrgetter("score")
    best = np.maximum.accumulate([entry.score for entry in entries])
    times = [*map(time, entries), log.seconds / unit]
    line = {"shape": "hv", "width": 2, "color": charts.TEXT}
    best_trace = charts.trace(
        np.array(times), np.append(best, best[-1]), _BEST, text=_BEST, line=line
    )
    over_time = [*family.traces(time, score), best_trace]
    over_frames = family.traces(attrgetter("frames"), score)
    figures = [
        charts.figure("Score over wall time", over_time, name, height=340),
        charts.figure("Score over the frames of the lineage", over_frames, "frames", height=340),
    ]
    return charts.charts("scores", figures, {**LEGEND, _BEST: charts.TEXT}, width=440)


def hyperparameters(log: TournamentLog) -> str:
    """Draw each recipe's hyperparameters that vary, on a logarithmic scale if possible."""
    entries, figures = list(log.entries.values()), []
    recipes = dict.fromkeys(map(recipe_of, entries))
    for recipe in recipes:
        for name in varying_hyperparameters(x for x in entries if recipe_of(x) == recipe):

            def value(entry: Entry, recipe: str = recipe, name: str = name) -> float:
                is_of_recipe = recipe_of(entry) == recipe
                return entry.hyperparameters.get(name, math.nan) if is_of_recipe else math.nan

            scale = charts.scale_of(map(value, entries))
            traces = _family(log).traces(attrgetter("round"), value)
            title = f"{name} of {recipe}" if len(recipes) > 1 else name
            figures.append(charts.figure(title, traces, "round", xaxis=_rounds(log), yaxis=scale))
    return charts.charts("hyperparameters", figures, LEGEND, width=300)


def lineage(log: TournamentLog) -> str:
    """Draw entries by round and pod, with lines from parents to children and colors by score."""
    if not log.entries:
        return ""
    values = np.array([entry.score for entry in log.entries.values()])
    low, high = float(np.percentile(values, 5)), float(values.max())  # one may be far below
    marker = {
        "color": values,
        "colorscale": _SCALE,
        "cmin": low,
        "cmax": high if high > low else low + 1,
        "size": 9,
        "colorbar": {"title": {"text": "score"}, "thickness": 10, "outlinewidth": 0},
    }
    traces = _family(log).traces(attrgetter("round"), attrgetter("pod"), **marker)
    count = len(log.state.pods)  # a row for each, the first one on top
    axis = {"range": [count - 0.4, -0.6], "title": {"text": "pod"}, "showgrid": False}
    axis |= {"tickvals": list(range(count))} if count <= 16 else {}
    layout = {"xaxis": _rounds(log), "yaxis": axis, "height": min(110 + 20 * count, 900)}
    chart = charts.figure("Entries by round and pod", traces, "round", **layout)
    return charts.charts("lineage", [chart], LEGEND, width=600)


def describe(entry: Entry) -> str:
    """Return an entry's name, score, recipe and hyperparameters, in lines."""
    values = [f"{name} {number(value)}" for name, value in entry.hyperparameters.items()]
    amounts = f"score {number(entry.score)}, {compact(entry.frames)} frames"
    origin = f"{entry.id} from {', '.join(entry.parents) or 'fresh'}"
    return "\n".join([origin, f"{amounts} of {recipe_of(entry)}", *values])


def _rounds(log: TournamentLog) -> dict[str, Any]:
    """Return an x axis with a column for each round."""
    step = {"dtick": 1} if log.rounds < 12 else {"tickformat": "d"}
    return {"range": [-0.35, log.rounds - 0.65], **step}
