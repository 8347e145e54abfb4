"""Ratings of players from the outcomes of their games, with their uncertainty."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

ELO = 400.0 / np.log(10.0)  # points of a logit
PRIOR_STD = 800.0  # Elo: keeps the rating of a player who has won every game finite


class Ratings(NamedTuple):
    """Elo ratings, of which the mean is 0."""

    elo: np.ndarray
    """Most probable ratings, f64 `[players]`."""
    std: np.ndarray
    """Standard deviations of the ratings, f64 `[players]`."""


def rate(scores: np.ndarray, games: np.ndarray) -> Ratings:
    """Return the ratings that explain the scores of games between players.

    `scores[i, j]` is the number of games that i won against j, a draw counting half, out of
    `games[i, j]`. Player i is expected to score `1 / (1 + 10 ** ((elo_j - elo_i) / 400))` a game
    (Bradley and Terry 1952; Elo). The ratings have the largest posterior density under independent
    normal priors, found by Newton's method. Their uncertainty is that of a normal distribution with
    the same curvature there (Laplace's approximation). Games tell differences alone: 0 is the mean.
    """
    num = len(scores)
    row, column = np.nonzero(games)  # few of many players have met
    scores, games = scores[row, column], games[row, column]
    precision = (ELO / PRIOR_STD) ** 2
    logits = np.zeros(num)
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
    origin = np.full(num, 1.0 / num)
    covariance = np.linalg.inv(curvature)
    with_origin = covariance @ origin
    variance = np.diag(covariance) - 2.0 * with_origin + origin @ with_origin
    return Ratings(ELO * (logits - origin @ logits), ELO * np.sqrt(variance))
