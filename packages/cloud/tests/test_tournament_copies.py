"""Tournaments whose machine is lost go on elsewhere from their copy, and every account closes.

Pods only pretend to train. An entry's checkpoint is a digest of the checkpoints that it came from,
so a tournament that went on from other ones would come to other results.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import random
import shutil
import threading
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from stores import MachineLost, Store, copied, files_of, hurry, moments, pause_machine, stored, use

from podracer import recipes
from podracer.errors import CheckpointError, ConfigError
from podracer.io.run_directory import write_json
from podracer.io.seal import seal, seal_json, verify_seal
from podracer.tournament import orchestrator, selection
from podracer.tournament.config import Tournament
from podracer.tournament.events import (
    Absent,
    Failed,
    Rejected,
    Started,
    Submitted,
    accepted_entries,
    kept_entries,
    state_after,
)
from podracer.tournament.leaderboard import LOG, Leaderboard, encode_line, read_events, read_log
from podracer.tournament.orchestrator import run_tournament
from podracer.tournament.pod import REPORT, digest, read_task, verified_checkpoint
from podracer_cloud import contents, mirror
from podracer_cloud import store as stores
from podracer_cloud import tournaments as tournament_copies
from podracer_cloud.addresses import restore
from podracer_cloud.contents import Contents
from podracer_cloud.lease import Lease
from podracer_cloud.mirror import Mirror
from podracer_cloud.store import open_store
from podracer_cloud.tournaments import TournamentCopy

TOURNAMENT = Tournament(
    (recipes.find("cartpole_ppo"),),
    selection.Independent(),
    pods=3,
    rounds=4,
    episodes=10,
    size=4,
    retries=10,  # a pod may be killed on each machine
)
RULES = {
    "independent": TOURNAMENT,
    "softmax": dataclasses.replace(TOURNAMENT, selection=selection.Softmax()),
    "generational": dataclasses.replace(
        TOURNAMENT, selection=selection.Generational(group_size=1, parents=1)
    ),
}
BEST = 28.0  # the highest score that a pod can have


class Pretense:
    """Engine whose attempts end at the next poll; each third one is killed before its report."""

    is_ready, waiting = True, frozenset[int]()

    def __init__(self) -> None:
        self.alive: dict[int, Path] = {}

    def start(self, token: int, directory: Path) -> None:
        self.alive[token] = directory

    def poll(self) -> dict[int, int]:
        codes = {token: self.end(token, path) for token, path in self.alive.items()}
        self.alive.clear()
        return codes

    def end(self, token: int, directory: Path) -> int:
        task = read_task(directory)
        root = directory.parents[1]
        parents = [verified_checkpoint(root, parent) for parent in task.parents]
        content = [(task.pod, task.round), *((path / "w").read_bytes().hex() for path in parents)]
        if token % 3 == 0:
            return -9
        step = directory / "checkpoints" / f"{task.round + 1:012d}"
        if not step.exists():
            step.mkdir(parents=True)
            (directory / "metrics.jsonl").write_text("{}\n")
            sealed = {"size": 3, "sha256": hashlib.sha256(b"{}\n").hexdigest()}
            metadata = {"records": {"metrics.jsonl": sealed}}
            meta = {"run": None, "format": 2, "schema": {}, "metadata": metadata}
            (step / "meta.json").write_text(json.dumps(meta))
            (step / "w").write_bytes(hashlib.sha256(json.dumps(content).encode()).digest())
            seal_json(directory / "config.json", {"experiment": {}})
            seal_json(directory / "saved.json", {"step": task.round + 1})
            seal(step)
        report = {
            "token": token, "score": float((task.pod * 7 + task.round * 13) % 29),
            "standard_error": 1.0, "episodes": 10, "frames": 100 * (task.round + 1),
            "seconds": 1.0, "checkpoint": step.relative_to(root).as_posix(), "digest": digest(step),
        }  # fmt: skip
        write_json(directory / REPORT, report)
        return 0

    def stop(self, token: int) -> None: ...
    def kill(self, token: int) -> None: ...
    def close(self) -> None: ...


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    hurry(monkeypatch, 0.05)
    monkeypatch.setattr(Lease, "BEAT_SECONDS", 60.0)
    monkeypatch.setattr(orchestrator, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(orchestrator, "find_engine", lambda _: lambda *_: Pretense())
    monkeypatch.setattr(TournamentCopy, "gather_seconds", 0.0)
    for module in (contents, tournament_copies):
        monkeypatch.setattr(module, "BLOCK_BYTES", 5000)  # the log has several blocks


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"file://{tmp_path / 'store'}"


def ignore(_: str) -> None:
    """Take a report."""


def bring(address: str, directory: Path, report: Any = ignore) -> None:
    restore(address, directory, report=report)


def results(directory: Path) -> dict[str, Any]:
    """Return what follows from the rounds alone: scores, parents and what was learned."""
    entries = accepted_entries(read_events(directory)).values()
    return {entry.id: (entry.score, entry.parents, entry.digest) for entry in entries}


def check_accounts(directory: Path, tournament: Tournament) -> None:
    """Check that each start has one end, each round one entry, and each entry its checkpoint."""
    events = read_events(directory)
    state = state_after(events)
    rounds = Counter((e.pod, e.round) for e in events if isinstance(e, Submitted))
    places = [(p, r) for p in range(tournament.pods) for r in range(tournament.rounds)]
    assert rounds == dict.fromkeys(places, 1)
    starts = [e for e in events if isinstance(e, Started)]
    ended = [e.token for e in events if isinstance(e, Submitted | Failed)]
    replaced = [
        start.token
        for number, start in enumerate(starts)
        if start.token not in ended
        and any((e.pod, e.round) == (start.pod, start.round) for e in starts[number + 1 :])
    ]
    assert sorted(ended + replaced) == [start.token for start in starts]
    assert not [e for e in events if isinstance(e, Rejected)]
    assert max(e.score for e in events if isinstance(e, Submitted)) <= BEST
    for entry in kept_entries(state):
        path = directory / entry.checkpoint
        verify_seal(path)
        assert digest(path) == entry.digest


def check_store(store: Path, directory: Path, *, alone: bool = True) -> None:
    """Check that a store has the log, what the log needs, and by default nothing else."""
    files = copied(store, alone=alone)
    log = b"".join(files.pop(name) for name in sorted(files) if name.startswith("log/"))
    assert log == (directory / LOG).read_bytes()
    state = state_after(read_events(directory))
    rounds = {entry.checkpoint.partition("/checkpoints")[0] for entry in kept_entries(state)}
    expected = {
        f"{round}/{name}": content
        for round in rounds
        for name, content in files_of(directory / round).items()
        if name not in (REPORT, "task.json")
    }
    assert files == expected


class Lost:
    """A machine that is lost at an operation of its mirror, or at an event of its driver."""

    def __init__(self, monkeypatch, address, *, operation=10**9, event=10**9) -> None:
        self.left, self.events, self.is_over = operation, event, False
        store = Store(open_store(address, writes=True), self.fault)
        for module in (mirror, stores):
            monkeypatch.setattr(module, "open_store", lambda *_, **__: store)
        monkeypatch.setattr(threading, "excepthook", lambda _: None)
        append = Leaderboard.append

        def append_or_die(board, event):
            self.events -= 1
            self.is_over = self.is_over or self.events < 0
            if self.is_over:
                raise MachineLost
            return append(board, event)

        monkeypatch.setattr(Leaderboard, "append", append_or_die)

    def fault(self, operation, name, call):
        self.left -= 1
        self.is_over = self.is_over or self.left < 0
        if self.is_over:
            raise MachineLost
        return call()


def lose(address, directory, tournament, **moment) -> bool:
    """Run a tournament on a machine that is lost; return whether it was lost before the end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mirror, "CLOSE_SECONDS", 0.0 if "event" in moment else 60.0)
        machine = Lost(patch, address, **moment)
        with contextlib.suppress(MachineLost, ConfigError):
            run_tournament(tournament, directory, attach=[f"mirror:{address}"])
        machine.is_over, was_lost = True, machine.is_over
        for thread in threading.enumerate():
            if thread.name == "podracer-mirror":
                thread.join(10.0)
    return was_lost


def holds_tournament(address) -> bool:
    copy = Contents(open_store(address, writes=True))
    copy.refresh()
    return copy.kind == "tournament"


def go_on(address, directory, tournament, report=ignore) -> bool:
    """Continue a tournament on another machine; return whether there was one to continue."""
    if is_there := holds_tournament(address):
        bring(address, directory, report)
    assert (
        run_tournament(tournament, directory, attach=[] if is_there else [f"mirror:{address}"]) == 0
    )
    return is_there


@pytest.mark.figure(26)
@pytest.mark.parametrize(
    ("rule", "moments"),
    [("independent", 2), *(pytest.param(rule, 15, marks=pytest.mark.slow) for rule in RULES)],
)
def test_a_tournament_whose_machine_is_lost_goes_on_elsewhere(
    rule, moments, address, tmp_path, cases
):
    """At random operations of the mirror and events of the driver, twice in a row."""
    tournament, rng = RULES[rule], random.Random(moments)
    assert run_tournament(tournament, tmp_path / "plain") == 0
    expected, num_continued, store = results(tmp_path / "plain"), 0, tmp_path / "store"
    reports: list[str] = []
    for trial in cases(range(moments)):
        for number in range(2):
            machine = tmp_path / f"{trial} {number}"
            if holds_tournament(address):
                bring(address, machine, reports.append)
            kind, most = rng.choice([("operation", 300), ("event", 30)])
            lose(address, machine, tournament, **{kind: rng.randrange(most)})
            shutil.rmtree(machine, ignore_errors=True)
        last = tmp_path / f"{trial} last"
        num_continued += go_on(address, last, tournament, reports.append)
        assert not [text for text in reports if "skipped" in text or "lost" in text]
        check_accounts(last, tournament)
        check_store(store, last)
        if rule != "softmax":  # its draws depend on the order in which pods end
            assert results(last) == expected
        shutil.rmtree(last)
        shutil.rmtree(store)
    assert num_continued > moments / 2


@pytest.mark.figure(26)
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_machine_that_stood_still_takes_nothing_from_its_successor_in_the_tournament(
    every, address, tmp_path, monkeypatch, caplog, cases
):
    """It stands still at any operation of a copy, and goes on when its successor has ended."""
    first, other, store = tmp_path / "first", tmp_path / "other", tmp_path / "store"
    tournament = dataclasses.replace(TOURNAMENT, pods=2, rounds=2)
    lose(address, first, tournament, event=4)
    (first / mirror.MIRROR).unlink()
    assert run_tournament(tournament, first) == 0
    shutil.copytree(store, tmp_path / "old")
    faulty = use(monkeypatch, address)

    def machine():
        try:
            with Leaderboard(first) as board:
                kind = partial(TournamentCopy, board=board)
                with Mirror(first, address, kind, new=False) as copier:
                    copier.sealed()
        except ConfigError as error:
            ends.append(str(error))

    for number in cases(moments(faulty, machine, every)):
        shutil.rmtree(store)
        shutil.copytree(tmp_path / "old", store)
        ends: list[str] = []
        caplog.clear()
        successor = partial(go_on, address, other, tournament)
        pause_machine(faulty, number, machine, successor)
        if (other / LOG).read_bytes().startswith((first / LOG).read_bytes()):
            ends.append("had ended")
        ends = [*ends, *caplog.messages]
        words = ("goes on without it", "holds another tournament", "had ended")
        assert any(word in end for end in ends for word in words), (number, ends)
        check_store(store, other, alone=False)
        reports: list[str] = []
        bring(address, tmp_path / "third", reports.append)
        assert not [text for text in reports if "skipped" in text or "lost" in text]
        check_accounts(tmp_path / "third", tournament)
        shutil.rmtree(other)
        shutil.rmtree(tmp_path / "third")


def test_a_copy_of_an_earlier_version_of_a_tournament_goes_on(address, tmp_path):
    """It had the files under their names, and the log in blocks."""
    assert run_tournament(TOURNAMENT, tmp_path / "first") == 0
    log, store = (tmp_path / "first" / LOG).read_bytes(), tmp_path / "store"
    ignored = shutil.ignore_patterns(REPORT, "task.json")
    shutil.copytree(tmp_path / "first" / "pods", store / "pods", ignore=ignored)
    (store / "log").mkdir()
    for number, begin in enumerate(range(0, len(log), 5000), 1):
        (store / "log" / f"{number:06d}").write_bytes(log[begin : begin + 5000])
    reports: list[str] = []
    bring(address, tmp_path / "second", reports.append)
    assert not reports
    assert run_tournament(TOURNAMENT, tmp_path / "second") == 0
    check_accounts(tmp_path / "second", TOURNAMENT)
    check_store(store, tmp_path / "second")


def test_two_machines_that_went_on_from_one_copy_have_different_tournaments(address, tmp_path):
    """The one that was taken for lost is refused, and its directory stays as it is."""
    first, second, behind = (tmp_path / name for name in ("first", "second", "behind"))
    lose(address, first, TOURNAMENT, event=15)
    with Leaderboard(first) as board:
        board.record(Absent(0, 99))
    bring(address, second)
    shutil.copytree(second, behind)
    assert run_tournament(TOURNAMENT, second) == 0
    log = (first / LOG).read_bytes()
    with pytest.raises(ConfigError, match="holds another tournament: choose another address"):
        run_tournament(TOURNAMENT, first)
    with pytest.raises(ConfigError, match="holds something else: name a new directory"):
        bring(address, first)
    assert (first / LOG).read_bytes() == log
    with pytest.raises(ConfigError, match=r"is newer than .*behind: podracer resume file://"):
        run_tournament(TOURNAMENT, behind, attach=[f"mirror:{address}"])
    bring(address, behind)
    bring(address, second)  # its own directory, which has everything
    assert (behind / LOG).read_bytes() == (second / LOG).read_bytes()
    check_accounts(behind, TOURNAMENT)


@pytest.mark.figure(26)
@pytest.mark.slow
def test_damage_of_an_entry_in_the_store_is_found(address, tmp_path, cases):
    """Its files are changed, cut off or gone; the others come back, and the log as it was."""
    assert run_tournament(TOURNAMENT, tmp_path / "first", attach=[f"mirror:{address}"]) == 0
    store, state = tmp_path / "store", state_after(read_events(tmp_path / "first"))
    entries = sorted({entry.id: entry for entry in kept_entries(state)}.items())
    for number, (name, entry) in enumerate(cases(entries)):
        names = ("w", "manifest.json", "meta.json")
        file = stored(store, entry.checkpoint) / names[number % 3]
        content = file.read_bytes()
        damaged = (content[:-1] + bytes([content[-1] ^ 1]), content[:-1], b"")[number // 3 % 3]
        file.write_bytes(damaged) if damaged else file.unlink()
        reports: list[str] = []
        other = tmp_path / f"other{number}"
        bring(address, other, reports.append)
        assert f"{name} are lost" in reports[-1]
        assert not (other / entry.checkpoint).exists()
        assert all((other / e.checkpoint).exists() for n, e in entries if n != name)
        assert (other / LOG).read_bytes() == (tmp_path / "first" / LOG).read_bytes()
        file.write_bytes(content)
    path = stored(store, entries[0][1].checkpoint)  # a whole checkpoint, but another one
    (path / "w").write_bytes(bytes(32))
    (path / "manifest.json").unlink()
    seal(path)
    bring(address, tmp_path / "another", reports.append)
    assert any("is not the one on the leaderboard" in text for text in reports)
    assert not (tmp_path / "another" / entries[0][1].checkpoint).exists()
    for _, entry in entries:
        shutil.rmtree(stored(store, entry.checkpoint))
    with pytest.raises(CheckpointError, match=r"none of the .* entries in the store is whole"):
        bring(address, tmp_path / "last")
    assert not (tmp_path / "last" / LOG).exists()


@pytest.mark.figure(16)
def test_a_log_in_a_store_leads_nowhere_else(address, tmp_path):
    directory = tmp_path / "first"
    assert run_tournament(TOURNAMENT, directory, attach=[f"mirror:{address}"]) == 0
    lines = [json.loads(line) for line in (directory / LOG).read_text().splitlines()]
    checksum, log = "", b""
    for fields in lines:
        del fields["sha256"]
        if fields["event"] == "submitted":
            fields["checkpoint"] = f"../escaped/p{fields['pod']}r{fields['round']}"
        line, checksum = encode_line(fields, checksum)
        log += line
    (tmp_path / "log").write_bytes(log)
    store = open_store(address)
    lease, copy = Lease(store, address, "a", "tournament"), Contents(store)
    lease.claim(ignore, ignore)
    copy.refresh()
    copy.parts.clear()
    copy.adopt(lease)
    copy.put_log(tmp_path / "log", len(log))
    copy.commit()
    with pytest.raises(CheckpointError, match="cannot be the checkpoint of a round"):
        bring(address, tmp_path / "deep" / "other")
    assert not list(tmp_path.rglob("escaped"))


def test_a_slow_store_keeps_what_it_copies_and_delays_nobody(address, tmp_path, monkeypatch):
    """The tournament ends while the first copy waits; then the copy has everything."""
    ended, held, missing = threading.Event(), [], []

    def fault(operation, name, call):
        if operation == "put" and "/pods/" in name and not held:
            held.append(name)
            assert ended.wait(60.0)
        result = call()
        if operation == "put" and name.startswith("index/"):
            copy = Contents(store.real)
            copy.refresh()
            events, _, _ = read_log(tmp_path, copy.read_log().splitlines(keepends=True))
            entries = kept_entries(state_after(events)) if events else ()
            needed = {entry.checkpoint for entry in entries}
            missing.extend(name for name in needed if copy.read_manifest(name) is None)
        return result

    store = Store(open_store(address, writes=True), fault)
    monkeypatch.setattr(mirror, "open_store", lambda *_, **__: store)

    def watch(state):
        if all(pod.round == TOURNAMENT.rounds for pod in state.pods.values()):
            ended.set()

    tournament = dataclasses.replace(TOURNAMENT, size=1)
    assert (
        run_tournament(tournament, tmp_path / "first", watch=watch, attach=[f"mirror:{address}"])
        == 0
    )
    assert held
    assert not missing
    check_store(tmp_path / "store", tmp_path / "first")
