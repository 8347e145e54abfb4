"""What a tournament's driver costs: CPU milliseconds an event, over pods, entries and the board.

    python benchmarks/orchestration.py --pods 1000 --rounds 100000 --out results.jsonl

Pods only pretend: an attempt ends a moment after its start, with a checkpoint of one small file and
a score. The log, the index, the garbage collection, the selection and the display of lines are
real. What the pretence costs is measured and left out. A row is a stretch of the tournament; the
last one is the driver while all pods run and nothing happens.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import hashlib
import io
import json
import os
import random
import resource
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from harness import Quick, append

from podracer import recipes
from podracer.drivers.selection import Generational, PopulationBased, Range
from podracer.io.seal import seal, seal_json
from podracer.io.signals import StopSignals
from podracer.io.steps import FORMAT
from podracer.reports.standings import LiveStandings
from podracer.tournament import orchestrator
from podracer.tournament.config import Tournament
from podracer.tournament.engine import Engine
from podracer.tournament.events import Submitted, TournamentState, accepted_entries
from podracer.tournament.leaderboard import Leaderboard, read_events
from podracer.tournament.orchestrator import TournamentInfo
from podracer.tournament.pod import REPORT
from podracer.tournament.selection import Softmax
from podracer_cloud.mirror import Mirror
from podracer_cloud.tournaments import TournamentCopy

RULES = {
    "population-based": PopulationBased((Range("learning_rate", 1e-5, 1e-1),)),
    "softmax": Softmax(),
    "generational": Generational(),
}
ENDS = 16  # attempts that end between two polls, at most
DIGEST = hashlib.sha256(b"").hexdigest()


class Enough(Exception):
    """All stretches are measured."""


class Pretense:
    """Engine whose attempts end in a random order, and the measurements of its driver."""

    is_ready, waiting = True, frozenset[int]()

    def __init__(self, rounds: int, stretches: int, row: dict[str, Any], out: Path | None) -> None:
        self._random, self._alive = random.Random(0), collections.deque[tuple[int, Path]]()
        self._rounds, self._stretch, self._row = rounds, max(1, rounds // stretches), row
        self._done, self._events, self._own, self._quiet_polls = 0, 0, 0.0, 0
        self._out = out
        self._mark()

    def write(self, **figures: Any) -> None:
        """Print a row and append it to the file."""
        row = {**self._row, "entries": self._done, **figures}
        print(json.dumps(row), flush=True)
        append(self._out, row)

    def _mark(self) -> None:
        self._start_done, self._events = self._done, 0
        self._start, self._own = time.process_time(), 0.0

    def start(self, token: int, directory: Path) -> None:
        self._alive.append((token, directory))
        self._events += 1

    def poll(self) -> dict[int, int]:
        start = time.process_time()
        if (
            self._done - self._start_done >= self._stretch
            or self._rounds <= self._done != self._start_done
        ):
            self._measure(start)
            start = time.process_time()
        if self._done >= self._rounds:
            return self._stay_quiet(start)
        codes: dict[int, int] = {}
        for _ in range(min(len(self._alive), self._random.randint(1, ENDS))):
            self._alive.rotate(self._random.randint(0, 7))
            token, directory = self._alive.popleft()
            self._report(token, directory)
            codes[token] = 0
        self._done += len(codes)
        self._events += len(codes)
        self._own += time.process_time() - start
        return codes

    def _stay_quiet(self, start: float) -> dict[int, int]:
        """Measure the driver for 20 seconds in which no attempt ends."""
        if self._quiet_polls == 0:
            orchestrator.PAUSE_SECONDS = 0.05
            self._quiet_start = start, time.monotonic()
        self._quiet_polls += 1
        seconds = time.monotonic() - self._quiet_start[1]
        if seconds > 20.0:
            cost = 1e3 * (start - self._quiet_start[0]) / seconds
            self.write(quiet_ms_per_second=cost)
            raise Enough
        return {}

    def _measure(self, end: float) -> None:
        milliseconds = 1e3 * (end - self._start - self._own) / self._events
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        root = self._alive[0][1].parents[1] if self._alive else None
        checkpoints = sum(1 for _ in root.glob("pods/*/checkpoints/*")) if root else 0
        self.write(
            ms_per_event=milliseconds,
            resident_mib=resident / 2**20,
            open_files=len(os.listdir("/proc/self/fd")),
            checkpoints=checkpoints,
            log_mib=(root / "leaderboard.jsonl").stat().st_size / 2**20 if root else None,
        )
        self._mark()

    def _report(self, token: int, directory: Path) -> None:
        pod, _, round = directory.name[1:].partition("r")
        step = directory / "checkpoints" / f"{int(round) + 1:012d}"
        step.mkdir(parents=True)
        if self._row["mirror"]:
            for path in (directory / "config.json", directory / "saved.json"):
                seal_json(path, {"run": None})
            meta = {"run": None, "format": FORMAT, "schema": {}, "metadata": {"records": {}}}
            (step / "meta.json").write_text(json.dumps(meta))
            seal(step)
        else:
            (step / "manifest.json").write_text("{}")
        frames = 100 * (int(round) + 1)
        # A score that grows, with noise, so that the board changes.
        score = frames / (1000.0 + frames) + 0.3 * self._random.gauss(0.0, 1.0) + int(pod) % 7 / 100
        report = {
            "token": token, "score": score, "standard_error": 0.1, "episodes": 10,
            "frames": frames, "seconds": 1.0, "digest": DIGEST,
            "checkpoint": step.relative_to(directory.parents[1]).as_posix(),
        }  # fmt: skip
        (directory / REPORT).write_text(json.dumps(report))

    def stop(self, token: int) -> None: ...
    def kill(self, token: int) -> None: ...
    def close(self) -> None: ...


def play(directory: Path, options: argparse.Namespace) -> None:
    """Measure one tournament, which ends when it has so many entries."""
    rule, pods, board = options.rule, options.pods, options.board
    tournament = Tournament(
        (recipes.find("cartpole_ppo"),), RULES[rule], pods, 10**6, size=board, episodes=10
    )
    row = {"rule": rule, "pods": pods, "board": board, "mirror": options.mirror}
    engine = Pretense(options.rounds, options.stretches, row, options.out)
    checked: Engine = engine
    lines = LiveStandings(tournament.rounds, directory, file=io.StringIO())

    with contextlib.ExitStack() as stack:
        leaderboard = stack.enter_context(Leaderboard(directory, tournament.header()))
        watch = lines.show
        if options.mirror:
            kind = partial(TournamentCopy, board=TournamentInfo(directory, leaderboard.snapshot))
            store = f"file://{directory.parent / 'store'}"
            mirror = stack.enter_context(Mirror(directory, store, kind, new=True))

            def watch(state: TournamentState) -> None:
                lines.show(state)
                mirror.sealed()

        loop = orchestrator.Orchestrator(tournament, leaderboard, checked, StopSignals(), watch)
        with contextlib.suppress(Enough):
            loop.run()
    start = time.process_time()
    events = read_events(directory)
    seconds = time.process_time() - start
    accounts = [(e.pod, e.round) for e in events if isinstance(e, Submitted)]
    assert len(accounts) == len(set(accounts)) == len(accepted_entries(events))
    engine.write(read_seconds=seconds, rounds_counted_once=len(accounts))


def main() -> None:
    """Measure one tournament and append its rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rule", choices=RULES, default="population-based")
    parser.add_argument("--pods", type=int, default=1000)
    parser.add_argument("--board", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=10_000, help="of all pods together")
    parser.add_argument("--stretches", type=int, default=10)
    parser.add_argument("--mirror", action="store_true", help="copy everything to a store beside")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--quick", action=Quick, const={"pods": 10, "rounds": 100, "stretches": 2})
    options = parser.parse_args()
    orchestrator.PAUSE_SECONDS = 0.0
    with tempfile.TemporaryDirectory() as folder:
        play(Path(folder) / "tournament", options)


if __name__ == "__main__":
    main()
