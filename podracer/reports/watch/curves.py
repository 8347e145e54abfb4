"""Curves of runs on the live page, by environment, and of seeds also their score."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from podracer.reports.curves import COLORS, Curve, Groups, Panel, legend, seed_curves
from podracer.reports.seeds import by_environment, environment_title
from podracer.reports.watch.chart import Chart, extent
from podracer.scores.seeds import count_seeds
from podracer.scores.statistics import running_mean, score_of_seeds

_NAMED = 12  # groups in a legend
_GRID = 200  # points at which the seeds of a group are compared


def draw_panels(groups: Groups, panels: Sequence[Panel]) -> str:
    """Draw panels of each environment side by side, with a legend if there are several groups."""
    environments, parts = by_environment(groups), []
    for name, members in environments.items():
        if charts := [chart for panel in panels if (chart := _curves(members, panel))]:
            names = group_legend(members) if len(groups) > 1 else ""
            head = environment_title(name, environments) + names
            parts.append(f'{head}<div class="panels">{"".join(charts)}</div>')
    return "".join(parts)


def group_legend(names: Mapping[str, Any]) -> str:
    """Return the legend of groups, the first ones if they are many."""
    more = [("…", "transparent")] if len(names) > _NAMED else []
    return legend([*zip(list(names)[:_NAMED], itertools.cycle(COLORS), strict=False), *more])


def _curves(groups: Groups, panel: Panel) -> str:
    """Draw a curve for each group, of several seeds also their score."""
    counted = {label: count_seeds(members)[0] for label, members in groups.items()}
    lines = {label: seed_curves(members, panel) for label, members in counted.items()}
    points = {
        label: [run.series(panel.points, panel.over) for run in members if panel.points]
        for label, members in counted.items()
    }
    drawn = [
        pair
        for pairs in (*(all_ for all_, _ in lines.values()), *points.values())
        for pair in pairs
    ]
    if not any(len(x) for x, _ in drawn):
        return ""
    last = max(float(x[-1]) for x, _ in drawn if len(x))
    chart = Chart(panel.title, panel.over, (0, last), extent((y for _, y in drawn), 0.04))
    for color, label in zip(itertools.cycle(COLORS), groups, strict=False):
        draw_group(chart, *lines[label], color)
        for x, y in points[label]:
            chart.dots(x, y, color)
    return chart.svg()


def draw_group(chart: Chart, lines: Sequence[Curve], sound: Sequence[Curve], color: str) -> None:
    """Draw the lines of seeds, and the score over those that are sound."""
    is_alone = len(lines) == 1
    for x, y in lines if is_alone else ():
        chart.line(x, y, color, width=0.7, opacity=0.3)
    for x, y in lines:
        opacity, width = (1.0, 1.6) if is_alone else (0.4, 0.7)
        chart.line(x, running_mean(y), color, width=width, opacity=opacity)
    if len(sound) > 1:
        start, end = max(x[0] for x, _ in sound), min(x[-1] for x, _ in sound)
        if end > start:
            at = np.linspace(start, end, _GRID)
            seeds = np.stack([np.interp(at, x, running_mean(y)) for x, y in sound])
            chart.line(at, score_of_seeds(seeds), color, width=1.8)
