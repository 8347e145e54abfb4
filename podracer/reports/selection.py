"""Lineage within a population: who descends from whom, with which hyperparameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from podracer.io.sinks import HYPERPARAMETER, PARENT, read_metrics
from podracer.reports import charts
from podracer.scores.runs import has_selection
from podracer.scores.score import returns_of

_LEGEND = (
    charts.LegendEntry("a pod", charts.POD),
    charts.LegendEntry("the best pod and its ancestors", charts.WINNER),
)


def lineage_figures(name: str, path: Path, experiment: Mapping[str, Any]) -> str:
    """Draw the lineage of a run's pods by their number and by each varied hyperparameter.

    `experiment` is the run's own as JSON. Returns nothing for a run without a selection. The best
    pod stands out with its ancestors, if one has a return.
    """
    records = read_metrics(path / "pods.jsonl") if has_selection(experiment) else []
    selections = [record for record in records if PARENT in record]
    if not selections:
        return ""
    parents = np.array([record[PARENT] for record in selections])
    every, pods = experiment["exchange"]["every"], experiment["pods"]
    updates = [*(every * k for k in range(len(selections) + 1)), records[-1]["updates"]]
    starts = [{item["name"]: item["value"] for item in pod["hyperparameters"]} for pod in pods]
    numbers = np.tile(np.arange(len(pods)), (len(selections) + 1, 1))
    panels = {"Pods": numbers}
    for key in selections[0]:
        if key.startswith(HYPERPARAMETER):
            first = [start.get(key.removeprefix(HYPERPARAMETER), np.nan) for start in starts]
            values = [first, *(record[key] for record in selections)]
            panels[key.removeprefix(HYPERPARAMETER)] = np.array(values, float)
    winners = _ancestors(parents, records[-1])
    figures = []
    for title, values in panels.items():
        scale = {
            "type": "log" if title != "Pods" and charts.is_positive(values.ravel()) else "linear"
        }
        traces = [
            charts.trace(*_lines(updates, values, parents, shown), entry.label, text=entry.label,
                  opacity=opacity, line={"color": entry.color, "width": width})
            for shown, entry, width, opacity in (
                (numbers, _LEGEND[0], 0.8, 0.7), (winners, _LEGEND[1], 2.2, 1.0),
            )
        ]  # fmt: skip
        figures.append(charts.figure(title, traces, "updates", yaxis=scale))
    return charts.charts(f"lineage {name}", figures, _LEGEND)


def _ancestors(parents: np.ndarray, last: Mapping[str, Any]) -> np.ndarray:
    """Return the best pod of the last record and its ancestors, i64 `[selections + 1, 1]`.

    Returns `[selections + 1, 0]` where no pod has a return.
    """
    key = "evaluation_return" if "evaluation_return" in last else "episode_return"
    returns = returns_of(last, key)
    if not np.isfinite(returns).any():
        return np.zeros((len(parents) + 1, 0), int)
    pods = [int(np.nanargmax(returns))]
    for row in parents[::-1]:
        pods.insert(0, row[pods[0]])
    return np.array(pods)[:, None]


def _lines(
    updates: Sequence[int], values: np.ndarray, parents: np.ndarray, pods: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the lines of some pods `[selections + 1, p]`, with a gap between each two.

    From each selection one leads from the parent's value to the pod's own, which it has until the
    next selection is near.
    """
    lines = []
    for step, shown in enumerate(pods):
        begin, end = updates[step : step + 2]
        if step:
            earlier = begin - 0.2 * (begin - updates[step - 1])
            sources = values[step - 1][parents[step - 1][shown]]
            lines += [
                [(earlier, source), (begin, value)]
                for source, value in zip(sources, values[step][shown], strict=True)
            ]
        end -= 0.2 * (end - begin) * (step + 1 < len(pods))
        lines += [[(begin, value), (end, value)] for value in values[step][shown]]
    return charts.joined(lines)
