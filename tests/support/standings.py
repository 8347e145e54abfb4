"""Entries of a leaderboard, and what a selection rule sees of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from podracer.tournament.events import Entry, ranking
from podracer.tournament.selection import SelectionView


def entry(pod: int, score: float, round: int = 0, **hyperparameters: float) -> Entry:
    name = f"{pod}/{round}"
    return Entry(
        pod, round, 0, score, 0.0, 1, "", 0, 0.0, name, "", (), hyperparameters, {}, 0.0
    )  # fmt: skip


def stand(pod: int, newest: Sequence[Entry], *, round: int = 1, **other: Any) -> SelectionView:
    """A view in which every pod has ended the round before, and all entries are listed."""
    fields: dict[str, Any] = {
        "board": ranking(newest),
        "newest": {each.pod: each for each in newest},
        "rounds": {each.pod: round for each in newest},
    }
    return SelectionView(pod, round, **{**fields, **other})
