"""Captions and tables for groups of runs that differ only in the seed."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from podracer.reports.charts import Groups, Settings, differing_settings, settings_text
from podracer.reports.page import table
from podracer.scores.format import number
from podracer.scores.runs import RunRecords
from podracer.scores.seeds import are_independent, count_seeds, score_of_runs
from podracer.scores.statistics import ENOUGH

_FEWEST = 3  # configurations that are a sweep
_SPREAD = "95 % interval, or each seed"
_HEAD = ("Configuration", "Score", _SPREAD, "Mean", "Measure", "Remarks")

_CAPTION = (
    "A thick line is the mean over the seeds, or pods, of a configuration; of five or more it is "
    "the interquartile mean, for independent seeds in its 95 % bootstrap interval. It is dashed "
    "where a run has ended, whose last value counts on. Thin lines are the seeds, and a dotted "
    "line joins the evaluations of one. All lines are running means over 2 % of a run."
)


def final_scores(groups: Groups) -> str:
    """Return tables of the configurations' scores in each environment, best first, as HTML.

    There is one where a configuration has several runs, or where three or more differ.
    """
    environments, parts = by_environment(groups), []
    for environment, members in environments.items():
        settings = differing_settings(members)
        is_sweep = len(members) >= _FEWEST and any(settings.values())
        if is_sweep or max(map(len, members.values())) > 1:
            rows = _score_rows(members, settings)
            parts.append(environment_title(environment, environments) + table(_HEAD, rows))
    return "".join(parts)


def _score_rows(groups: Groups, settings: Settings) -> list[list[str]]:
    scores, rows = {}, []
    for label, members in groups.items():
        peers = [runs for runs in groups.values() if runs[0].recipe == members[0].recipe]
        scores[label] = score_of_runs(members, peers)
    for label, score in sorted(scores.items(), key=lambda item: item[1].rank):
        first, count = groups[label][0], len(score.values)
        is_alone = len(groups[label]) == 1
        name = ", ".join(settings_text(settings[label], 3)) if is_alone else ""
        mean = "interquartile mean" if count >= ENOUGH else "mean"
        noun = "seed" if score.are_independent else "dependent pod"
        of_all = f"{mean} of {count} {noun}{'' if count == 1 else 's'}"
        measure = f"{first.acting} evaluation" if score.is_evaluation else "episode return"
        cells = [name or label, number(score.mean), score.spread, of_all, measure.lstrip()]
        rows.append([*cells, "; ".join(score.marks) or "-"])
    return rows


def by_environment(groups: Groups) -> dict[str, Groups]:
    """Return the groups of each environment, by its name."""
    environments: dict[str, Groups] = {}
    for label, members in groups.items():
        environments.setdefault(members[0].environment, {})[label] = members
    return environments


def environment_title(name: str, environments: Mapping[str, Groups]) -> str:
    """Return a title above the panels of an environment, as HTML, where there are several."""
    return f"<h3>{html.escape(name or 'unknown')}</h3>" if len(environments) > 1 else ""


def counted(members: Sequence[RunRecords]) -> str:
    """Return the number of seeds of a group, and of its runs where some count no seed.

    Pods that are not independent are no seeds.
    """
    seeds = len(count_seeds(members)[0])
    noun = "seed" if are_independent(members) else "pod"
    text = f"{seeds} {noun}{'' if seeds == 1 else 's'}"
    return text if seeds == len(members) else f"{text}, {len(members)} runs"


def caption(groups: Groups) -> str:
    """Return what the lines of learning curves are, nothing where no group has several runs."""
    several = any(len(count_seeds(members)[0]) > 1 for members in groups.values())
    return f"<p><small>{_CAPTION}</small></p>" if several else ""
