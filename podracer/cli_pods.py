"""The commands that train many at once: `podracer sweep`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from podracer.cli import Hosts, join, parse, recipe_of


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
    from podracer.sweep import make_pods
    from podracer.types import ConfigError

    if settings.seeds < 1:
        raise ConfigError(f"--seeds must be at least 1, but it is {settings.seeds}.")
    seeds = range(experiment.seed, experiment.seed + settings.seeds)
    pods = make_pods(settings.vary, seeds, settings.draws, experiment.seed)
    experiment = dataclasses.replace(experiment, pods=pods, target_return=None)
    join(Hosts(), experiment.devices)
    from podracer.training import train

    result = train(experiment, run_dir=settings.run_dir, show=True)
    if result.exit_code == 0:
        show_standings(result.run_dir)
    return result.exit_code


def show_standings(directory: Path) -> None:
    """The table of a sweep, best configuration first, and what to do with it."""
    from rich.console import Console
    from rich.table import Table

    from podracer.io.console import number
    from podracer.io.curves import bootstrap_interval
    from podracer.sweep import standings, write_best

    found: list[Any] = standings(directory)
    names = [each.name for each in found[0].hyperparameters]
    table = Table(*names, "evaluation", "95 %", "seeds", box=None, padding=(0, 3, 0, 0))
    for standing in found[:20]:
        low, high = (number(float(x)) for x in bootstrap_interval(standing.returns))
        table.add_row(
            *(f"{each.value:.4g}" for each in standing.hyperparameters),
            number(standing.score),
            f"{low} to {high}" if len(standing.returns) > 1 else "-",
            str(len(standing.returns)),
        )
    Console().print(table)
    if len(found) > 20:
        print(f"and {len(found) - 20} more")
    print(f"Best      podracer train {write_best(directory)}")
    print(f"Next      podracer report {directory}")
