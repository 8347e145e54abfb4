"""Lineage within a population: who descends from whom, with which hyperparameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from podracer.io.sinks import HYPERPARAMETER, PARENT
from podracer.reports.charts import POD, WINNER, LegendEntry, charts, figure, joined, trace
from podracer.scores.runs import has_selection
from podracer.scores.score import returns_of

LEGEND = (LegendEntry("a pod", POD), LegendEntry("the best pod and its ancestors", WINNER))


class Lineage(NamedTuple):
    """Lines from parents to children, over updates; both are f64 `[lines, 2 ends, 2]`."""

    title: str
    is_logarithmic: bool
    pods: np.ndarray
    """Lines of all pods: updates, and the pod's number or the value of a hyperparameter."""
    winner: np.ndarray
    """Lines of the best pod and its ancestors, none where no pod has a return."""


def lineages(experiment: Mapping[str, Any], records: Sequence[dict[str, Any]]) -> list[Lineage]:
    """Return the lineage of a run's pods by their number and by each varied hyperparameter.

    `experiment` is the run's own as JSON, `records` hold a list for each metric. Returns nothing
    for a run without a selection.
    """
    selections = [record for record in records if PARENT in record]
    if not selections or not has_selection(experiment):
        return []
    last = records[-1]
    key = "evaluation_return" if "evaluation_return" in last else "episode_return"
    returns = returns_of(last, key)
    winner = int(np.nanargmax(returns)) if np.isfinite(returns).any() else None
    parents = np.array([record[PARENT] for record in selections])
    every = experiment["exchange"]["every"]
    updates = [*(every * k for k in range(len(selections) + 1)), last["updates"]]
    first = [
        {item["name"]: item["value"] for item in pod["hyperparameters"]}
        for pod in experiment["pods"]
    ]
    numbers = np.tile(np.arange(len(first)), (len(selections) + 1, 1))
    panels = [Lineage("Pods", False, *_lines(updates, numbers, parents, winner))]
    for key in selections[0]:
        if key.startswith(HYPERPARAMETER):
            name = key.removeprefix(HYPERPARAMETER)
            begin = [pod.get(name, np.nan) for pod in first]
            values = np.array([begin, *(record[key] for record in selections)], float)
            is_positive = bool(np.nanmin(values) > 0)
            panels.append(Lineage(name, is_positive, *_lines(updates, values, parents, winner)))
    return panels


def _lines(
    updates: Sequence[int], values: np.ndarray, parents: np.ndarray, winner: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the lines of all pods and of the winner for values `[selections + 1, P]`.

    Each pod has one until a selection, and from there one from its parent's to its own.
    """
    pods, winners = [], []
    pod = winner
    for step in reversed(range(len(values))):
        begin, end = updates[step : step + 2]
        if step + 1 < len(values):
            links = [
                [(end - 0.2 * (end - begin), values[step][source]), (end, values[step + 1][child])]
                for child, source in enumerate(parents[step])
            ]
            pods += links
            if pod is not None:
                winners.append(links[pod])
                pod = parents[step][pod]
            end -= 0.2 * (end - begin)
        lives = [[(begin, value), (end, value)] for value in values[step]]
        pods += lives
        if pod is not None:
            winners.append(lives[pod])
    return np.array(pods, float), np.array(winners, float).reshape(-1, 2, 2)


def lineage_figures(name: str, experiment: Mapping[str, Any], records: Sequence[Any]) -> str:
    """Draw the `lineages` of a run beside each other, nothing if there are none."""
    figures = []
    for lineage in lineages(experiment, records):
        scale = {"type": "log" if lineage.is_logarithmic else "linear"}
        traces = [
            trace(*joined(lines.tolist()), entry.label, text=entry.label, opacity=opacity,
                  line={"color": entry.color, "width": width})
            for lines, entry, width, opacity in (
                (lineage.pods, LEGEND[0], 0.8, 0.7), (lineage.winner, LEGEND[1], 2.2, 1.0),
            )
        ]  # fmt: skip
        figures.append(figure(lineage.title, traces, "updates", yaxis=scale))
    return charts(f"lineage {name}", figures, LEGEND)
