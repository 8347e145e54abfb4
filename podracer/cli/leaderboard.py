"""The command `podracer leaderboard`: the ranking of a tournament or of a sweep."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from podracer.cli.run_options import RunOptions, RunPath
from podracer.errors import ConfigError
from podracer.io.addresses import in_addresses
from podracer.io.directories import quoted_path

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
    if options.json:
        for entry in state.board:
            print(json.dumps(entry_as_json(entry)))
        return 0
    rounds = state.header.tournament["rounds"]
    with LiveStandings(rounds, options.run, whole=True) as live, suppress(KeyboardInterrupt):
        live.show(state)
        while options.watch:
            time.sleep(1.0)
            live.show(state_after(read_events(options.run)))
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
        values = {parameter.name: parameter.value for parameter in configuration.hyperparameters}
        row = {"hyperparameters": values, "pods": list(configuration.pods)}
        score = configuration.score
        mean = score.mean if math.isfinite(score.mean) else None
        row |= {"score": mean, "seeds": len(score.values), "remarks": score.marks}
        print(json.dumps(row))
    return 0


def print_ranking(
    directory: Path, experiment: Experiment, ranking: Sequence[Configuration]
) -> None:
    """Print the configurations of a sweep, best first, and what a selection has done."""
    from rich.console import Console
    from rich.table import Column, Table

    from podracer.drivers.selection import Generational, Selection
    from podracer.io.sinks import PARENT
    from podracer.run.sweep import ancestors, read_pods, selections
    from podracer.scores.format import number
    from podracer.scores.runs import acting_text
    from podracer.scores.statistics import ENOUGH

    records = selections(read_pods(directory))
    values = [{h.name: h.value for h in configuration.hyperparameters} for configuration in ranking]
    names = list(dict.fromkeys(name for of_name in values for name in of_name))
    acting = acting_text(experiment.evaluation_policy, experiment.evaluation_epsilon)
    # Pods of one configuration are independent seeds only without an exchange.
    are_seeds = experiment.exchange is None
    enough = {len(configuration.score.values) >= ENOUGH for configuration in ranking}
    kinds = {True: ("IQM", "95 %"), False: ("mean", "each seed")}
    score, spread = map(" or ".join, zip(*map(kinds.get, enough), strict=True))
    columns = (spread, "seeds") if are_seeds else ("pods",)
    heads = (*names, f"{acting} evaluation ({score})", *columns)
    columns = [Column(name, overflow="fold") for name in heads]
    table = Table(*columns, box=None, padding=(0, 3, 0, 0))
    rows = list(zip(ranking, values, strict=True))[:20]
    for configuration, of_name in rows:
        table.add_row(
            *(f"{of_name[name]:.4g}" if name in of_name else "-" for name in names),
            number(configuration.score.mean),
            *([configuration.score.spread] if are_seeds else []),
            str(len(configuration.score.values)),
        )
    Console().print(table)
    if len(ranking) > 20:
        print(f"and {len(ranking) - 20} more")
    for configuration, of_name in rows:
        if marks := "; ".join(configuration.score.marks):
            label = ", ".join(f"{name} {value:.4g}" for name, value in of_name.items())
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
