"""Events of a tournament, and the state that follows from them, as pure functions.

    events  --state_after-->  TournamentState, with the leaderboard

Times are recorded, but no decision depends on them.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, get_args

import numpy as np

from podracer.errors import CheckpointError, ConfigError
from podracer.io.json_schema import anything, conforms

FORMAT = 1
MAX_PODS = 10_000  # the seeds of a tournament count so far
_ENTRY_ID = re.compile(r"p([0-9]{1,9})r([0-9]{1,18})")


# --- events: the lines of the log -----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Header:
    """First line of the log: the configuration of the tournament, which never changes.

    Raises `ConfigError` for invalid numbers.
    """

    tournament: Mapping[str, Any]  # its configuration as JSON
    seed: int
    pods: int  # numbered from 0
    size: int  # entries on the board
    evaluation: str  # digest of the evaluation's configuration; reports must have the same
    episodes: int  # smallest number of episodes of a score
    format: int = FORMAT
    time: float = 0.0

    def __post_init__(self) -> None:
        for name, minimum in (("seed", 0), ("pods", 1), ("size", 1), ("episodes", 1)):
            if (value := getattr(self, name)) < minimum:
                raise ConfigError(f"{name} must be at least {minimum}, but it is {value}.")
        if self.pods > MAX_PODS:
            raise ConfigError(f"pods must be at most {MAX_PODS}, but it is {self.pods}.")


@dataclasses.dataclass(frozen=True)
class Started:
    """Start of an attempt at a round; its token invalidates all earlier attempts of the pod."""

    pod: int
    round: int
    token: int  # the number of events before this one, so no two are ever equal
    parents: tuple[str, ...]  # none: fresh; one: continued; several: fused
    hyperparameters: Mapping[str, float]
    experiment: Mapping[str, Any]  # in JSON
    time: float = 0.0


@dataclasses.dataclass(frozen=True)
class RoundResult:
    """What an attempt at a round has come to."""

    pod: int
    round: int
    token: int
    score: float  # mean return
    standard_error: float  # 0 where one episode tells none
    episodes: int
    evaluation: str  # see `Header`
    frames: int
    seconds: float
    checkpoint: str  # directory among the round's, relative to the tournament
    digest: str  # SHA-256 of the checkpoint's manifest, in hex


@dataclasses.dataclass(frozen=True)
class Submitted(RoundResult):
    """The report that ends a round."""

    unfinished: int = 0  # episodes that were cut, whose returns are partial
    time: float = 0.0


@dataclasses.dataclass(frozen=True)
class Failed:
    """An attempt ended without a report; `frames` is the progress of the round.

    What a machine or the engine has lost is no fault of the pod, and does not count against it.
    """

    pod: int
    round: int
    token: int
    reason: str
    frames: int = 0
    fault: Literal["pod", "machine"] = "pod"
    time: float = 0.0


@dataclasses.dataclass(frozen=True)
class Rejected:
    """A report was refused, for example because its attempt had been replaced."""

    pod: int
    round: int
    token: int
    reason: str
    time: float = 0.0


@dataclasses.dataclass(frozen=True)
class Stopped:
    """A pod was quarantined, until it is released."""

    pod: int
    status: Literal["quarantined"]
    reason: str
    time: float = 0.0


@dataclasses.dataclass(frozen=True)
class Released:
    """A quarantined pod may start again, with its last decision and all its attempts."""

    pod: int
    time: float = 0.0


@dataclasses.dataclass(frozen=True)
class Absent:
    """A generation no longer waits for a pod to end this round; the pod may still do so."""

    pod: int
    round: int
    time: float = 0.0


Event = Header | Started | Submitted | Failed | Rejected | Stopped | Released | Absent
EVENTS: dict[str, Any] = {kind.__name__.lower(): kind for kind in get_args(Event)}


_SETTINGS = {
    "rounds": int,
    "selection": {"kind": str, ...: anything},
    "experiments": [{"recipe": str, ...: anything}, ...],
    ...: anything,
}


def check_settings(header: Header) -> None:
    """Raise `ConfigError` if a header lacks what the commands on a tournament show."""
    if not conforms(header.tournament, _SETTINGS):
        raise ConfigError("the leaderboard's first line is not the configuration of a tournament.")


# --- the state that follows from them -------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Entry(RoundResult):
    """Result of a round: its start joined with its report."""

    parents: tuple[str, ...]
    hyperparameters: Mapping[str, float]
    experiment: Mapping[str, Any]
    created: float
    unfinished: int = 0

    @property
    def id(self) -> str:
        """Pod and round, such as `p3r12`; unique."""
        return f"p{self.pod}r{self.round}"


@dataclasses.dataclass(frozen=True)
class PodState:
    """State of one pod: the round it is in or may start next, and its progress."""

    round: int = 0
    status: Literal["waiting", "running", "failed", "quarantined"] = "waiting"
    reason: str = ""  # why it failed last, or was stopped
    newest: Entry | None = None
    attempt: Started | None = None  # the last one at this round; the current one while running
    parents: tuple[Entry, ...] = ()  # what the attempt starts from
    absent: bool = False  # in this round
    failures: int = 0  # attempts at this round since the last one with progress
    frames: int = 0  # largest progress of them

    @property
    def is_live(self) -> bool:
        """Whether the pod is not quarantined."""
        return self.status != "quarantined"

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Entries whose checkpoints are kept for the pod."""
        newest = () if self.newest is None else (self.newest,)
        return (*newest, *self.parents)


class Board(tuple[Entry, ...]):
    """Ranked entries, best first, with what is looked up among thousands of them."""

    @functools.cached_property
    def scores(self) -> np.ndarray:
        """Scores, f64 `[n]`."""
        return np.array([entry.score for entry in self], np.float64)

    @functools.cached_property
    def by_id(self) -> Mapping[str, Entry]:
        return {entry.id: entry for entry in self}

    def place(self, entry: Entry) -> int:
        """Return the number of better entries."""
        return bisect.bisect_left(self, rank(entry), key=rank)


@dataclasses.dataclass(frozen=True)
class TournamentState:
    """State of a tournament, immutable; enough to continue it."""

    header: Header
    board: Board
    pods: Mapping[int, PodState]
    population: Board  # the newest entry of each live pod
    rejected: int = 0  # rejected reports
    events: int = 1

    def pod(self, number: int) -> PodState:
        """Return the state of a pod; an unknown one has not begun."""
        return self.pods.get(number, PodState())


def rank(entry: Entry) -> tuple[float, int, int, int]:
    """Return the key that sorts entries: higher score, then fewer frames, then pod and round.

    It is a total order, so the order of arrival does not matter.
    """
    return -entry.score, entry.frames, entry.pod, entry.round


def exchanged(entries: Board, removed: Entry | None, added: Entry | None) -> Board:
    """Return ranked entries without one of them and with another one, without sorting again."""
    if removed is added:
        return entries
    ranked = list(entries)
    if removed is not None:
        del ranked[entries.place(removed)]
    if added is not None:
        bisect.insort(ranked, added, key=rank)
    return Board(ranked)


def state_after(events: Iterable[Event]) -> TournamentState:
    """Return the state after these events, the first of which is the `Header`."""
    header, *later = events
    assert isinstance(header, Header)
    pods = {pod: PodState() for pod in range(header.pods)}
    return functools.reduce(apply_event, later, TournamentState(header, Board(), pods, Board()))


def apply_event(state: TournamentState, event: Event) -> TournamentState:
    """Return the state after one more event."""
    state = dataclasses.replace(state, events=state.events + 1)
    match event:
        case Rejected():
            return dataclasses.replace(state, rejected=state.rejected + 1)
        case Header():
            raise CheckpointError("the header of a leaderboard comes once, at the beginning")
    old_pod = pod = state.pod(event.pod)
    match event:
        case Started():
            parents = tuple(find_entry(state, event.pod, parent) for parent in event.parents)
            same = pod if event.round == pod.round else PodState(event.round, newest=pod.newest)
            pod = dataclasses.replace(same, status="running", attempt=event, parents=parents)
        case Submitted():
            assert pod.attempt is not None
            entry = join_entry(pod.attempt, event)
            pod = PodState(event.round + 1, newest=entry)
            board = Board(exchanged(state.board, None, entry)[: state.header.size])
            state = dataclasses.replace(state, board=board)
        case Failed():
            further = event.frames > pod.frames
            pod = dataclasses.replace(
                pod,
                status="failed",
                reason=event.reason,
                failures=0 if further else pod.failures + (event.fault == "pod"),
                frames=max(event.frames, pod.frames),
            )
        case Stopped():
            pod = dataclasses.replace(pod, status=event.status, reason=event.reason)
        case Released():
            pod = dataclasses.replace(pod, status="waiting", reason="", failures=0)
        case Absent():
            pod = dataclasses.replace(pod, absent=pod.absent or event.round == pod.round)
    members = (x.newest if x.is_live else None for x in (old_pod, pod))
    population = exchanged(state.population, *members)
    return dataclasses.replace(state, pods={**state.pods, event.pod: pod}, population=population)


def find_entry(state: TournamentState, pod: int, entry_id: str) -> Entry:
    """Return an entry that this pod may start from.

    It is on the board, a pod's newest, or a parent of the pod's attempt. Raises `ValueError` for
    any other, whose checkpoint may have been deleted.
    """
    if match := _ENTRY_ID.fullmatch(entry_id):
        newest, on_board = state.pod(int(match[1])).newest, state.board.by_id.get(entry_id)
        for entry in (newest, on_board, *state.pod(pod).parents):
            if entry is not None and entry.id == entry_id:
                return entry
    raise ValueError(f"pod {pod} cannot have {entry_id}, whose checkpoint is not kept")


def kept_entries(state: TournamentState) -> Iterator[Entry]:
    """Yield the entries that a pod may need, those of `find_entry`; some repeatedly."""
    yield from state.board
    for pod in state.pods.values():
        yield from pod.entries


def accepted_entries(events: Iterable[Event]) -> dict[str, Entry]:
    """Return every entry ever accepted, by id, in the order of arrival."""
    starts: dict[int, Started] = {}
    entries: dict[str, Entry] = {}
    for event in events:
        if isinstance(event, Started):
            starts[event.token] = event
        elif isinstance(event, Submitted):
            entry = join_entry(starts[event.token], event)
            entries[entry.id] = entry
    return entries


def lineage(entries: Mapping[str, Entry], entry_id: str) -> tuple[Entry, ...]:
    """Return an entry of `accepted_entries` and all its ancestors, each once, nearest first."""
    ancestors = {entry_id: entries[entry_id]}
    queue = [entries[entry_id]]
    for entry in queue:
        new = [entries[parent] for parent in entry.parents if parent not in ancestors]
        ancestors.update((parent.id, parent) for parent in new)
        queue += new
    return tuple(ancestors.values())


def join_entry(start: Started, report: Submitted) -> Entry:
    """Join a start with its report to an entry."""
    return Entry(
        **{f.name: getattr(report, f.name) for f in dataclasses.fields(RoundResult)},
        parents=start.parents,
        hyperparameters=start.hyperparameters,
        experiment=start.experiment,
        created=report.time,
        unfinished=report.unfinished,
    )
