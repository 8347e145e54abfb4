"""Entries of a leaderboard, and what a selection rule sees of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from podracer.tournament.events import Board, Entry, Header, PodState, TournamentState, rank
from podracer.tournament.selection import SelectionView


def entry(pod: int, score: float, round: int = 0, **hyperparameters: float) -> Entry:
    name = f"{pod}/{round}"
    return Entry(
        pod, round, 0, score, 0.0, 1, "", 0, 0.0, name, "", (), hyperparameters, {}, 0.0
    )  # fmt: skip


def ranking(entries: Iterable[Entry]) -> Board:
    """Rank entries by `rank`."""
    return Board(sorted(entries, key=rank))


def stand(
    pod: int,
    newest: Sequence[Entry],
    *,
    round: int = 1,
    board: Sequence[Entry] | None = None,
    rounds: Mapping[int, int] | None = None,
) -> SelectionView:
    """A view in which every pod has ended the round before, and all entries are listed."""
    entries = {each.pod: each for each in newest}
    rounds = dict.fromkeys(entries, round) if rounds is None else rounds
    pods = {
        number: PodState(
            rounds.get(number, 0), newest=entries.get(number), absent=number not in rounds
        )
        for number in sorted({*entries, *rounds})
    }
    listed = ranking(newest) if board is None else Board(board)
    header = Header({}, seed=0, pods=1, size=9, evaluation="e", episodes=1)
    return SelectionView(TournamentState(header, listed, pods, ranking(newest)), pod, round)
