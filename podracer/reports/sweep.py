"""Configurations of a sweep beside each other, best first."""

from __future__ import annotations

from podracer.reports.charts import Groups, differing_settings, settings_text
from podracer.reports.page import table
from podracer.reports.seeds import REMARKS, by_environment, environment_title, spread_text
from podracer.scores.format import number
from podracer.scores.seeds import score_of_runs

_FEWEST = 3  # configurations that are a sweep
_RANKED = 20  # configurations at most


def sweep(groups: Groups) -> str:
    """Return a ranking of the configurations in each environment, where they are many."""
    environments, parts = by_environment(groups), []
    for environment, members in environments.items():
        if len(members) < _FEWEST or not differing_settings(members)[next(iter(members))]:
            continue
        parts.append(environment_title(environment, environments) + ranking(members))
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
            ", ".join(settings_text(settings[label], 3)) or label,
            str(len(groups[label])),
            number(scores[label].mean),
            spread_text(scores[label]),
            "; ".join(scores[label].marks) or "-",
        ]
        for label in sorted(scores, key=lambda label: scores[label].rank)[:_RANKED]
    ]
    return table(head, rows)
