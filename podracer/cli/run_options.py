"""The flags that name a run and its checkpoint, and the file that a command writes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from podracer.cli.values import RunPath
from podracer.errors import ConfigError
from podracer.io.directories import is_tournament

if TYPE_CHECKING:
    from podracer.config.experiment import Experiment
    from podracer.run.loading import LoadedRun

PolicyName = Literal["greedy", "sampled"]
AtCheckpoint = Annotated[
    Literal["newest", "best"] | int,
    "Checkpoint to take: the `newest`, that of the `best` evaluation, or by its number of updates. "
    "The best of many evaluations is biased upward: `podracer eval` with another --seed tells what "
    "it is worth.",
]


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Flags of every command that opens a run."""

    run: RunPath
    """Directory of the run, or its address in a store: s3://, gs://, az:// or file://."""
    recipe: str | None = None
    """Recipe that made the run, such as my_package.recipes:mine. It is needed if the run's agent,
    network or environment is your own."""
    environment: str | None = None
    """Environment of the run, repeated. It is needed where the name has a module imported, such as
    gymnasium:my_package:Maze-v0: no file decides that."""

    def reopen(self, elsewhere: Any = None, lender: Experiment | None = None) -> Experiment:
        """Return the experiment of the run, in the environment `elsewhere` if that is given.

        `lender` is the recipe's experiment, by default made without options of its own. Raises
        `ConfigError` if there is no run, or if a flag names another environment.
        """
        from podracer.cli.recipe_flags import find_modules_here, find_recipe
        from podracer.config.serialization import read_config
        from podracer.run.loading import reopen

        directory = self.run
        if is_tournament(directory):
            best = best_run(directory)
            remedy = f"name a run of it, such as {best}" if best else "none of its rounds has ended"
            raise ConfigError(f"{directory} is a tournament: {remedy}.")
        find_modules_here(self.environment)
        if lender is None and self.recipe is not None:
            lender = find_recipe(self.recipe, ())[0]
        environment = self.environment if elsewhere is None else elsewhere
        experiment = reopen(directory, lender, environment)
        recorded = read_config(directory / "config.json")["experiment"].get("environment")
        is_other = isinstance(recorded, str) and self.environment not in (None, recorded)
        if is_other and elsewhere is None:
            raise ConfigError(
                f"{directory} was trained in {recorded!r}: --environment repeats that name, and "
                f"cannot be {self.environment!r}; `podracer eval` alone evaluates in another."
            )
        return experiment


@dataclasses.dataclass(frozen=True)
class CheckpointOptions(RunOptions):
    """Flags of every command that opens a run at a checkpoint."""

    checkpoint: AtCheckpoint = "newest"
    pod: int | None = None
    """Pod of a sweep, from 0 on. By default the best one in the last evaluation before the
    checkpoint."""

    def load(self, experiment: Experiment) -> LoadedRun:
        """Return the agent, the environment and the state of the run, reopened as `experiment`."""
        from podracer.devices.startup import use_compilation_cache
        from podracer.run.loading import load_run

        use_compilation_cache()
        return load_run(
            self.run,
            recipe=experiment,
            environment=experiment.environment,
            pod=self.pod,
            checkpoint=self.checkpoint,
        )


def best_run(tournament: Path) -> Path | None:
    """Return the run of the first entry on a tournament's leaderboard, None if it is empty."""
    from podracer.tournament.events import state_after
    from podracer.tournament.leaderboard import read_events

    board = state_after(read_events(tournament)).board
    return (tournament / board[0].checkpoint).parents[1] if board else None


def output_file(named: Path | None, default: Path, suffixes: Sequence[str]) -> Path:
    """Return the path of the file that a command writes: `named` by `--out`, or `default`.

    Raises `StorageError` where no file can be written, before anything is computed for it, and
    `ConfigError` for another name than that of a file with one of the suffixes.
    """
    from podracer.io.run_directory import check_room

    path = default if named is None else named
    if path.exists() and not path.is_file():  # such as a device, which would be replaced
        kind = "a directory" if path.is_dir() else "not a regular file"
        raise ConfigError(f"{path} is {kind}: name another file with --out.")
    if path.suffix.lower() not in suffixes:
        raise ConfigError(f"{path.name} must end in {' or '.join(suffixes)}.")
    if named is None and not path.parent.is_dir():
        raise ConfigError(f"{path.parent} holds no run: there is no such directory.")
    if not path.parent.is_dir():
        raise ConfigError(f"there is no directory {path.parent} to write {path.name} into.")
    check_room(path.parent)
    return path
