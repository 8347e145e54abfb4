"""Figures of a tournament: scores, lineage and hyperparameters."""

from __future__ import annotations

import math
from operator import attrgetter
from typing import Any

import numpy as np

from podracer.reports import charts
from podracer.reports.lineage import LEGEND, Family
from podracer.reports.tournament_log import TournamentLog, recipe_of, varying_hyperparameters
from podracer.scores.format import compact, number
from podracer.tournament.events import Entry

# Low to high, each to be seen on a light and on a dark page.
_SCALE = [[i / 3, x] for i, x in enumerate(("#5b4b9e", "#2f86b8", "#35b38c", "#aed137"))]
_UNITS = (("seconds", 1, 180), ("minutes", 60, 10_800), ("hours", 3600, 259_200))
_BEST = "the best so far"


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
    return charts.charts(
        "scores", figures, [*LEGEND, charts.LegendEntry(_BEST, charts.TEXT)], width=440
    )


def hyperparameters(log: TournamentLog) -> str:
    """Draw each recipe's hyperparameters that vary, on a logarithmic scale if possible."""
    entries, figures = list(log.entries.values()), []
    recipes = dict.fromkeys(map(recipe_of, entries))
    for recipe in recipes:
        for name in varying_hyperparameters(x for x in entries if recipe_of(x) == recipe):

            def value(entry: Entry, recipe: str = recipe, name: str = name) -> float:
                is_of_recipe = recipe_of(entry) == recipe
                return entry.hyperparameters.get(name, math.nan) if is_of_recipe else math.nan

            scale = {"type": "log" if charts.is_positive(map(value, entries)) else "linear"}
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
