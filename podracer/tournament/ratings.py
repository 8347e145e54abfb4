"""Ratings of players from the outcomes of their games, with their uncertainty."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

ELO = 400.0 / np.log(10.0)  # points of a logit
PRIOR_STD = 800.0  # Elo: keeps the rating of a player who has won every game finite


class Ratings(NamedTuple):
    """Elo ratings, whose mean is 0."""

    elo: np.ndarray
    """Most probable ratings, f64 `[players]`."""
    std: np.ndarray
    """Standard deviations of the ratings, f64 `[players]`."""


def rate(scores: np.ndarray, games: np.ndarray) -> Ratings:
    """Return the ratings that explain the scores of games between players.

    `scores[i, j]` is the number of games that i won against j, a draw counting half, out of
    `games[i, j]`. Player i is expected to score `1 / (1 + 10 ** ((elo_j - elo_i) / 400))` a game
    (Bradley and Terry 1952; Elo). The ratings are those of the largest posterior density under
    independent normal priors, found by Newton's method; the uncertainty is that of a normal
    distribution with the same curvature there (Laplace's approximation).
    """
    num = len(scores)
    precision = (ELO / PRIOR_STD) ** 2
    logits, curvature = np.zeros(num), np.eye(num)
    for _ in range(100):
        expected = 1.0 / (1.0 + np.exp(logits[None, :] - logits[:, None]))
        gradient = (scores - games * expected).sum(1) - precision * logits
        weights = games * expected * (1.0 - expected)
        curvature = np.diag(weights.sum(1) + precision) - weights
        step = np.linalg.solve(curvature, gradient)
        logits = logits + np.clip(step, -2.0, 2.0)
        if np.abs(step).max() < 1e-10:
            break
    centered = np.eye(num) - 1.0 / num
    covariance = centered @ np.linalg.inv(curvature) @ centered
    return Ratings(ELO * (logits - logits.mean()), ELO * np.sqrt(np.diag(covariance)))
