"""Configurations of a sweep beside each other: their ranking, and their settings with the score."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Mapping

import numpy as np

from podracer.reports.charts import (
    COLORS,
    TEXT,
    Figure,
    Groups,
    Settings,
    charts,
    differing_settings,
    figure,
    trace,
)
from podracer.reports.console import number
from podracer.reports.page import table
from podracer.reports.seeds import REMARKS, by_environment, environment_title, spread_text
from podracer.scores.seeds import Score, score_of_runs

_FEWEST = 3  # configurations that are a sweep
_CORRELATED = 10  # configurations for a rank correlation
_RANKED, _DRAWN = 20, 300  # configurations at most
_SHADES = ("#5b4b9e", "#2f86b8", "#35b38c", "#aed137")  # low to high scores


def sweep(groups: Groups) -> str:
    """Return ranking and figures of the configurations in each environment, where they are many."""
    environments, parts = by_environment(groups), []
    for environment, members in environments.items():
        settings = differing_settings(members)
        if len(members) < _FEWEST or not settings[next(iter(members))]:
            continue
        scores = {label: score_of_runs(runs, members.values()) for label, runs in members.items()}
        name = f"sweep {next(iter(members))} {environment}"
        figures = charts(name, _figures(settings, scores), width=480)
        parts.append(environment_title(environment, environments) + ranking(members) + figures)
    return "".join(parts)


def ranking(groups: Groups) -> str:
    """Return a table of configurations, best first."""
    settings = differing_settings(groups)
    scores = {label: score_of_runs(runs, groups.values()) for label, runs in groups.items()}
    measures = {True: "Last evaluation", False: "Episode return"}
    measure = " or ".join(dict.fromkeys(measures[x.is_evaluation] for x in scores.values()))
    head = ["Configuration", "Runs", measure, "95 % interval, or each seed", REMARKS]
    rows = [
        [
            ", ".join(f"{_short(key)} {_text(value)}" for key, value in settings[label].items())
            or label,
            str(len(groups[label])),
            number(scores[label].mean),
            spread_text(scores[label]),
            "; ".join(scores[label].marks) or "-",
        ]
        for label in sorted(scores, key=lambda label: scores[label].rank)[:_RANKED]
    ]
    return table(head, rows)


def _short(key: str) -> str:
    return key.rpartition(".")[2]


def _text(value: str) -> str:
    """Return a setting as it is, but a fraction with three digits."""
    try:
        parsed = json.loads(value)
    except ValueError:
        return value
    return number(parsed) if isinstance(parsed, float) and math.isfinite(parsed) else value


def _number(value: str) -> float:
    try:
        return float(json.loads(value))
    except (ValueError, TypeError):
        return math.nan


def _figures(settings: Settings, scores: Mapping[str, Score]) -> list[Figure]:
    """Return figures of the configurations with a score, nothing where these are few."""
    means = {label: score.mean for label, score in scores.items() if math.isfinite(score.mean)}
    if len(means) < _FEWEST:
        return []
    best = sorted(means, key=lambda label: -means[label])[:_DRAWN]
    figures = [_parallel({label: settings[label] for label in reversed(best)}, means)]
    values = np.array(list(means.values()))
    place = np.arange(1, len(values) + 1)
    texts = [_describe(label, settings[label], means[label]) for label in means]
    dots = trace(place, values, text=texts, mode="markers", marker={"color": COLORS[0]})
    line = {"shape": "hv", "color": TEXT, "width": 1.6}
    record = trace(place, np.maximum.accumulate(values), text="best so far", line=line)
    figures.append(
        figure("Score of configurations, and the best so far", [dots, record], "configuration")
    )
    correlations = _correlations(settings, means)
    if correlations:
        names, amounts = (
            [_short(key) for key in correlations],
            np.array(list(correlations.values())),
        )
        bars = trace(amounts, names, text=names, type="bar", orientation="h",
                     textposition="none", marker={"color": COLORS[0]})  # fmt: skip
        title = "Rank correlation of each setting with the score"
        height = 120 + 22 * len(names)
        figures.append(figure(title, [bars], xaxis={"range": [-1, 1]}, height=height))
    return figures


def _describe(label: str, settings: Mapping[str, str], mean: float) -> str:
    values = [f"{_short(key)} {_text(value)}" for key, value in settings.items()]
    return "\n".join([label, f"score {number(mean)}", *values])


def _parallel(settings: Settings, means: Mapping[str, float]) -> Figure:
    """Draw a line for each configuration through its settings and its score, the best on top."""
    keys = [*next(iter(settings.values())), ""]
    heights, notes = [], []
    for index, key in enumerate(keys):
        column = [values[key] for values in settings.values()] if key else []
        amounts = np.array([_number(x) for x in column] if key else [means[x] for x in settings])
        if np.isfinite(amounts).all():
            is_wide = amounts.min() > 0 and amounts.max() > 10 * amounts.min() and key
            scaled = np.log(amounts) if is_wide else amounts
            texts = [_text(x) for x in column] or [number(x) for x in amounts]
            labeled = [int(amounts.argmin()), int(amounts.argmax())]
        else:
            names = sorted(set(column))
            scaled = np.array([names.index(x) for x in column], float)
            texts = [x[:20] for x in column]
            labeled = [column.index(name) for name in names]
        width = scaled.max() - scaled.min()
        heights.append((scaled - scaled.min()) / width if width else np.full(len(scaled), 0.5))
        ends = {float(heights[-1][row]): texts[row] for row in labeled}
        notes += [_note(index, at, text) for at, text in ends.items()]
    scores = heights[-1]
    traces = []
    for row, label in enumerate(settings):
        shade = _SHADES[min(int(scores[row] * len(_SHADES)), len(_SHADES) - 1)]
        points = np.arange(len(keys)), np.array([column[row] for column in heights])
        line = {"color": shade, "width": 1 + 1.5 * scores[row]}
        text = _describe(label, settings[label], means[label])
        style = {"line": line, "mode": "lines+markers", "marker": {"color": shade, "size": 4}}
        traces.append(
            trace(*points, label, text=text, hovertemplate="%{meta}<extra></extra>", **style)
        )
    ticks = {"tickvals": list(range(len(keys))), "ticktext": [_short(k) or "score" for k in keys]}
    return figure(
        "Configurations: settings and score",
        traces,
        xaxis={**ticks, "range": [-0.3, len(keys) - 0.6], "showgrid": True, "type": "linear"},
        yaxis={"visible": False, "range": [-0.08, 1.08]},
        annotations=notes,
        height=380,
    )


def _note(index: int, height: float, text: str) -> dict[str, object]:
    return {
        "x": index, "y": height, "text": html.escape(text), "showarrow": False,
        "xanchor": "right", "xshift": -6, "bgcolor": "--page", "opacity": 0.85,
    }  # fmt: skip


def _correlations(settings: Settings, means: Mapping[str, float]) -> dict[str, float]:
    """Return the rank correlation of each numeric setting with the score, largest last.

    Fewer than ten configurations say nothing.
    """
    if len(means) < _CORRELATED:
        return {}
    from scipy.stats import rankdata

    ranks, correlations = rankdata(list(means.values())), dict[str, float]()
    for key in next(iter(settings.values())):
        values = np.array([_number(settings[label][key]) for label in means])
        if np.isfinite(values).all() and np.ptp(values) > 0 and np.ptp(ranks) > 0:
            correlations[key] = float(np.corrcoef(rankdata(values), ranks)[0, 1])
    return dict(sorted(correlations.items(), key=lambda item: abs(item[1])))
