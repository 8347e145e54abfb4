"""Figures of what descends from what: entries of a tournament, or pods under a selection.

All pods have one color, so the figures read the same with four pods and with sixty-four. Only the
winner, which is the best one, and its ancestors stand out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from podracer.io.sinks import HYPERPARAMETER, PARENT, read_metrics
from podracer.reports import charts
from podracer.scores.runs import has_selection
from podracer.scores.score import returns_of

PODS, WINNERS = "a pod", "the winner and its ancestors"
LEGEND = {PODS: charts.POD, WINNERS: charts.WINNER}

Position = Callable[[Any], float]


@dataclasses.dataclass(frozen=True)
class Family:
    """Members of a tournament or a population, such as entries, and who their parents are."""

    members: Sequence[Any]
    winners: Sequence[Any]
    """The best member and all its ancestors, or nothing."""
    parents: Callable[[Any], Iterable[Any]]
    describe: Callable[[Any], str]

    def traces(self, x: Position, y: Position, **marker: Any) -> list[charts.Trace]:
        """Return lines from parents to children and dots, the winners over all.

        `marker` is the style of the dots of all members.
        """
        traces = []
        for group, color, width, members, style in (
            (PODS, charts.POD, 0.8, self.members, marker),
            (WINNERS, charts.WINNER, 2.2, self.winners, {}),
        ):
            links = [(parent, child) for child in members for parent in self.parents(child)]
            ends = charts.joined([(x(a), y(a)), (x(b), y(b))] for a, b in links)
            line = {"color": color, "width": width}
            opacity = min(1, 0.4 + width / 4)
            traces.append(charts.trace(*ends, group, hoverinfo="skip", line=line, opacity=opacity))
            places = np.array([*map(x, members)]), np.array([*map(y, members)])
            dots = {"color": color, "size": 4 + width, **style}
            texts = [*map(self.describe, members)]
            traces.append(charts.trace(*places, group, text=texts, mode="markers", marker=dots))
        return traces


class _Pod(NamedTuple):
    """A pod from one selection to the next."""

    step: int  # number of the selection, 0 for the start
    number: int
    updates: int
    parent: int
    hyperparameters: dict[str, float]


def lineage_figures(name: str, path: Path, experiment: Mapping[str, Any]) -> str:
    """Draw the lineage of a run's pods by their number and by each varied hyperparameter.

    `experiment` is the run's own as JSON. Returns nothing for a run without a selection. The best
    pod stands out with its ancestors, if one has a return. A later round of a tournament goes on
    with the updates of the one before, which has chosen its first hyperparameters.
    """
    records = read_metrics(path / "pods.jsonl") if has_selection(experiment) else []
    selections = [record for record in records if PARENT in record]
    if not selections:
        return ""
    names = [x.removeprefix(HYPERPARAMETER) for x in selections[0] if x.startswith(HYPERPARAMETER)]
    starts = [{x["name"]: x["value"] for x in y["hyperparameters"]} for y in experiment["pods"]]
    chunk = experiment["driver"]["updates_per_chunk"]
    updates = [(record["updates"] - 1) // chunk * chunk for record in (records[0], *selections)]
    starts = [{} if updates[0] else start for start in starts]
    steps = [[_Pod(0, number, updates[0], number, start) for number, start in enumerate(starts)]]
    for step, record in enumerate(selections, 1):
        steps.append([])
        for number, parent in enumerate(record[PARENT]):
            values = {x: record[f"{HYPERPARAMETER}{x}"][number] for x in names}
            steps[step].append(_Pod(step, number, updates[step], parent, values))

    def parents(pod: _Pod) -> list[_Pod]:
        return [steps[pod.step - 1][pod.parent]] if pod.step else []

    key = "evaluation_return" if "evaluation_return" in records[-1] else "episode_return"
    returns = returns_of(records[-1], key)
    winners = [steps[-1][int(np.nanargmax(returns))]] if np.isfinite(returns).any() else []
    for pod in winners:
        winners += parents(pod)
    pods = [pod for step in steps for pod in step]
    family = Family(pods, winners, parents, lambda pod: f"pod {pod.number}")
    positions: dict[str, Position] = {"Pods": lambda pod: pod.number}
    positions |= {x: lambda pod, x=x: pod.hyperparameters.get(x, np.nan) for x in names}
    figures = []
    for title, y in positions.items():
        traces = family.traces(lambda pod: pod.updates, y)
        scale = charts.scale_of(map(y, pods))  # linear for pods, the first of which is 0
        figures.append(charts.figure(title, traces, "updates", yaxis=scale))
    return charts.charts(f"lineage {name}", figures, LEGEND)
