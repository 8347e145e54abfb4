"""Ratings of players from the outcomes of their games, with their uncertainty."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

ELO = 400.0 / np.log(10.0)  # points of a logit
PRIOR_STD = 800.0  # Elo: keeps the rating of a player who has won every game finite


class Ratings(NamedTuple):
    """Elo ratings, of which the mean or the anchor's is 0."""

    elo: np.ndarray
    """Most probable ratings, f64 `[players]`."""
    std: np.ndarray
    """Standard deviations of the ratings, f64 `[players]`."""


def rate(
    scores: np.ndarray,
    games: np.ndarray,
    anchor: int | None = None,
    start: np.ndarray | None = None,
) -> Ratings:
    """Return the ratings that explain the scores of games between players.

    `scores[i, j]` is the number of games that i won against j, a draw counting half, out of
    `games[i, j]`. Player i is expected to score `1 / (1 + 10 ** ((elo_j - elo_i) / 400))` a game
    (Bradley and Terry 1952; Elo). The ratings have the largest posterior density under independent
    normal priors, found by Newton's method, which begins at the ratings `start`. The uncertainty is
    taken from a normal distribution with the same curvature there (Laplace's approximation). Games
    tell differences alone: 0 is the rating of the player `anchor`, or without one the mean.
    """
    num = len(scores)
    row, column = np.nonzero(games)  # few of many players have met
    scores, games = scores[row, column], games[row, column]
    precision = (ELO / PRIOR_STD) ** 2
    logits = np.zeros(num) if start is None else (start - start.mean()) / ELO
    curvature = np.eye(num)
    for iteration in range(100):
        expected = 1.0 / (1.0 + np.exp(logits[column] - logits[row]))
        gradient = np.bincount(row, scores - games * expected, num) - precision * logits
        weights = games * expected * (1.0 - expected)
        diagonal = np.bincount(row, weights, num) + precision
        if iteration < 8:  # each player by itself, which is cheap, and brings a new one near
            logits = logits + np.clip(gradient / diagonal, -2.0, 2.0)
            continue
        curvature = np.diag(diagonal)
        curvature[row, column] -= weights
        step = np.linalg.solve(curvature, gradient)
        logits = logits + np.clip(step, -2.0, 2.0)
        if np.abs(step).max() < 1e-10:
            break
    origin = np.full(num, 1.0 / num) if anchor is None else np.eye(num)[anchor]
    covariance = np.linalg.inv(curvature)
    with_origin = covariance @ origin
    variance = np.diag(covariance) - 2.0 * with_origin + origin @ with_origin
    return Ratings(ELO * (logits - origin @ logits), ELO * np.sqrt(variance))


# --- in a league ----------------------------------------------------------------------------------


class Match(NamedTuple):
    """Games of an entry of a leaderboard against one opponent, counted for the entry."""

    player: str
    """Id of the entry."""
    opponent: str
    """Id of another entry, or the name of the anchor: `random` or `minimax-DEPTH`."""
    wins: int
    draws: int
    losses: int
    fault: str = ""
    """Why there are no games; "" if there are."""

    @property
    def games(self) -> int:
        return self.wins + self.draws + self.losses


class Rating(NamedTuple):
    """Elo rating of one player."""

    elo: float
    std: float


def rate_players(
    matches: Sequence[Match], earlier: Mapping[str, Rating] = MappingProxyType({})
) -> dict[str, Rating]:
    """Return the rating of each player by name; the first match is against the anchor, who has 0.

    They are rounded to a thousandth of a point, so that no decision depends on the last bits. Nor
    does one depend on the `earlier` ratings, from which the new ones are found sooner.
    """
    if not matches:
        return {}
    players = list(dict.fromkeys([matches[0].opponent, *(match.player for match in matches)]))
    start = np.array([earlier[name].elo if name in earlier else 0.0 for name in players])
    ratings = rate(*points(matches, players), anchor=0, start=start)
    pairs = zip(ratings.elo.round(3).tolist(), ratings.std.round(3).tolist(), strict=True)
    return {name: Rating(*pair) for name, pair in zip(players, pairs, strict=True)}


def points(matches: Iterable[Match], players: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Return points and numbers of games of players against each other, f64 `[players, players]`.

    No player comes twice. A win is a point for the player of the row, a draw half of one. Matches
    with others are left out.
    """
    index = {name: number for number, name in enumerate(players)}
    counted = [m for m in matches if m.player in index and m.opponent in index]
    rows = [(index[m.player], index[m.opponent], m.wins, m.draws, m.losses) for m in counted]
    player, opponent, wins, draws, losses = np.array(rows, np.int64).reshape(-1, 5).T
    scores, games = np.zeros((2, len(players), len(players)))
    np.add.at(scores, (player, opponent), wins + 0.5 * draws)
    np.add.at(scores, (opponent, player), losses + 0.5 * draws)
    np.add.at(games, (player, opponent), wins + draws + losses)
    np.add.at(games, (opponent, player), wins + draws + losses)
    return scores, games
