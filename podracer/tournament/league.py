"""Leagues: the opponents of a pod, drawn from the leaderboard.

`pod.play` plays the matches after a round; the ratings of `ratings.py` follow from them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from podracer.tournament.config import Tournament
from podracer.tournament.events import State
from podracer.tournament.ratings import Match, Rating, points
from podracer.tournament.selection import selection_view


def draw_opponents(
    tournament: Tournament, state: State, pod: int, round: int, parents: Sequence[str]
) -> tuple[str, ...]:
    """Return whom a pod plays after a round: the anchor, and ids of different entries.

    They are drawn from the newest entries of all pods and, unless only the `latest` may be drawn,
    from the leaderboard. `parents` are the entries that the round starts from. The same log gives
    the same opponents; without a league there are none.
    """
    if tournament.opponents is None:
        return ()
    view = selection_view(state, pod, round)
    newest = [entry.id for entry in view.newest.values()]
    kept = [] if tournament.opponents == "latest" else [entry.id for entry in view.board]
    entries = list(dict.fromkeys([*kept, *newest]))
    if not entries:
        return (tournament.anchor,)
    chances = np.full(len(entries), 1.0 / len(entries))
    if tournament.opponents == "prioritized" and parents:
        chances = prioritized(win_rates(parents[0], entries, state.matches, state.ratings))
    rng = np.random.default_rng([tournament.seed, pod, round, 1])  # 1: not that of selection
    count = min(tournament.matches, len(entries))
    drawn = rng.choice(len(entries), size=count, replace=False, p=chances)
    return (tournament.anchor, *(entries[number] for number in drawn))


def win_rates(
    player: str, opponents: Sequence[str], matches: Sequence[Match], ratings: Mapping[str, Rating]
) -> np.ndarray:
    """Return the points that a player wins in a game against each opponent, f64 `[n]` in (0, 1).

    They are those of their games and of one more, with the result that the ratings expect.
    """
    elo = np.array([ratings[name].elo for name in (player, *opponents)])
    expected = 1.0 / (1.0 + 10.0 ** ((elo - elo[0]) / 400.0))
    scores, games = points(matches, [player, *opponents])
    return ((scores[0] + expected) / (games[0] + 1.0))[1:]


def prioritized(win_rates: np.ndarray) -> np.ndarray:
    """Return the chances `(1 - x)^2 / sum` of opponents by the win rates x against them, f64 `[n]`.

    Prioritized fictitious self-play with the weighting of hard opponents: Vinyals et al. 2019,
    "Grandmaster level in StarCraft II using multi-agent reinforcement learning", methods.
    """
    weights = (1.0 - win_rates) ** 2
    return weights / weights.sum()
