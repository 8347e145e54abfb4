"""Leagues: the opponents of a pod, drawn from the leaderboard.

A pod trains against some, if the tournament says so, and `pod.play` plays the matches after a
round; the ratings of `ratings.py` follow from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from podracer.tournament.config import OpponentRule, Tournament
from podracer.tournament.events import TournamentState
from podracer.tournament.ratings import Match, Rating, points
from podracer.tournament.selection import selection_view


def draw_opponents(
    tournament: Tournament, state: TournamentState, pod: int, round: int, parents: Sequence[str]
) -> tuple[str, ...]:
    """Return whom a pod plays after a round: the anchor, and ids of different entries.

    They are drawn by the rule `opponents`, see `_draw`; without a league there are none.
    """
    if tournament.opponents is None:
        return ()
    # 1: not the random numbers of selection.
    entries = _draw(tournament, tournament.opponents, 1, state, pod, round, parents)
    return (tournament.anchor, *entries)


def draw_training(
    tournament: Tournament, state: TournamentState, pod: int, round: int, parents: Sequence[str]
) -> tuple[str, ...]:
    """Return whom a pod trains against in a round: ids of different entries, or the anchor.

    They are drawn by the rule `train_against`, see `_draw`; the anchor stands in while there is no
    entry. Without the rule there are none, and the pod trains in its own environment.
    """
    if tournament.train_against is None:
        return ()
    entries = _draw(tournament, tournament.train_against, 2, state, pod, round, parents)
    return entries or (tournament.anchor,)


def _draw(
    tournament: Tournament,
    rule: OpponentRule,
    stream: int,
    state: TournamentState,
    pod: int,
    round: int,
    parents: Sequence[str],
) -> tuple[str, ...]:
    """Return ids of different entries, at most `matches` of them.

    They are drawn from the newest entries of all pods and, unless only the `latest` may be drawn,
    from the leaderboard. `parents` are the entries that the round starts from. The same log gives
    the same opponents, each `stream` others.
    """
    view = selection_view(state, pod, round)
    newest = [entry.id for entry in view.newest.values()]
    ranked = [] if rule == "latest" else [entry.id for entry in view.board]
    entries = list(dict.fromkeys([*ranked, *newest]))
    if not entries:
        return ()
    chances = np.full(len(entries), 1.0 / len(entries))
    if rule in WEIGHTS and parents:
        chances = WEIGHTS[rule](win_rates(parents[0], entries, state.matches, state.ratings))
    rng = np.random.default_rng([tournament.seed, pod, round, stream])
    count = min(tournament.matches, len(entries))
    numbers = rng.choice(len(entries), size=count, replace=False, p=chances)
    return tuple(entries[number] for number in numbers)


def win_rates(
    player: str, opponents: Sequence[str], matches: Sequence[Match], ratings: Mapping[str, Rating]
) -> np.ndarray:
    """Return the points that a player wins in a game against each opponent, f64 `[n]` in (0, 1).

    They are those of their games and of one more, with the result that the ratings expect.
    """
    elo = np.array([ratings[name].elo for name in opponents])
    expected = 1.0 / (1.0 + 10.0 ** ((elo - ratings[player].elo) / 400.0))
    players = list(dict.fromkeys((player, *opponents)))  # the player may be an opponent, too
    scores, games = points(matches, players)
    columns = [players.index(name) for name in opponents]
    return (scores[0, columns] + expected) / (games[0, columns] + 1.0)


def prioritized(win_rates: np.ndarray) -> np.ndarray:
    """Return the chances `(1 - x)^2 / sum` of opponents by the win rates x against them, f64 `[n]`.

    Prioritized fictitious self-play with the weighting of hard opponents: Vinyals et al. 2019,
    "Grandmaster level in StarCraft II using multi-agent reinforcement learning", methods.
    """
    weights = (1.0 - win_rates) ** 2
    return weights / weights.sum()


def even(win_rates: np.ndarray) -> np.ndarray:
    """Return the chances `x (1 - x) / sum` of opponents by the win rates x against them, f64 `[n]`.

    Prioritized fictitious self-play with the weighting of opponents of the same level, source as
    for `prioritized`.
    """
    weights = win_rates * (1.0 - win_rates)
    return weights / weights.sum()


WEIGHTS = {"prioritized": prioritized, "even": even}
