"""The commands that train many agents at once: `podracer sweep`, `tournament`, `leaderboard`."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from podracer.cli.arguments import (
    Trackers,
    Variations,
    leading_name,
    read_variations,
    require_in_range,
    take_flags,
)
from podracer.cli.run_options import RunOptions, best_run
from podracer.cli.running import run
from podracer.devices.startup import Hosts
from podracer.io.directories import holds_begun_tournament, quoted_path

if TYPE_CHECKING:
    from podracer.config.experiment import Experiment
    from podracer.run.sweep import Configuration
    from podracer.tournament.config import Tournament


@dataclasses.dataclass(frozen=True)
class SweepOptions:
    """Flags of `podracer sweep` that are no part of the experiment."""

    vary: Variations = ()
    """Hyperparameters to vary: learning_rate=1e-4,3e-4 tries each value, learning_rate=1e-5:1e-2
    draws from a range; several lists of values make a grid."""
    seeds: int = 3
    """Number of seeds for each configuration, counted up from --seed; at least 1."""
    draws: int = 0
    """Number of random configurations to draw where a hyperparameter has a range."""
    select: Literal["population-based", "truncation", "generational"] | None = None
    """Rule of a tournament by which pods start from better ones while they train;
    population-based perturbs the hyperparameters that have a range. Its own flags are in the help
    page of `podracer sweep --select RULE --help`."""
    average: Literal["all", "hypercube", "ring"] | None = None
    """Pods with which each pod averages its parameters while they train: `all`, one neighbor of a
    `hypercube` after the other, or the pod before in a `ring`, as in GALA."""
    every: int = 0
    """Number of updates between two selections or averages, a multiple of --updates-per-chunk."""
    run_dir: Path | None = None
    """Directory that keeps the sweep. By default a new one is made in runs/."""
    track: Trackers = ()


def sweep(arguments: Sequence[str]) -> int:
    """Run `podracer sweep`: train all configurations and seeds as one program."""
    from podracer.cli.recipe_flags import find_recipe, own_recipe, parse_experiment
    from podracer.devices.machine import num_cores
    from podracer.drivers.selection import RULES
    from podracer.run.sweep import make_exchange, make_pods

    recipe, flags = leading_name(arguments, "catch_a2c")
    experiment, flags = find_recipe(recipe, flags)
    experiment = dataclasses.replace(experiment, target_return=None)  # that of one learner alone
    kind = RULES.get(take_flags(flags, "select")[0].get("select", ""))
    options, experiment, rules = parse_experiment(
        f"sweep {recipe}",
        flags,
        experiment,
        SweepOptions(),
        {"selection": kind()} if kind else {},
        "Train many configurations and seeds in parallel, as one compiled program.",
    )
    seeds = range(experiment.seed, experiment.seed + require_in_range("--seeds", options.seeds))
    variations = read_variations(options.vary)
    pods = make_pods(variations, seeds, options.draws, experiment.seed)
    rule = rules.get("selection")
    exchange = make_exchange(rule, options.average, options.every, variations)
    experiment = dataclasses.replace(experiment, pods=pods, exchange=exchange)

    # A CPU becomes a device for each core: pods share nothing, so that is the fastest.
    return run(
        experiment,
        options.run_dir,
        Hosts(),
        resume=False,
        recipe=own_recipe(recipe, arguments),
        track=options.track,
        num_devices=num_cores(),
        finish=finish_sweep,
    )


def finish_sweep(directory: Path, experiment: Experiment, recipe: str | None = None) -> None:
    """Write `best.json`, and print the ranking of a sweep and what to do next.

    `recipe` names the user's own recipe, which the file needs.
    """
    from podracer.errors import ConfigError
    from podracer.run.sweep import configurations, write_best

    ranking: list[Configuration] = []
    try:
        ranking = configurations(directory, experiment)
        best = write_best(directory, experiment, ranking[0])
        flag = f" --recipe {recipe}" if recipe else ""
        outcome = f"Best      podracer train {quoted_path(best)}{flag}"
    except ConfigError as error:
        outcome = f"Not ranked: {error}"
    with suppress(OSError):  # a reader of the output that has left, as in `| head`
        if ranking:
            _print_ranking(directory, experiment, ranking)
        print(outcome)
        print(f"Next      podracer report {quoted_path(directory)}")


def _print_ranking(
    directory: Path, experiment: Experiment, ranking: Sequence[Configuration]
) -> None:
    """Print the configurations of a sweep, best first, and what a selection has done."""
    from rich.console import Console
    from rich.table import Table

    from podracer.drivers.selection import Generational, Selection
    from podracer.io.sinks import PARENT
    from podracer.reports.console import number
    from podracer.reports.seeds import spread_text
    from podracer.run.sweep import ancestors, selections
    from podracer.scores.runs import acting_text
    from podracer.scores.statistics import ENOUGH

    records = selections(directory)
    values = [{h.name: h.value for h in configuration.hyperparameters} for configuration in ranking]
    names = list(dict.fromkeys(name for of_name in values for name in of_name))
    acting = acting_text(experiment.evaluation_policy, experiment.evaluation_epsilon)
    # Pods of one configuration are independent seeds only without an exchange.
    are_seeds = experiment.exchange is None
    enough = {len(configuration.score.values) >= ENOUGH for configuration in ranking}
    kinds = {True: ("IQM", "95 %"), False: ("mean", "each seed")}
    words = zip(*(kinds[is_enough] for is_enough in enough), strict=True)
    score, spread = (" or ".join(words_of_column) for words_of_column in words)
    columns = (spread, "seeds") if are_seeds else ("pods",)
    columns = (*names, f"{acting} evaluation ({score})", *columns)
    table = Table(*columns, box=None, padding=(0, 3, 0, 0))
    for configuration, of_name in list(zip(ranking, values, strict=True))[:20]:
        table.add_row(
            *(f"{of_name[name]:.4g}" if name in of_name else "-" for name in names),
            number(configuration.score.mean),
            *([spread_text(configuration.score)] if are_seeds else []),
            str(len(configuration.score.values)),
        )
    Console().print(table)
    if len(ranking) > 20:
        print(f"and {len(ranking) - 20} more")
    for configuration, of_name in list(zip(ranking, values, strict=True))[:20]:
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


# --- tournaments ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TournamentOptions:
    """Selection rule and directory of the tournament."""

    recipes: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Recipes that pods begin with, in turn; by default cartpole_ppo."""
    selection: str = "PopulationBased"
    """Rule that chooses how a pod starts its next round: Independent, Uniform, Softmax,
    KTournament, Truncation, PopulationBased or Generational. Its own flags are in the help page of
    `podracer tournament --selection RULE --help`."""
    vary: Variations = ()
    """Hyperparameters that PopulationBased perturbs, each with its range, such as
    learning_rate=1e-5:1e-2."""
    run_dir: Path | None = None
    """Directory that keeps the tournament. By default a new one is made in runs/."""


def tournament(arguments: Sequence[str]) -> int:
    """Run `podracer tournament`: pods that train, submit, and restart from the leaderboard."""
    from podracer.cli.flags import group_of, parse_parts
    from podracer.cli.recipe_flags import find_recipe, own_recipe
    from podracer.config.ranges import read_range
    from podracer.errors import ConfigError
    from podracer.io.names import nearest
    from podracer.tournament.config import Tournament
    from podracer.tournament.selection import SELECTION_RULES, PopulationBased

    name = take_flags(arguments, "selection")[0].get("selection", TournamentOptions.selection)
    if name not in SELECTION_RULES:
        raise ConfigError(f"There is no selection rule {name!r}: {nearest(name, SELECTION_RULES)}")
    # Without the experiments, which have no flags: objects of the user's own may be in them.
    default = Tournament((), SELECTION_RULES[name](), rounds=4, round_frames=32_768)
    parts = {"run": TournamentOptions(selection=name), "tournament": default}
    groups = {title: group_of(part) for title, part in parts.items()}
    about = "Train pods that submit to a leaderboard and restart from it."
    values = parse_parts(groups, "tournament", arguments, about)
    options = TournamentOptions(**values["run"])
    names = options.recipes or ("cartpole_ppo",)
    experiments = tuple(find_recipe(name, ())[0] for name in names)
    settings = dataclasses.replace(default, experiments=experiments, **values["tournament"])
    if variations := read_variations(options.vary):
        if not isinstance(settings.selection, PopulationBased):
            raise ConfigError("--vary belongs to --selection PopulationBased.")
        bounds = tuple(map(read_range, variations))
        selection = dataclasses.replace(settings.selection, bounds=bounds)
        settings = dataclasses.replace(settings, selection=selection)
    time_of_start = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    directory = options.run_dir or Path("runs") / f"tournament-{time_of_start}"
    if holds_begun_tournament(directory):
        raise ConfigError(f"{directory} already holds a tournament: resume it, or choose another.")
    return _run(settings, directory, [own for name in names if (own := own_recipe(name))])


def resume_tournament(directory: Path, recipe: str | None) -> int:
    """Continue a tournament; `recipe` names the recipes of the user's own, joined by commas."""
    from podracer.cli.recipe_flags import find_recipe
    from podracer.tournament.config import read_tournament

    names = recipe.split(",") if recipe else []
    user_experiments = [find_recipe(name, ())[0] for name in names]
    return _run(read_tournament(directory, user_experiments), directory, names)


def _run(settings: Tournament, directory: Path, own_recipes: Sequence[str]) -> int:
    """Start or continue a tournament, shown on the terminal, and return the exit code."""
    from podracer.reports.standings import LiveStandings
    from podracer.tournament.orchestrator import run_tournament

    own_recipes = tuple(dict.fromkeys(own_recipes))
    if settings.engine != "inline":  # this process only makes environments: GPUs are for the pods
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    with LiveStandings(settings.rounds, directory) as live:
        code = run_tournament(settings, directory, own_recipes, live.show)
    outcome = {0: "Finished", 75: "Preempted", 130: "Stopped"}[code]
    where = quoted_path(directory)
    print(f"{outcome:9} {where}")
    if best := best_run(directory):
        print(f"Best      podracer eval {quoted_path(best)}")
    print(f"Next      podracer report {where}")
    if code:
        flag = f" --recipe {','.join(own_recipes)}" if own_recipes else ""
        print(f"          podracer resume {where}{flag}")
    return code


@dataclasses.dataclass(frozen=True)
class LeaderboardOptions(RunOptions):
    """Print the ranking of a tournament or of a sweep, also while it runs."""

    watch: bool = False
    """Show the leaderboard of a tournament again every second until Ctrl-C."""
    json: bool = False
    """Print one JSON object for each entry of a tournament, or for each configuration of a sweep,
    best first."""


def leaderboard(options: LeaderboardOptions) -> int:
    """Run `podracer leaderboard`: print the ranking of a tournament or of a sweep."""
    from podracer.run.sweep import RECORDS

    if (options.run / RECORDS).exists():
        return _leaderboard_of_sweep(options)
    from podracer.reports.standings import LiveStandings, entry_as_json
    from podracer.tournament.events import check_settings, state_after
    from podracer.tournament.leaderboard import read_events

    state = state_after(read_events(options.run))
    check_settings(state.header)
    if options.json:
        for entry in state.board:
            print(json.dumps(entry_as_json(entry, state)))
        return 0
    rounds = state.header.tournament["rounds"]
    with LiveStandings(rounds, options.run, whole=True) as live, suppress(KeyboardInterrupt):
        live.show(state)
        while options.watch:
            time.sleep(1.0)
            live.show(state_after(read_events(options.run)))
    return 0


def _leaderboard_of_sweep(options: LeaderboardOptions) -> int:
    from podracer.errors import ConfigError
    from podracer.run.sweep import configurations

    if options.watch:
        raise ConfigError(
            f"--watch is for tournaments: podracer watch {options.run} shows a sweep."
        )
    experiment = options.reopen()
    ranking = configurations(options.run, experiment)
    if not options.json:
        _print_ranking(options.run, experiment, ranking)
        return 0
    for configuration in ranking:
        values = {parameter.name: parameter.value for parameter in configuration.hyperparameters}
        row = {"hyperparameters": values, "pods": list(configuration.pods)}
        score = configuration.score
        mean = score.mean if math.isfinite(score.mean) else None
        print(
            json.dumps({**row, "score": mean, "seeds": len(score.values), "remarks": score.marks})
        )
    return 0
