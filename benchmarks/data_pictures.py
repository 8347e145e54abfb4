"""Draw `from-data.png` and `from-data-curves.png` of what `offline.py` and `imitation.py` measured.

python benchmarks/data_pictures.py
"""

from __future__ import annotations

import itertools
from typing import Any

import imitation
import numpy as np
import offline
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from pictures import IMAGES

from podracer.scores.statistics import bootstrap_interval, interquartile_mean

COLORS = {
    "cloning": "#2a6f97",
    "DQN": "#e07a1f",
    "IQL": "#c1121f",
    "TD3+BC": "#5f8f3e",
    "avril": "#8e5aa8",
}
CURVE_COLORS = COLORS | {
    "DQN online": "#2a9d8f",
    "DQN online, mixed replay": "#8e5aa8",
    "DQN online, from DQN": "#e07a1f",
    "TD3 online": "#2a9d8f",
    "TD3 online, mixed replay": "#8e5aa8",
    "TD3 online, from TD3+BC": "#5f8f3e",
    "TD3 online, from TD3+BC, mixed replay": "#c1121f",
}
MARKERS = {"podracer": "o", "d3rlpy": "s", "imitation": "^"}


def draw_data_sets(axes: Axes, task: str, rows: list[offline.Row]) -> None:
    """Draw the mean return of each method and library on each data set, and its range of seeds."""
    rows = [row for row in rows if row["task"] == task and "online" not in row["method"]]
    measured = {(row["method"], row["library"]) for row in rows}
    contenders = [(x, y) for x in COLORS for y in MARKERS if (x, y) in measured]
    qualities = [x for x in offline.TASKS[task].frames if any(row["data"] == x for row in rows)]
    for place, quality in enumerate(qualities):
        found = [row for row in rows if row["data"] == quality]
        behavior = [found[0]["behavior"]] * 2
        label = "behavior" if place == 0 else None
        axes.plot([place - 0.4, place + 0.4], behavior, color="black", lw=1, ls="--", label=label)
        for i, (method, library) in enumerate(contenders):
            key = {"method": method, "library": library}
            values = {row["seed"]: row["return"] for row in found if key.items() <= row.items()}
            if values:
                x = place + 0.7 * ((i + 0.5) / len(contenders) - 0.5)
                draw_interval(axes, x, list(values.values()), method, library)
    for method, library in contenders:
        mark(axes, [], [], method, library, label=f"{method}, {library}")
    axes.set_xticks(range(len(qualities)), qualities)
    axes.set_title(f"{task}: by data set", fontsize=10)


def draw_interval(axes: Axes, x: float, values: list[float], method: str, library: str) -> None:
    """Draw a mean with the smallest and the largest value."""
    axes.plot([x, x], [min(values), max(values)], color=COLORS[method], lw=1.5, alpha=0.7)
    mark(axes, [x], [float(np.mean(values))], method, library)


def mark(
    axes: Axes, x: list[float], y: list[float], method: str, library: str, label: str | None = None
) -> None:
    """Draw the marker of a method in a library, filled for podracer."""
    color = COLORS[method]
    fill = color if library == "podracer" else "white"
    marker = MARKERS[library]
    axes.plot(x, y, marker, color=color, markersize=5, markerfacecolor=fill, label=label)


def draw_demonstrations(axes: Axes, task: str, rows: list[dict[str, Any]]) -> None:
    """Draw interquartile means over seeds by the number of demonstrations, with intervals."""
    rows = [row for row in rows if row["task"] == task]
    counts = sorted({row["demonstrations"] for row in rows})
    expert = float(np.mean([row["expert_return"] for row in rows]))
    axes.axhline(expert, color="black", lw=1, ls="--", label="expert")
    for i, learner in enumerate(imitation.LEARNERS):
        middles, lows, highs = [], [], []
        for count in counts:
            key = {"learner": learner, "demonstrations": count}
            found = {r["seed"]: r["evaluation_return"] for r in rows if key.items() <= r.items()}
            values = np.array(list(found.values()))
            low, high = bootstrap_interval(values)
            middles.append(interquartile_mean(values))
            lows.append(low)
            highs.append(high)
        places = np.arange(len(counts)) + 0.1 * (i - 0.5)
        color, errors = COLORS[learner], np.abs(np.array([lows, highs]) - middles)
        label = "AVRIL" if learner == "avril" else learner
        axes.errorbar(places, middles, errors, fmt="o-", ms=4, lw=1, color=color, label=label)
    axes.set_xticks(range(len(counts)), counts)
    axes.set_title(f"{task}: by demonstrations", fontsize=10)


def draw_curves(axes: Axes, rows: list[offline.Row]) -> None:
    """Draw the mean of the evaluations of each method over the seeds, and their range."""
    for method in dict.fromkeys(row["method"] for row in rows):
        found = {row["seed"]: row["curve"] for row in rows if row["method"] == method}
        frames = [point[0] for point in next(iter(found.values()))]
        returns = np.array([[point[1] for point in curve] for curve in found.values()])
        line = {"ls": "--" if "online" in method else "-", "color": CURVE_COLORS[method]}
        axes.plot(frames, returns.mean(axis=0), lw=1.2, label=method, **line)
        low, high = returns.min(axis=0), returns.max(axis=0)
        axes.fill_between(frames, low, high, color=line["color"], alpha=0.15, lw=0)
    axes.axhline(rows[0]["behavior"], color="black", lw=1, ls="--", label="behavior")
    axes.set_xscale("log")
    axes.set_title(f"{rows[0]['task']}: {rows[0]['data']} data, by frames", fontsize=10)


def draw_all_curves(rows: list[offline.Row]) -> None:
    """Draw the curves of all tasks and data sets that have some."""
    rows = [row for row in rows if row.get("curve")]
    tasks = [x for x in offline.TASKS if any(row["task"] == x for row in rows)]
    qualities = ("random", "medium", "expert")
    figure = Figure((4 * len(qualities), 3.8 * len(tasks)), layout="constrained")
    panels = figure.subplots(len(tasks), len(qualities), squeeze=False)
    for (task, quality), axes in zip(itertools.product(tasks, qualities), panels.flat, strict=True):
        axes.set_visible(False)
        if found := [row for row in rows if (row["task"], row["data"]) == (task, quality)]:
            draw_curves(axes, found)
            style(axes)
    FigureCanvasAgg(figure).print_png(IMAGES / "from-data-curves.png", metadata={"Software": None})


def main() -> None:
    offline_rows = offline.read(offline.OUT)
    imitation_rows = imitation.records(imitation.RESULTS)
    qualities = {(row["task"], row["data"]) for row in offline_rows}
    tasks = [x for x in offline.TASKS if sum(task == x for task, _ in qualities) > 1]
    demonstrated = [x for x in imitation.TASKS if any(r["task"] == x for r in imitation_rows)]
    columns = max(len(tasks), len(demonstrated))
    figure = Figure((4 * columns, 7.6), layout="constrained")
    panels = figure.subplots(2, columns, squeeze=False, height_ratios=(1.3, 1))
    for axes in panels.ravel():
        axes.set_visible(False)
    for axes, task in zip(panels[0], tasks, strict=False):
        draw_data_sets(axes, task, offline_rows)
        style(axes)
    for axes, task in zip(panels[1], demonstrated, strict=False):
        draw_demonstrations(axes, task, imitation_rows)
        style(axes)
    FigureCanvasAgg(figure).print_png(IMAGES / "from-data.png", metadata={"Software": None})
    draw_all_curves(offline_rows)


def style(axes: Axes) -> None:
    axes.set_visible(True)
    axes.set_ylabel("return", fontsize=8)
    axes.tick_params(labelsize=8)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize=7, frameon=False, ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.08))


if __name__ == "__main__":
    main()
