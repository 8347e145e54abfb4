"""Progress of a tournament on the terminal: leaderboard and pods, live or as lines."""

from __future__ import annotations

import dataclasses
import errno
import re
import sys
from pathlib import Path
from typing import Any, TextIO

from rich import box
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from podracer.io.addresses import in_addresses
from podracer.io.text import printable
from podracer.reports.tournament_log import board_rows, recipe_of, ways_of_acting
from podracer.run.console import Terminal
from podracer.scores.format import compact, number
from podracer.tournament.events import Entry, TournamentState

_COLORS = {"running": "green", "failed": "red", "quarantined": "red"}


class LiveStandings:
    """Display of a tournament: a live table on a terminal, elsewhere a line for each entry.

    A context manager. With `whole` the table is printed even where there is no terminal, and raises
    `BrokenPipeError` when nobody reads it, as in `... | head`; without, a tournament goes on.
    """

    def __init__(
        self, rounds: int, directory: Path, *, whole: bool = False, file: TextIO | None = None
    ) -> None:
        self._rounds, self._directory, self._whole = rounds, directory, whole
        self._state: TournamentState | None = None
        self._known = dict[int, int]()  # the newest round of each pod that has a line
        self._terminal = Terminal(file=sys.stdout if file is None else file)
        # A thousand pods end many rounds a second, and a picture of them takes a tenth of one.
        self._live = Live(
            get_renderable=self._picture, console=self._terminal, refresh_per_second=1
        )

    def show(self, state: TournamentState) -> None:
        """Show a state: in the live table, else at once."""
        self._state = state
        if self._terminal.is_terminal:
            return
        if self._whole:
            self._terminal.print(self._picture())
            if self._terminal.quiet:
                raise BrokenPipeError(errno.EPIPE, "nobody reads the leaderboard")
        else:
            self._lines(state)

    def _picture(self) -> Group:
        if (state := self._state) is None:
            return Group()
        rounds, count = self._rounds, len(state.pods)
        num_finished = sum(min(pod.round, rounds) for pod in state.pods.values())
        rejected = f", {state.rejected} reports refused" if state.rejected else ""
        acting = " or ".join(ways_of_acting(state)) or "unknown"
        of_all = f"{num_finished} of {rounds * count} rounds"
        text = f"  {of_all}, {acting} evaluation ± standard error{rejected}"
        title = Text.assemble((in_addresses(str(self._directory)), "bold"), text)
        return Group(title, Text(), board(state), Text(), pods(state, rounds))

    def _lines(self, state: TournamentState) -> None:
        for name, pod in state.pods.items():
            newest = pod.newest
            if newest is not None and self._known.get(name) != newest.round:
                self._known[name] = newest.round
                is_there = newest.id in state.board.by_id
                place = str(state.board.place(newest) + 1) if is_there else "-"
                cut = f" ({newest.unfinished} unfinished)" if newest.unfinished else ""
                self._terminal.print(
                    _plain(
                        f"{newest.id:8} score {number(newest.score):>7}{cut}  "
                        f"place {place}  frames {compact(newest.frames)}  "
                        f"from {', '.join(newest.parents) or 'fresh'}  {recipe_of(newest)}"
                    )
                )

    def __enter__(self) -> LiveStandings:
        if self._terminal.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()  # with a last picture


def _table() -> Table:
    return Table(box=box.SIMPLE_HEAD, show_edge=False, padding=0)


def board(state: TournamentState) -> Table:
    """Return a table of the entries, best first, one a line where the terminal has the room."""
    table = _table()
    head, rows = board_rows(state.board)
    for name in head:
        is_text, broken = name in ("entry", "recipe", "from"), re.sub(r"([_. ])", r"\1\n", name)
        table.add_column(_plain(broken), justify="left" if is_text else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(_plain, row))
    return table


def pods(state: TournamentState, rounds: int) -> Table:
    """Return a table of the pods and their status."""
    table = _table()
    for name in ("pod", "round", "status", "newest", ""):
        table.add_column(name)
    for name, pod in sorted(state.pods.items()):
        status = "done" if pod.is_live and pod.round >= rounds else pod.status
        table.add_row(
            str(name),
            f"{min(pod.round + 1, rounds)}/{rounds}",
            Text(status, _COLORS.get(status, "")),
            number(pod.newest.score) if pod.newest else "-",
            _plain(pod.reason[:60]),
        )
    return table


def _plain(text: str) -> Text:
    """Return a text from a log as it is: neither markup of rich nor commands to a terminal."""
    return Text(printable(text))


def entry_as_json(entry: Entry) -> dict[str, Any]:
    """Return an entry as JSON: its recipe in place of the experiment."""
    fields = dataclasses.asdict(entry)
    del fields["experiment"]
    return {"id": entry.id, "recipe": recipe_of(entry), **fields}
