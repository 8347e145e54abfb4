"""What pages and tables say of runs that differ only in the seed: their score, and the lines."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from podracer.reports.charts import Groups
from podracer.scores.format import number
from podracer.scores.runs import RunRecords
from podracer.scores.seeds import Score, are_independent, count_seeds, score_of_runs
from podracer.scores.statistics import ENOUGH

REMARKS = "Remarks"
_SENTENCES = 8  # more are folded


def final_scores(groups: Groups, *, of_directories: bool = False) -> str:
    """Return a sentence on the final score of each group of several runs, as HTML.

    With `of_directories` only for groups whose runs are in several directories.
    """
    sentences = []
    for label, members in groups.items():
        places = {run.top.path for run in members} if of_directories else members
        if len(places) > 1:
            peers = [runs for runs in groups.values() if runs[0].recipe == members[0].recipe]
            sentences.append(_sentence(label, members, score_of_runs(members, peers)))
    content = "".join(sentences)
    if len(sentences) <= _SENTENCES:
        return content
    title = f"Scores of {len(sentences)} configurations"
    return f"<details><summary>{title}</summary>{content}</details>"


def _sentence(label: str, members: Sequence[RunRecords], score: Score) -> str:
    acting = f"{members[0].acting} evaluation".lstrip()
    name = acting if score.is_evaluation else "episode return"
    interval = f", 95 % interval {spread_text(score)}" if score.interval else ""
    marks = f" <b>{html.escape('; '.join(score.marks))}</b>" if score.marks else ""
    return (
        f"<p><b>{html.escape(label)}</b>: final {name} {number(score.mean)}{interval} "
        f"<small>({html.escape(_basis(score))})</small>{marks}</p>"
    )


def _basis(score: Score) -> str:
    """Return over what a score is a mean, of few seeds with each value."""
    count = len(score.values)
    mean = "interquartile mean" if count >= ENOUGH else "mean"
    seeds = f"{count} {'seed' if count == 1 else 'seeds'}"
    if not score.are_independent:
        return f"{mean} over {count} pods, which are not independent"
    if score.interval:
        return f"{mean} over {seeds}, bootstrap"
    return f"{mean} over {seeds}: {spread_text(score)}" if count > 1 else seeds


def remarks(groups: Groups) -> dict[str, str]:
    """Return by a run's name what a reader must know of it, for those that have such a thing."""
    notes = {}
    for members in groups.values():
        repeated = count_seeds(members)[1]
        for run in members:
            marks = ([repeated[run.name]] if run.name in repeated else []) + run.marks
            if marks:
                notes[run.name] = "; ".join(marks)
    return notes


def by_environment(groups: Groups) -> dict[str, Groups]:
    """Return the groups of each environment, by its name."""
    environments: dict[str, Groups] = {}
    for label, members in groups.items():
        environments.setdefault(members[0].environment, {})[label] = members
    return environments


def environment_title(name: str, environments: Mapping[str, Groups]) -> str:
    """Return a title above the panels of an environment, as HTML, where there are several."""
    return f"<h3>{html.escape(name or 'unknown')}</h3>" if len(environments) > 1 else ""


def spread_text(score: Score) -> str:
    """Return the 95 % interval of a score; of few seeds the score of each."""
    if score.interval:
        return " to ".join(map(number, score.interval))
    if score.are_independent and 1 < len(score.values) < ENOUGH:
        return ", ".join(number(float(value)) for value in score.values)
    return "-"


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
    counted_runs = (count_seeds(members)[0] for members in groups.values())
    several = [members for members in counted_runs if len(members) > 1]
    enough = [members for members in several if len(members) >= ENOUGH]
    kinds = dict.fromkeys("seeds" if are_independent(members) else "pods" for members in several)
    nouns = " or ".join(kinds)
    sentences = []
    if any(map(are_independent, enough)):
        sentences.append(
            "A thick line is the interquartile mean over seeds, in its 95 % bootstrap interval."
        )
    if not all(map(are_independent, enough)):
        sentences.append(
            "The interquartile mean over pods that are not independent has no interval."
        )
    if len(enough) < len(several):
        sentences.append(
            f"A thick line of fewer than five {nouns} is their mean, which has no interval."
        )
    if several:
        sentences.append(
            f"Thin lines are the {nouns}. All lines are running means over 2 % of a run."
        )
    if any(run.is_evaluated for members in several for run in members):
        sentences.append(f"A dotted line joins the evaluations of one of the {nouns}.")
    if any(len({run.last("updates") for run in members}) > 1 for members in several):
        sentences.append(
            f"A mean over {nouns} is dashed where one of its runs has ended; that run's last value "
            "counts on."
        )
    return f"<p><small>{' '.join(sentences)}</small></p>" if sentences else ""
