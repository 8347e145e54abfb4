"""The commands that train many at once: `podracer sweep`, `tournament` and `leaderboard`."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from podracer.cli.arguments import RunPath, parse, recipe_of, value_of
from podracer.experiments.hosts import Hosts, join
from podracer.tournament import is_tournament

if TYPE_CHECKING:
    from podracer.tournament.config import Tournament


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Which configurations to try."""

    vary: tuple[str, ...] = ()
    """`learning_rate=1e-4,3e-4` to try each value, `learning_rate=1e-5:1e-2` to draw from; several
    make a grid."""
    seeds: int = 3
    """Of each configuration, from --seed on."""
    draws: int = 0
    """Random configurations, where something has a range."""
    run_dir: Path | None = None
    """Where the sweep is kept; by default a new directory under runs/."""


def sweep(arguments: Sequence[str]) -> int:
    """`podracer sweep`: one program that trains all configurations and seeds."""
    named = bool(arguments) and not arguments[0].startswith("-")
    recipe, rest = (arguments[0], list(arguments[1:])) if named else ("catch_a2c", list(arguments))
    experiment, rest = recipe_of(recipe, rest)
    fields = [("sweep", Sweep), ("experiment", type(experiment))]
    command = dataclasses.make_dataclass("SweepCommand", fields, frozen=True)
    parsed = parse(command, f"sweep {recipe}", rest, command(Sweep(), experiment))
    settings, experiment = parsed.sweep, parsed.experiment
    from podracer.experiments.sweep import make_pods
    from podracer.types import ConfigError

    if settings.seeds < 1:
        raise ConfigError(f"--seeds must be at least 1, but it is {settings.seeds}.")
    seeds = range(experiment.seed, experiment.seed + settings.seeds)
    pods = make_pods(settings.vary, seeds, settings.draws, experiment.seed)
    experiment = dataclasses.replace(experiment, pods=pods, target_return=None)
    # A CPU becomes a device for each core: pods share nothing, so that is the fastest.
    join(Hosts(), experiment.devices or os.cpu_count() or 1)
    from podracer.experiments.training import train

    result = train(experiment, run_dir=settings.run_dir, show=True)
    if result.exit_code == 0:
        _show(result.run_dir)
    return result.exit_code


def _show(directory: Path) -> None:
    """The table of a sweep, best configuration first, and what to do with it."""
    from rich.console import Console
    from rich.table import Table

    from podracer.experiments.sweep import configurations, write_best
    from podracer.reports.console import number
    from podracer.reports.curves import bootstrap_interval

    found = configurations(directory)
    names = [each.name for each in found[0].hyperparameters]
    table = Table(*names, "evaluation", "95 %", "seeds", box=None, padding=(0, 3, 0, 0))
    for configuration in found[:20]:
        returns = configuration.returns
        low, high = (number(float(x)) for x in bootstrap_interval(returns))
        table.add_row(
            *(f"{each.value:.4g}" for each in configuration.hyperparameters),
            number(configuration.score),
            f"{low} to {high}" if len(returns) > 1 else "-",
            str(len(returns)),
        )
    Console().print(table)
    if len(found) > 20:
        print(f"and {len(found) - 20} more")
    print(f"Best      podracer train {write_best(directory)}")
    print(f"Next      podracer report {directory}")


# --- tournaments ----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Choice:
    """How pods are chosen, and where everything is kept."""

    rule: str = "PopulationBased"
    """Independent, Uniform, Softmax, KTournament, Truncation, PopulationBased or Generational; its
    own flags follow it."""
    vary: tuple[str, ...] = ()
    """Of PopulationBased: what varies and within what, `learning_rate=1e-5:1e-2`."""
    run_dir: Path | None = None
    """Where the tournament is kept; by default a new directory under runs/."""


def tournament(arguments: Sequence[str]) -> int:
    """`podracer tournament`: pods that train, submit, and start again from the leaderboard."""
    names = list(itertools.takewhile(lambda each: not each.startswith("-"), arguments))
    rest = list(arguments[len(names) :])
    from podracer.experiments import recipes
    from podracer.experiments.ranges import read_range
    from podracer.io.names import nearest
    from podracer.tournament.config import Tournament
    from podracer.tournament.selection import SELECTION_RULES, PopulationBased
    from podracer.types import ConfigError

    experiments = tuple(recipes.find(name) for name in names or ["cartpole_ppo"])
    rule = value_of(rest, "--rule") or Choice.rule
    if rule not in SELECTION_RULES:
        raise ConfigError(f"There is no rule {rule!r}: {nearest(rule, SELECTION_RULES)}")
    default = Tournament(experiments, SELECTION_RULES[rule](), rounds=4, round_frames=32_768)
    fields = [("choice", Choice), ("tournament", Tournament)]
    command = dataclasses.make_dataclass("TournamentCommand", fields, frozen=True)
    parsed = parse(command, "tournament", rest, command(Choice(rule), default))
    choice, chosen = parsed.choice, parsed.tournament
    if choice.vary:
        if not isinstance(chosen.rule, PopulationBased):
            raise ConfigError("--vary belongs to --rule PopulationBased.")
        bounds = tuple(map(read_range, choice.vary))
        chosen = dataclasses.replace(chosen, rule=dataclasses.replace(chosen.rule, bounds=bounds))
    moment = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    directory = choice.run_dir or Path("runs") / f"tournament-{moment}"
    if is_tournament(directory):
        raise ConfigError(f"{directory} already holds a tournament: resume it, or choose another.")
    return run_tournament(chosen, directory)


def run_tournament(chosen: Tournament, directory: Path) -> int:
    """Begin a tournament or go on with it, shown on the terminal, to its last lines."""
    from podracer.reports.standings import LiveStandings
    from podracer.tournament.orchestrator import run

    with LiveStandings(chosen.rounds, directory) as watch:
        code = run(chosen, directory, watch.show)
    outcome = {0: "Finished", 75: "Preempted, saved", 130: "Stopped, saved"}[code]
    print(f"{outcome:10}podracer report {directory}")
    if code:
        print(f"Next      podracer resume {directory}")
    return code


def leaderboard(arguments: Sequence[str]) -> int:
    """`podracer leaderboard`: how a tournament stands, also while it runs."""

    @dataclasses.dataclass(frozen=True)
    class Board:
        directory: RunPath
        """The tournament's directory."""
        watch: bool = False
        """Go on showing it until Ctrl-C."""
        json: bool = False
        """Print one JSON object for each entry, best first."""

    parsed = parse(Board, "leaderboard", arguments)
    from podracer.reports.standings import LiveStandings, entry_as_json
    from podracer.tournament.config import read_tournament
    from podracer.tournament.events import replay
    from podracer.tournament.leaderboard import read_events

    state = replay(read_events(parsed.directory))
    if parsed.json:
        for entry in state.board:
            print(json.dumps(entry_as_json(entry)))
        return 0
    rounds = read_tournament(parsed.directory).rounds
    with LiveStandings(rounds, parsed.directory, whole=True) as watch, suppress(KeyboardInterrupt):
        watch.show(state)
        while parsed.watch:
            time.sleep(1.0)
            watch.show(replay(read_events(parsed.directory)))
    return 0
