"""The command `podracer leaderboard`: the ranking of a tournament or of a sweep."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from podracer.cli.run_options import RunOptions, RunPath
from podracer.errors import ConfigError
from podracer.io.addresses import COPIES, in_addresses, local_run
from podracer.io.directories import quoted_path
from podracer.io.text import print_json

if TYPE_CHECKING:
    from podracer.config.experiment import Experiment
    from podracer.run.sweep import Configuration


@dataclasses.dataclass(frozen=True)
class LeaderboardOptions(RunOptions):
    """Print the ranking of a tournament or of a sweep, also while it runs."""

    run: RunPath
    """Directory of the tournament or sweep, or its address in a store: s3://, gs://, az:// or
    file://."""
    watch: bool = False
    """Show the leaderboard of a tournament again every second until Ctrl-C."""
    json: bool = False
    """Print one JSON object for each entry of a tournament, or for each configuration of a sweep,
    best first."""
    release: int | None = None
    """Pod of a tournament, from 0 on, whose quarantine ends: podracer resume starts it again."""


def leaderboard(options: LeaderboardOptions) -> int:
    """Run `podracer leaderboard`: print the ranking of a tournament or of a sweep."""
    from podracer.run.sweep import RECORDS

    if (options.run / RECORDS).exists():
        return _leaderboard_of_sweep(options)
    from podracer.reports.standings import LiveStandings, entry_as_json
    from podracer.tournament.events import check_settings, state_after
    from podracer.tournament.leaderboard import Leaderboard, read_events

    if options.release is not None:
        if (place := in_addresses(str(options.run))) != str(options.run):
            raise ConfigError(f"release it in a directory: podracer resume {place} --run-dir DIR.")
        with Leaderboard(options.run) as board:
            board.release(options.release)
        print(f"Released  pod {options.release}")
        print(f"Next      podracer resume {quoted_path(options.run)}")
        return 0
    state = state_after(read_events(options.run))
    check_settings(state.header)
    if options.json and options.watch:
        raise ConfigError("--json prints the ranking once, and --watch shows it again: take one.")
    if options.json:
        for entry in state.board:
            print_json(entry_as_json(entry))
        return 0
    rounds = state.header.tournament["rounds"]
    with LiveStandings(rounds, options.run, whole=True) as live, suppress(KeyboardInterrupt):
        live.show(state)
        while options.watch:
            time.sleep(1.0)
            live.show(state_after(read_events(local_run(COPIES.get(options.run, options.run)))))
    return 0


def _leaderboard_of_sweep(options: LeaderboardOptions) -> int:
    from podracer.run.sweep import configurations

    if options.watch:
        raise ConfigError(
            f"--watch is for tournaments: podracer report {options.run} --every 10 shows a sweep."
        )
    if options.release is not None:
        raise ConfigError("--release is for tournaments: no pod of a sweep is quarantined.")
    experiment = options.reopen()
    ranking = configurations(options.run, experiment)
    if not options.json:
        print_ranking(options.run, experiment, ranking)
        return 0
    for configuration in ranking:
        row = {
            "hyperparameters": {h.name: h.value for h in configuration.hyperparameters},
            "pods": configuration.pods,
            "score": configuration.score.mean,
            "seeds": len(configuration.score.values),
            "remarks": configuration.score.marks,
        }
        print_json(row)
    return 0


def print_ranking(
    directory: Path, experiment: Experiment, ranking: Sequence[Configuration]
) -> None:
    """Print the configurations of a sweep, best first, and what a selection has done."""
    from rich.table import Column, Table

    from podracer.drivers.selection import Generational, Selection
    from podracer.io.sinks import PARENT
    from podracer.run.console import Terminal
    from podracer.run.sweep import ancestors, read_pods, selections
    from podracer.scores.format import number
    from podracer.scores.runs import acting_text
    from podracer.scores.statistics import ENOUGH

    records = selections(read_pods(directory))
    rows = [({h.name: h.value for h in x.hyperparameters}, x.score) for x in ranking]
    names = list(dict.fromkeys(name for values, _ in rows for name in values))
    acting = acting_text(experiment.evaluation_policy, experiment.evaluation_epsilon)
    # Pods of one configuration are independent seeds only without an exchange.
    are_seeds = experiment.exchange is None
    sizes = [len(score.values) for _, score in rows]
    kinds = [("mean", "each seed")] if min(sizes) < ENOUGH else []
    kinds += [("IQM", "95 %")] if max(sizes) >= ENOUGH else []
    mean, spread = map(" or ".join, zip(*kinds, strict=True))
    heads = (*names, f"{acting} evaluation ({mean})")
    heads += (spread, "seeds") if are_seeds else ("pods",)
    table = Table(*(Column(x, overflow="fold") for x in heads), box=None, padding=(0, 3, 0, 0))
    for values, score in rows[:20]:
        table.add_row(
            *(f"{values[name]:.4g}" if name in values else "-" for name in names),
            number(score.mean),
            *([score.spread] if are_seeds else []),
            str(len(score.values)),
        )
    Terminal().print(table)
    if len(rows) > 20:
        print(f"and {len(rows) - 20} more")
    for values, score in rows[:20]:
        if marks := "; ".join(score.marks):
            label = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
            print(f"Remarks   {label}{': ' if label else ''}{marks}")
    if records:
        assert isinstance(experiment.exchange, Selection)
        num_pods, rule = len(experiment.pods), experiment.exchange.rule
        # A record names the first pod of the parent's group.
        size = rule.group_size if isinstance(rule, Generational) else 1
        replaced = sum(
            parent // size != pod // size
            for record in records
            for pod, parent in enumerate(record[PARENT])
        )
        print(
            f"Selected  {len(records)} times, {replaced} starts from another pod; all {num_pods} "
            f"pods descend from {len(set(ancestors(records)))} of the initial ones"
        )
