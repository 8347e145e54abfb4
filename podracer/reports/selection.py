"""Figure of a selection within a population: who descends from whom, with which hyperparameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure

from podracer.io.sinks import read_metrics
from podracer.reports.curves import POD, WINNER, legend, logarithmic, render, style_axes


def lineage(path: Path, experiment: dict[str, Any]) -> str:
    """Draw the pods of a run by number and by hyperparameter over updates, parents to children.

    `experiment` is that of the run as JSON. Returns nothing for a run without a selection.
    """
    from podracer.experiments.sweep import HYPERPARAMETER, PARENT, selections  # imports JAX

    records = selections(path) if experiment.get("selection") else []
    if not records:
        return ""
    last = read_metrics(path / "pods.jsonl")[-1]
    returns = np.array(last.get("evaluation_return") or last["episode_return"], float)
    winner = int(np.argmax(np.where(np.isnan(returns), -np.inf, returns)))
    parents = np.array([record[PARENT] for record in records])
    every = experiment["selection"]["every"]
    updates = [*(every * k for k in range(len(records) + 1)), last["updates"]]
    first = [{item["name"]: item["value"] for item in pod["hyperparameters"]}
             for pod in experiment["pods"]]  # fmt: skip
    heights = {"pod": np.tile(np.arange(len(first)), (len(records) + 1, 1))}
    for key in records[0]:
        if key.startswith(HYPERPARAMETER):
            name = key.removeprefix(HYPERPARAMETER)
            begin = [values.get(name, np.nan) for values in first]
            heights[name] = np.array([begin, *(record[key] for record in records)], float)

    def draw(figure: Figure) -> None:
        for index, (name, values) in enumerate(heights.items()):
            axes = figure.add_subplot(1, max(2, len(heights)), index + 1)
            _lines(axes, updates, values, parents, winner)
            style_axes(axes, "Pods" if name == "pod" else name, "updates")
            if name != "pod" and np.nanmin(values) > 0:
                logarithmic(axes)

    names = [("a pod", POD), ("the best pod and its ancestors", WINNER)]
    return legend(names) + render("Lineage of the pods over updates", 3.4, draw)


def _lines(
    axes: Axes, updates: list[int], values: np.ndarray, parents: np.ndarray, winner: int
) -> None:
    """Draw a line for each pod until a selection, and from there one from its parent's to it."""
    thin, bold = [], []
    pod = winner
    for step in reversed(range(len(values))):
        begin, end = updates[step : step + 2]
        if step + 1 < len(values):
            links = [
                [(end - 0.2 * (end - begin), values[step][source]), (end, values[step + 1][child])]
                for child, source in enumerate(parents[step])
            ]
            thin += links
            bold.append(links[pod])
            pod = parents[step][pod]
            end -= 0.2 * (end - begin)
        lives = [[(begin, value), (end, value)] for value in values[step]]
        thin += lives
        bold.append(lives[pod])
    axes.add_collection(LineCollection(thin, lw=0.8, color=POD, alpha=0.35))
    axes.add_collection(LineCollection(bold, lw=2.0, color=WINNER, zorder=3))
    axes.autoscale_view()
    axes.margins(x=0.02, y=0.08)
