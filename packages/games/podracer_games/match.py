"""The command `podracer match`: trained policies play each other."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from podracer.cli.arguments import parse
from podracer.cli.run_options import AtCheckpoint, PolicyName, RunOptions
from podracer.cli.values import Limits, Mark, Seed
from podracer.errors import ConfigError
from podracer.io.addresses import local_run
from podracer.io.steps import Choice
from podracer.io.text import print_json

if TYPE_CHECKING:
    from podracer_games.matches import MatchResults


@dataclasses.dataclass(frozen=True)
class MatchOptions:
    """Let trained policies play each other in a game of two players, and rate them."""

    players: Annotated[tuple[str, ...], Mark.POSITIONAL]
    """Two or more players: directories or addresses of runs, `RUN:POD` for a pod of a sweep,
    `random`, or `minimax-DEPTH` with a depth of 1 to 6 moves."""
    recipe: str | None = None
    """Recipe that made the runs, if agent or network are your own."""
    checkpoint: AtCheckpoint = "newest"
    games: Annotated[int, Limits(high=2**20)] = 256
    """Number of games of each pair of players, at least 1; who begins is drawn for each game."""
    policy: PolicyName = "sampled"
    """Policy of the runs: `sampled`, or `greedy`, whose games repeat each other."""
    seed: Seed = 0
    """Random seed of the games."""
    json: bool = False
    """Print one JSON object."""


def match(arguments: Sequence[str]) -> int:
    """Let runs play each other in a board game, and rate them."""
    options = parse(MatchOptions, "match", arguments, description=match.__doc__ or "")
    from podracer.devices.startup import use_compilation_cache
    from podracer.run.loading import load_run
    from podracer_games import matches

    if len(options.players) < 2:
        raise ConfigError("a match needs two players or more.")
    use_compilation_cache()
    players, environments = [], []
    for name in options.players:
        directory, pod = _find_run(name, options.checkpoint)
        if directory is None:
            players.append(matches.opponent_player(name))
            continue
        experiment = RunOptions(directory, options.recipe).reopen()
        run = load_run(
            directory,
            recipe=experiment,
            pod=pod,
            checkpoint=options.checkpoint,
        )
        environments.append(run.env)
        sampled = options.policy == "sampled"
        player = matches.trained_player(
            name, run.blueprint, run.env, run.state.learner, sampled=sampled
        )
        players.append(player)
    if not environments:
        raise ConfigError("a match needs at least one run, which knows the game.")
    table = matches.play_matches(
        matches.common_game(environments), players, options.games, options.seed
    )
    if options.json:
        print_json(_figures(table))
    else:
        _print(table)
    return 0


def _find_run(name: str, checkpoint: Choice) -> tuple[Path | None, int | None]:
    """Return the directory and the pod that a name, `RUN` or `RUN:POD`, means, None for neither.

    A run at an address is copied.
    """
    run, _, pod = name.rpartition(":")
    if not (run and pod.isdecimal()) or Path(name).is_dir():
        run, pod = name, ""
    directory = local_run(run, checkpoint)
    return (directory, int(pod) if pod else None) if directory.is_dir() else (None, None)


def _figures(table: MatchResults) -> dict[str, Any]:
    elo, std = (ratings.round(2).tolist() for ratings in table.ratings)
    return {
        "players": list(table.players),
        "elo": elo,
        "elo_std": std,
        "games": table.games.tolist(),
        "wins": table.wins.tolist(),
        "draws": table.draws.tolist(),
    }


def _print(table: MatchResults) -> None:
    """Print the players, best first: Elo with its 95 % interval, and the share of points."""
    from rich.table import Column, Table

    from podracer.run.console import Terminal

    order = table.ratings.elo.argsort()[::-1]
    names = ["", "player", "Elo", "", *(str(place + 1) for place in range(len(order)))]
    columns = [Column(name, overflow="fold") for name in names]
    grid = Table(*columns, box=None, padding=(0, 2, 0, 0))
    for place, i in enumerate(order):
        share = ["-" if i == j else f"{table.scores[i, j] / table.games[i, j]:.1%}" for j in order]
        elo, margin = table.ratings.elo[i], 1.96 * table.ratings.std[i]
        grid.add_row(str(place + 1), table.players[i], f"{elo:+.0f}", f"± {margin:.0f}", *share)
    Terminal().print(grid)
