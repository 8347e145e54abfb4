"""What a report says of runs that differ only in the seed: their final score, and the lines."""

from __future__ import annotations

import html
from collections.abc import Sequence

import numpy as np

from podracer.experiments.statistics import ENOUGH, bootstrap_interval, score_of_seeds
from podracer.reports.console import number
from podracer.reports.curves import Groups, RunRecords, are_independent


def final_score(label: str, members: Sequence[RunRecords]) -> str:
    """Return the final score of a group over its seeds, in words; of few seeds also each value."""
    evaluation = f"{members[0].acting} evaluation".lstrip()
    for key, name in (("evaluation_return", evaluation), ("episode_return", "episode return")):
        finals = np.concatenate([run.series(key, "updates")[1][-1:] for run in members])
        if len(finals) > 1:
            score = number(float(score_of_seeds(finals)))
            mean = "interquartile mean" if len(finals) >= ENOUGH else "mean"
            interval, count = "", f"{len(finals)} seeds"
            if not are_independent(members):
                count = f"{len(finals)} pods, which are not independent"
            elif len(finals) >= ENOUGH:
                low, high = (number(float(bound)) for bound in bootstrap_interval(finals))
                interval, count = f", 95 % interval {low} to {high}", f"{count}, bootstrap"
            else:
                count = f"{count}: {', '.join(number(float(value)) for value in finals)}"
            return (
                f"<p><b>{html.escape(label)}</b>: final {name} {score}{interval} "
                f"<small>({mean} over {count})</small></p>"
            )
    return ""


def caption(groups: Groups) -> str:
    """Return what the lines of learning curves are, nothing where no group has several runs."""
    several = [members for members in groups.values() if len(members) > 1]
    enough = [members for members in several if len(members) >= ENOUGH]
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
            "A thick line of fewer than five seeds is their mean, which has no interval."
        )
    if several:
        sentences.append("Thin lines are the seeds.")
    if any(len({run.last("updates") for run in members}) > 1 for members in several):
        sentences.append(
            "A mean over seeds is dashed where one of its runs has ended; that run's last value "
            "counts on."
        )
    return f"<p><small>{' '.join(sentences)}</small></p>" if sentences else ""
