"""View of a tournament's log for reports."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence

from podracer.scores.format import clock, compact, number
from podracer.scores.runs import acting_text
from podracer.tournament.events import (
    Entry,
    Event,
    TournamentState,
    accepted_entries,
    lineage,
    state_after,
)


@dataclasses.dataclass(frozen=True)
class TournamentLog:
    """Events of a tournament, perhaps without any entry yet."""

    events: Sequence[Event]

    @functools.cached_property
    def state(self) -> TournamentState:
        """State after the last event."""
        return state_after(self.events)

    @functools.cached_property
    def entries(self) -> dict[str, Entry]:
        """Every entry ever accepted, by id, in the order of arrival."""
        return accepted_entries(self.events)

    @functools.cached_property
    def ancestry(self) -> tuple[Entry, ...]:
        """The best entry and all its ancestors, nearest first."""
        board = self.state.board
        return lineage(self.entries, board[0].id) if board else ()

    @property
    def seconds(self) -> float:
        """Wall-clock seconds up to the last event."""
        return self.since(self.events[-1].time)

    @property
    def rounds(self) -> int:
        """Number of rounds, up to the last one that has an entry."""
        return 1 + max((entry.round for entry in self.entries.values()), default=-1)

    def since(self, time: float) -> float:
        """Return the seconds since the tournament began."""
        return max(0.0, time - self.events[0].time)


def recipe_of(entry: Entry) -> str:
    """Return the recipe of an entry, of an experiment without a name of its own the agent."""
    name, agent = entry.experiment.get("recipe", "-"), entry.experiment.get("agent", {})
    return str(agent.get("kind", name) if name == "experiment" else name)


def varying_hyperparameters(entries: Iterable[Entry]) -> list[str]:
    """Return the names of hyperparameters in which entries of a recipe differ."""
    values_of: dict[tuple[str, str], set[float]] = {}
    for entry in entries:
        for name, value in entry.hyperparameters.items():
            values_of.setdefault((recipe_of(entry), name), set()).add(value)
    return list(dict.fromkeys(name for (_, name), x in values_of.items() if len(x) > 1))


def ways_of_acting(state: TournamentState) -> list[str]:
    """Return how the experiments of a tournament act in evaluations, each way once."""
    experiments = state.header.tournament.get("experiments", ())
    fields = ("evaluation_policy", "evaluation_epsilon")
    ways = [[experiment.get(field) for field in fields] for experiment in experiments]
    return list(dict.fromkeys(acting_text(*way) for way in ways if None not in way))


def board_rows(entries: Sequence[Entry]) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of a table of entries, best first, as plain text."""
    names = varying_hyperparameters(entries)
    head = ["place", "entry", "recipe", "score", "frames", "trained for", "from", *names]
    rows = [
        [
            str(place),
            entry.id,
            recipe_of(entry),
            score_text(entry),
            compact(entry.frames),
            clock(entry.seconds),
            ", ".join(entry.parents) or "fresh",
            *(number(entry.hyperparameters.get(name)) for name in names),
        ]
        for place, entry in enumerate(entries, 1)
    ]
    return head, rows


def score_text(entry: Entry) -> str:
    """Format a score with its standard error, if it has one, and the episodes that did not end."""
    error = f" ± {number(entry.standard_error)}" if entry.episodes > 1 else ""
    cut = f", {entry.unfinished} unfinished" if entry.unfinished else ""
    return f"{number(entry.score)}{error}{cut}"
