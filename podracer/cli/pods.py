"""The commands that train many agents at once: `podracer sweep` and `tournament`."""

from __future__ import annotations

import dataclasses
import datetime
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from podracer.cli.arguments import leading_name, read_parts
from podracer.cli.leaderboard import print_ranking
from podracer.cli.recipe_flags import find_recipe, own_recipe, parse_experiment, recipe_flag
from podracer.cli.run_options import best_run
from podracer.cli.sentences import in_flags
from podracer.cli.settings import Flag, Table
from podracer.cli.train import Attachments, NewRunOptions, run
from podracer.cli.values import Count, Mark
from podracer.config.experiment import Experiment
from podracer.config.serialization import recipe_name
from podracer.devices.machine import num_cores
from podracer.devices.startup import Hosts
from podracer.drivers.selection import Range, Rule
from podracer.errors import ConfigError
from podracer.io.directories import holds_begun_tournament, quoted_path
from podracer.io.text import while_read
from podracer.reports.standings import LiveStandings
from podracer.run.sweep import Space, configurations, make_exchange, make_pods, write_best
from podracer.tournament.config import Tournament, read_tournament
from podracer.tournament.orchestrator import run_tournament
from podracer.tournament.selection import PopulationBased


@dataclasses.dataclass(frozen=True)
class SweepOptions(NewRunOptions):
    """Flags of `podracer sweep` that are no part of the experiment."""

    vary: tuple[str, ...] = ()
    """Hyperparameters to vary: learning_rate=1e-4,3e-4 tries each value, learning_rate=1e-5:1e-2
    draws from a range; several lists of values make a grid."""
    seeds: Count = 3
    """Number of seeds for each configuration, counted up from --seed; at least 1."""
    draws: int = 0
    """Number of random configurations to draw where a hyperparameter has a range."""
    select: Rule | None = None
    """Rule of a tournament by which pods start from better ones while they train; PopulationBased
    perturbs the hyperparameters that have a range. Its own flags are in the help page of
    `podracer sweep --select RULE --help`."""
    average: Literal["all", "ring"] | None = None
    """Pods with which each pod averages its parameters while they train: `all`, or the pod before
    in a `ring`, as in GALA."""
    every: int = 0
    """Number of updates between two selections or averages, a multiple of --updates-per-chunk."""


def sweep(arguments: Sequence[str]) -> int:
    """Run `podracer sweep`: train all configurations and seeds as one program."""
    recipe, flags = leading_name(arguments, "catch_a2c")
    experiment, flags = find_recipe(recipe, flags)
    # A target is for one learner alone, and flags make the pods.
    experiment = dataclasses.replace(experiment, target_return=None, pods=(), exchange=None)
    options, experiment = parse_experiment(
        f"sweep {recipe}",
        flags,
        experiment,
        SweepOptions(),
        description="Train many configurations and seeds in parallel, as one compiled program.",
    )
    experiment.check()  # its seed is that of the draws
    seeds = range(experiment.seed, experiment.seed + options.seeds)
    spaces = read_spaces(options.vary, experiment.agent)
    pods = make_pods(spaces, seeds, options.draws, experiment.seed)
    exchange = make_exchange(options.select, options.average, options.every, spaces)
    experiment = dataclasses.replace(experiment, pods=pods, exchange=exchange)

    # A CPU becomes a device for each core: pods share nothing, so that is the fastest.
    return run(
        experiment,
        options.run_dir,
        Hosts(),
        [*options.attach, *options.track],
        recipe=own_recipe(recipe, arguments),
        num_devices=num_cores(),
        finish=finish_sweep,
    )


def finish_sweep(directory: Path, experiment: Experiment, recipe: str | None = None) -> None:
    """Write `best.json`, and print the ranking of a sweep and what to do next.

    `recipe` names the user's own recipe, which the file needs.
    """
    ranking = None
    try:
        ranking = configurations(directory, experiment)
        best = write_best(directory, experiment, ranking[0])
        outcome = f"Best      podracer train {quoted_path(best)}{recipe_flag(recipe)}"
    except ConfigError as error:
        outcome = f"Not ranked: {in_flags(str(error))}"
    with while_read():
        if ranking is not None:
            print_ranking(directory, experiment, ranking)
        print(outcome)
        print(f"Next      podracer report {quoted_path(directory)}")


def read_spaces(variations: Sequence[str], agent: Any = None) -> dict[str, Space]:
    """Return the values or the range of each hyperparameter that `NAME=VALUES` names.

    A name is a path in the `agent`, or the end of one. Raises `ConfigError` for what cannot be
    read.
    """
    table = Table(() if agent is None else (agent,))
    spaces: dict[str, Space] = {}
    for text in variations:
        name, _, values = text.partition("=")
        name = name.replace("-", "_").removeprefix("agent.")
        if table.paths(name):
            name = table.find(Flag(f"--{name}", (), False)).path
        if name in spaces:
            raise ConfigError("--vary names a hyperparameter twice: give each its values once.")
        problem = f"--vary {text!r} cannot be read:"
        if values.count(":") > 1:
            raise ConfigError(f"{problem} of a schedule only the start varies: {name}=1e-4,3e-4.")
        try:
            numbers = tuple(map(float, values.replace(":", ",").split(",")))
        except ValueError:
            numbers = (math.nan,)
        if ":" in values and len(numbers) == 2:
            spaces[name] = Range(name, *numbers)
            continue
        if ":" in values or not all(map(math.isfinite, numbers)):
            raise ConfigError(f"{problem} write name=1e-4,3e-4 or name=1e-5:1e-2.")
        if len(set(numbers)) < len(numbers):  # equal pods would count as independent seeds
            raise ConfigError(f"--vary {text!r} names a value twice: give each value once.")
        spaces[name] = numbers
    return spaces


# --- tournaments ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TournamentOptions:
    """Recipes and directory of the tournament."""

    recipes: Annotated[tuple[str, ...], Mark.POSITIONAL] = ()
    """Recipes that pods begin with, in turn; by default cartpole_ppo."""
    vary: tuple[str, ...] = ()
    """Hyperparameters that PopulationBased draws and perturbs, each with its range; by default
    learning_rate=1e-5:1e-2."""
    run_dir: Path | None = None
    """Directory that keeps the tournament. By default a new one is made in runs/."""
    attach: Attachments = ()


def tournament(arguments: Sequence[str]) -> int:
    """Run `podracer tournament`: pods that train, submit, and restart from the leaderboard."""
    parts = (TournamentOptions(), Tournament((), rounds=4, round_frames=32_768))
    description = "Train pods that submit to a leaderboard and restart from it."
    options, settings = read_parts(parts, "tournament", arguments, description)
    names = options.recipes or ("cartpole_ppo",)
    experiments = tuple(find_recipe(name, ())[0] for name in names)
    settings = dataclasses.replace(settings, experiments=experiments)
    if spaces := read_spaces(options.vary, experiments[0].agent):
        if not isinstance(settings.selection, PopulationBased):
            raise ConfigError("--vary belongs to --selection PopulationBased.")
        bounds = tuple(space for space in spaces.values() if isinstance(space, Range))
        if len(bounds) < len(spaces):
            raise ConfigError("--vary needs ranges here, such as learning_rate=1e-5:1e-2.")
        selection = dataclasses.replace(settings.selection, bounds=bounds)
        settings = dataclasses.replace(settings, selection=selection)
    time_of_start = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    directory = options.run_dir or Path("runs") / f"tournament-{time_of_start}"
    if holds_begun_tournament(directory):
        raise ConfigError(f"{directory} already holds a tournament: resume it, or choose another.")
    own_recipes = list(filter(None, map(own_recipe, names)))
    return run_on_terminal(settings, directory, own_recipes, options.attach)


def resume_tournament(directory: Path, recipe: str | None) -> int:
    """Continue a tournament; `recipe` names the recipes of the user's own, joined by commas."""
    names = recipe.split(",") if recipe else []
    user_experiments = [find_recipe(name, ())[0] for name in names]
    return run_on_terminal(read_tournament(directory, user_experiments), directory, names)


def run_on_terminal(
    settings: Tournament, directory: Path, own_recipes: Sequence[str], attach: Attachments = ()
) -> int:
    """Start or continue a tournament, shown on the terminal, and return the exit code."""
    own_recipes = tuple(dict.fromkeys(own_recipes))
    if settings.engine != "inline":  # this process only makes environments: GPUs are for the pods
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    with LiveStandings(settings.rounds, directory) as live:
        code = run_tournament(settings, directory, own_recipes, live.show, attach)
    outcome = {0: "Finished", 75: "Preempted", 130: "Stopped"}[code]
    path = quoted_path(directory)
    with while_read():
        print(f"{outcome:9} {path}")
        if best := best_run(directory):
            used = (name for name in own_recipes if name.rpartition(":")[2] == recipe_name(best))
            print(f"Best      podracer eval {quoted_path(best)}{recipe_flag(next(used, None))}")
        print(f"Next      podracer report {path}")
        if code:
            print(f"          podracer resume {path}{recipe_flag(','.join(own_recipes))}")
    return code
