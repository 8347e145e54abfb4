"""The leaderboard: nothing acknowledged is lost, nothing counts twice, nothing wrong is ranked."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import itertools
import json
import math
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from standings import ranking

from podracer.errors import CheckpointError, ConfigError
from podracer.tournament import leaderboard
from podracer.tournament.events import (
    Absent,
    Board,
    Entry,
    Failed,
    Header,
    Started,
    Stopped,
    Submitted,
    TournamentState,
    accepted_entries,
    exchanged,
    kept_entries,
    state_after,
)
from podracer.tournament.leaderboard import LENGTH, LOG, Leaderboard, read_events

HEADER = Header({"rule": "softmax"}, seed=0, pods=4, size=5, evaluation="e1", episodes=10)
DIGEST = hashlib.sha256(b"").hexdigest()


def report(directory: Path, attempt: Started, score: float = 0.0, **other: Any) -> Submitted:
    """A report of an attempt, with its checkpoint on the disk."""
    place = f"pods/p{attempt.pod}r{attempt.round}/checkpoints/{attempt.token}"
    checkpoint = other.setdefault("checkpoint", place)
    (directory / checkpoint).mkdir(parents=True, exist_ok=True)
    (directory / checkpoint / "weights").write_bytes(b"w")
    fields = {
        "standard_error": 0.1,
        "episodes": 10,
        "evaluation": "e1",
        "frames": 100,
        "seconds": 1.0,
        "digest": DIGEST,
    }
    return Submitted(attempt.pod, attempt.round, attempt.token, score, **{**fields, **other})


def start(board: Leaderboard, pod: int, *parents: str) -> Started:
    round = board.state.pods[pod].round if pod in board.state.pods else 0
    values = {"learning_rate": 0.5}
    return board.start(
        pod, round, parents=parents, hyperparameters=values, experiment={"agent": {"kind": "PPO"}}
    )


def submit(board: Leaderboard, pod: int, score: float, *parents: str) -> Entry:
    assert board.submit(report(board.directory, start(board, pod, *parents), score)) is None
    newest = board.state.pods[pod].newest
    assert newest is not None
    return newest


def assert_nothing_dangles(board: Leaderboard, entries: dict[str, Entry]) -> None:
    """Of all that anybody may start from, or has started from, the checkpoint is whole."""
    pods = board.state.pods.values()
    started = [parent for pod in pods if pod.attempt for parent in pod.attempt.parents]
    kept = [*board.state.board, *(pod.newest for pod in pods if pod.newest)]
    names = {entry.checkpoint for entry in kept + [entries[parent] for parent in started]}
    assert names == {entry.checkpoint for entry in kept_entries(board.state)}
    listed = board.state.board
    assert listed.by_id == {entry.id: entry for entry in listed}
    assert listed.scores.tolist() == [entry.score for entry in listed]
    members = [pod.newest for pod in pods if pod.newest and pod.is_live]
    assert board.state.population == ranking(members)
    assert [name for name in names if not (board.directory / name / "weights").is_file()] == []


# --- what follows from the log --------------------------------------------------------------------


def test_every_state_is_that_of_the_log_and_none_changes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    with Leaderboard(tmp_path, HEADER) as board:
        seen = [board.state]
        for _ in range(200):
            random_operation(board, rng)
            seen.append(board.state)
        events = read_events(tmp_path)
    by_count = {state.events: state for state in seen}
    assert len(by_count) > 80
    for count, state in by_count.items():
        assert state_after(events[:count]) == state
    with Leaderboard(tmp_path) as board:
        assert board.state == seen[-1]


def test_what_is_applied_is_what_was_written(tmp_path: Path) -> None:
    with Leaderboard(tmp_path, HEADER) as board:
        values = {"learning_rate": np.float64(0.5)}
        attempt = board.start(0, 0, hyperparameters=values, experiment=values)
        values["learning_rate"] = np.float64(9.0)
        assert attempt.hyperparameters == {"learning_rate": 0.5}
        assert type(attempt.hyperparameters["learning_rate"]) is float
        board.submit(report(tmp_path, attempt, np.float64(1.0)))
        assert type(board.state.board[0].score) is float
        assert board.state.board[0].experiment == {"learning_rate": 0.5}


def test_failures_count_until_an_attempt_comes_further(tmp_path: Path) -> None:
    with Leaderboard(tmp_path, HEADER) as board:
        counts = []
        for frames in (0, 0, 50, 50, 40, 60):
            attempt = start(board, 0)
            assert board.fail(Failed(0, 0, attempt.token, "killed", frames)) is None
            counts.append(board.state.pods[0].failures)
        assert counts == [1, 2, 0, 1, 2, 0]
        assert board.state.pods[0].status == "failed"
        assert board.state.pods[0].reason == "killed"
        submit(board, 0, 0.0)
        assert board.state.pods[0].failures == 0


def test_pods_are_quarantined(tmp_path: Path) -> None:
    with Leaderboard(tmp_path, HEADER) as board:
        entry = submit(board, 0, 1.0)
        attempt = start(board, 0, entry.id)
        board.record(Stopped(0, "quarantined", "3 failures"))
        assert board.submit(report(tmp_path, attempt)) is not None
        assert board.state.pods[0].reason == "3 failures"
        assert board.state.board == (entry,)
        with pytest.raises(ValueError, match="quarantined"):
            start(board, 0)


def test_absence_ends_with_its_round(tmp_path: Path) -> None:
    with Leaderboard(tmp_path, HEADER) as board:
        attempt = start(board, 0)
        board.record(Absent(0, 3))
        assert not board.state.pods[0].absent
        board.record(Absent(0, 0))
        board.record(Absent(0, 3))
        assert board.state.pods[0].absent
        board.fail(Failed(0, 0, attempt.token, "killed"))
        attempt = start(board, 0)
        assert board.state.pods[0].absent
        board.submit(report(tmp_path, attempt))
        assert not board.state.pods[0].absent


def test_rounds_may_be_skipped_but_not_repeated(tmp_path: Path) -> None:
    with Leaderboard(tmp_path, HEADER) as board:
        assert board.start(9, 5, hyperparameters={}, experiment={}).round == 5
        assert board.state.pods[9].round == 5
        with pytest.raises(ValueError, match="cannot start 4"):
            board.start(9, 4, hyperparameters={}, experiment={})
        with pytest.raises(ValueError, match="p3r3"):
            start(board, 0, "p3r3")


# --- the order (T6) -------------------------------------------------------------------------------

ENTRY = Entry(0, 0, 0, 0.0, 0.0, 1, "", 0, 0.0, "", "", (), {}, {}, 0.0)
SCORES = st.sampled_from([-1.0, -0.0, 0.0, 1.0, 1e308]) | st.floats(-1e9, 1e9)
ENTRIES = st.lists(
    st.tuples(SCORES, st.integers(0, 3), st.integers(0, 5), st.integers(0, 5)),
    unique_by=lambda row: row[2:],
    max_size=32,
).map(
    lambda rows: [
        dataclasses.replace(ENTRY, score=score, frames=frames, pod=pod, round=round)
        for score, frames, pod, round in rows
    ]
)


@settings(max_examples=300, deadline=None, database=None)
@given(ENTRIES, st.randoms(use_true_random=False), st.integers(1, 8))
def test_the_order_does_not_depend_on_arrival(entries: list[Entry], random: Any, size: int) -> None:
    expected = ranking(entries)
    random.shuffle(entries)
    board = Board()
    for entry in entries:
        board = Board(exchanged(board, None, entry)[:size])
    assert board == expected[:size]
    if entries:
        assert board[0].score == max(entry.score for entry in entries)
        assert all(a.score >= b.score for a, b in itertools.pairwise(board))


# --- what does not count (T3, T6) -----------------------------------------------------------------


def test_zombies_are_fenced(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    rejected = 0
    with Leaderboard(tmp_path, HEADER) as board:
        for _ in range(100):
            pod = int(rng.integers(4))
            old = start(board, pod)
            kind = rng.integers(3)
            if kind == 0:  # declared dead
                board.fail(Failed(pod, old.round, old.token, "no heartbeat"))
            elif kind == 1:  # replaced
                start(board, pod)
            else:  # replaced by one that has already reported
                submit(board, pod, 0.0)
            late = report(tmp_path, old, 1e6)
            rejected += board.submit(late) is not None
            board.fail(Failed(pod, old.round, old.token, "late"))
        assert rejected == 100
        assert board.state.rejected == 200
        assert all(entry.score < 1e6 for entry in accepted_entries(read_events(tmp_path)).values())


def test_a_report_counts_once_however_often_it_comes(tmp_path: Path) -> None:
    with Leaderboard(tmp_path, HEADER) as board:
        attempt = start(board, 0)
        told = report(tmp_path, attempt, 1.0)
        assert board.submit(told) is None
        state = board.state
        assert board.submit(told) is None
        assert board.submit(dataclasses.replace(told, score=2.0)) is None  # the first one stands
        assert board.state is state
    with Leaderboard(tmp_path) as board:
        assert board.submit(told) is None
        start(board, 0)
        assert board.submit(told) is None
        assert [entry.score for entry in board.state.board] == [1.0]


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"score": math.nan}, "score is nan"),
        ({"standard_error": math.nan}, "standard error of nan"),
        ({"episodes": 9}, "9 episodes, not 10"),
        ({"evaluation": "e2"}, "'e2', not 'e1'"),
        ({"frames": -1}, "-1 frames"),
        ({"frames": 2**63}, "frames"),
        ({"seconds": math.nan}, "nan seconds"),
        ({"digest": "abc"}, "is not a SHA-256"),
        ({"checkpoint": "../outside"}, "inside"),
        ({"checkpoint": "pods/../../outside"}, "inside"),
        ({"checkpoint": "link"}, "inside"),
        ({"checkpoint": "pods//p1r0"}, "inside"),
        ({"checkpoint": "nothing"}, "inside"),
        ({"checkpoint": "a\0b"}, "inside"),
        ({"checkpoint": "\ud800"}, "inside"),
        ({"checkpoint": "pods/p1r0/checkpoints/{token}"}, "not in pods/p0r0/checkpoints"),
        ({"checkpoint": "pods/p0r0/checkpoints"}, "not in pods/p0r0/checkpoints"),
    ],
)
def test_what_cannot_be_ranked_is_rejected(
    tmp_path: Path, wrong: dict[str, Any], reason: str
) -> None:
    directory = tmp_path / "tournament"
    with Leaderboard(directory, HEADER) as board:
        kept = submit(board, 1, 0.0)
        (directory / kept.checkpoint / "deeper").mkdir()
        (tmp_path / "outside" / "deeper").mkdir(parents=True)
        (directory / "link").symlink_to(tmp_path / "outside")
        values = {
            name: value.format(inside=directory / kept.checkpoint, token=kept.token)
            if isinstance(value, str) and "{" in value
            else value
            for name, value in wrong.items()
        }
        attempt = start(board, 0)
        right = report(directory, attempt)
        assert reason in (board.submit(dataclasses.replace(right, **values)) or "")
        assert board.state.board == (kept,)
        assert board.state.rejected == 1
        assert board.submit(right) is None  # the attempt itself has not ended
        state = board.state
    assert state_after(read_events(directory)) == state


# --- kept while referenced (T8) -------------------------------------------------------------------


def random_operation(board: Leaderboard, rng: np.random.Generator) -> None:
    """Anything that an orchestrator may do."""
    chances = [0.28, 0.39, 0.1, 0.01, 0.02, 0.19, 0.01]
    pod, kind = int(rng.integers(6)), rng.choice(7, p=chances)
    now = board.state.pods.get(pod)
    running = now is not None and now.status == "running"
    if kind == 0 and (now is None or now.status != "quarantined"):
        newest = [each.newest.id for each in board.state.pods.values() if each.newest]
        known = sorted({*newest, *(entry.id for entry in board.state.board)})
        count = min(len(known), int(rng.integers(4)))
        parents = [str(name) for name in rng.choice(known, count, replace=False)] if known else []
        if now is not None and now.attempt is not None and rng.random() < 0.5:
            parents = list(now.attempt.parents)  # a retry
        start(board, pod, *parents)
    elif kind == 1 and running and now.attempt:
        score = float(rng.normal()) if rng.random() < 0.9 else math.nan
        board.submit(report(board.directory, now.attempt, score))
    elif kind == 2 and running and now.attempt:
        board.fail(Failed(pod, now.attempt.round, now.attempt.token, "killed", 1))
    elif kind == 3 and now is not None and pod > 1:
        board.record(Stopped(pod, "quarantined", "failures"))
    elif kind == 4 and now is not None:
        board.record(Absent(pod, now.round))
    elif kind == 5:
        board.collect_garbage()
    elif kind == 6 and now is not None and now.status == "quarantined":
        board.release(pod)


def test_nothing_dangles_in_1000_random_operations(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    directory = tmp_path / "tournament"
    outside = tmp_path / "outside"
    outside.mkdir()
    board = Leaderboard(directory, HEADER)
    best, entries = -math.inf, dict[str, Entry]()
    for number in range(1000):
        random_operation(board, rng)
        newest = [pod.newest for pod in board.state.pods.values() if pod.newest]
        entries.update((entry.id, entry) for entry in newest)
        assert_nothing_dangles(board, entries)
        if board.state.board:
            assert board.state.board[0].score >= best
            best = board.state.board[0].score
        if number % 100 == 99:
            board.close()
            board = Leaderboard(directory)
    assert accepted_entries(read_events(directory)) == entries
    board.collect_garbage()
    left = [entry for entry in entries.values() if (directory / entry.checkpoint).exists()]
    assert {entry.checkpoint for entry in left} == {
        entry.checkpoint for entry in kept_entries(board.state)
    }
    assert len(left) < len(entries) / 2
    assert board.collect_garbage() == ()
    assert outside.exists()
    board.close()


def outranked(board: Leaderboard) -> str:
    """The checkpoint of an entry that nothing refers to."""
    loser = submit(board, 0, -1.0)
    for score in range(5):
        submit(board, 0, float(score))
    return loser.checkpoint


def test_a_deletion_that_was_interrupted_is_ended_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(path: Path, **_: Any) -> None:
        (path / "weights").unlink()
        raise KeyboardInterrupt

    with Leaderboard(tmp_path, HEADER) as board:
        loser = outranked(board)
        monkeypatch.setattr(leaderboard.shutil, "rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            board.collect_garbage()
    monkeypatch.undo()
    with Leaderboard(tmp_path) as board:
        assert (tmp_path / loser).is_dir()
        assert board.collect_garbage() == (loser,)
        assert not (tmp_path / loser).exists()
        assert_nothing_dangles(board, {})


def test_what_a_snapshot_needs_stays_until_the_next_one(tmp_path: Path) -> None:
    """A store may copy a state's checkpoints for longer than the tournament needs them."""
    with Leaderboard(tmp_path, HEADER) as board:
        copied = submit(board, 0, -1.0).checkpoint
        board.snapshot()
        for score in range(5):
            submit(board, 0, float(score))
        assert copied not in board.collect_garbage()
        assert (tmp_path / copied).is_dir()
        board.snapshot()
        assert copied in board.collect_garbage()


def test_what_is_started_from_stays_also_for_a_pod_that_may_be_released(tmp_path: Path) -> None:
    with Leaderboard(tmp_path, HEADER) as board:
        parent = submit(board, 0, 0.5)
        attempt = start(board, 1, parent.id)
        for score in range(1, 7):
            submit(board, 0, float(score))
        assert parent not in board.state.board
        board.fail(Failed(1, 0, attempt.token, "killed"))
        assert parent.checkpoint not in board.collect_garbage()
        start(board, 1, parent.id)  # a retry
        board.record(Stopped(1, "quarantined", "failures"))
        board.collect_garbage()
        assert (tmp_path / parent.checkpoint).is_dir()
        with pytest.raises(ValueError, match="p0r0"):
            start(board, 2, parent.id)
        board.release(1)
        again = start(board, 1, parent.id)
        assert board.submit(report(tmp_path, again)) is None
        assert parent.checkpoint in board.collect_garbage()


def test_a_released_pod_has_all_its_attempts_again(tmp_path: Path) -> None:
    with Leaderboard(tmp_path, HEADER) as board:
        entry = submit(board, 0, 1.0)
        for _ in range(3):
            attempt = start(board, 0, entry.id)
            board.fail(Failed(0, 1, attempt.token, "killed"))
        with pytest.raises(ConfigError, match=r"pod 0 is not quarantined.*there are none"):
            board.release(0)
        board.record(Stopped(0, "quarantined", "killed"))
        with pytest.raises(ConfigError, match="pod 7 is not quarantined; quarantined pods: 0"):
            board.release(7)
        assert board.state.population == ()
        board.release(0)
    with Leaderboard(tmp_path) as board:
        pod = board.state.pods[0]
        assert (pod.status, pod.failures, pod.round, pod.newest) == ("waiting", 0, 1, entry)
        assert pod.attempt is not None
        assert pod.attempt.parents == (entry.id,)
        assert board.state.population == (entry,)
        board.record(Stopped(0, "quarantined", "killed"))
        shutil.rmtree(tmp_path / entry.checkpoint)
        with pytest.raises(ConfigError, match="checkpoint of p0r0, which it continues, is gone"):
            board.release(0)


@pytest.mark.figure(16)
def test_a_round_keeps_the_checkpoint_of_its_entry_alone(tmp_path: Path) -> None:
    """Also one that ended while another process wrote."""
    steps = [f"pods/p{pod}r0/checkpoints/{updates:012d}" for pod in (0, 1) for updates in (1, 2, 3)]
    for step in steps:
        (tmp_path / step).mkdir(parents=True)
        (tmp_path / step / "weights").write_bytes(b"w")
    (tmp_path / "pods/p1r0/checkpoints/a note").mkdir()
    kept = {steps[2], steps[5]}

    def left() -> set[str]:
        paths = (tmp_path / "pods").glob("*/checkpoints/[0-9]*")
        return {path.relative_to(tmp_path).as_posix() for path in paths}

    with Leaderboard(tmp_path, HEADER) as board:
        for pod, step in enumerate((steps[2], steps[5])):
            assert board.submit(report(tmp_path, start(board, pod), checkpoint=step)) is None
        assert left() == set(steps)
    with Leaderboard(tmp_path) as board:
        board.collect_garbage()
        assert left() == kept
    assert (tmp_path / "pods/p1r0/checkpoints/a note").is_dir()


def test_garbage_is_never_collected_through_a_link(tmp_path: Path) -> None:
    directory, outside = tmp_path / "tournament", tmp_path / "outside"
    with Leaderboard(directory, HEADER) as board:
        loser = outranked(board)
        shutil.move(directory / "pods", outside)
        (directory / "pods").symlink_to(outside)
        assert board.collect_garbage() == ()
        assert (outside / Path(loser).relative_to("pods") / "weights").is_file()


# --- killed (T2, T4) ------------------------------------------------------------------------------

# One process imports; each line on its stdin has it fork a writer, which is killed.
WRITERS = """
import os, sys
from pathlib import Path
from podracer.tournament.events import Header, Submitted, accepted_entries
from podracer.tournament.leaderboard import Leaderboard, read_events

def write(directory, header):
    with Leaderboard(directory, header) as board:
        while True:
            for pod in range(header.pods):
                round = board.state.pods[pod].round
                attempt = board.start(pod, round, hyperparameters={}, experiment={})
                checkpoint = f"pods/p{pod}r{round}/checkpoints/{attempt.token}"
                os.makedirs(directory / checkpoint, exist_ok=True)
                score = float(hash((pod, round)) % 1000)
                refused = board.submit(Submitted(
                    pod, round, attempt.token, score, 0.0, 1, "e", 1, 1.0, checkpoint, "0" * 64))
                assert refused is None, refused
                os.write(1, f"accepted {pod} {round} {score}\\n".encode())  # whole or not at all
                if round % 3 == 0:
                    board.collect_garbage()

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        write(Path(line.strip()), Header({}, seed=0, pods=3, size=4, evaluation="e", episodes=1))
    os.write(1, f"pid {child}\\n".encode())
    os.waitpid(child, 0)
    os.write(1, b"dead\\n")
"""


def kill_writers(directory: Path, cases: Iterator[int], rng: np.random.Generator) -> int:
    """Kill writers of one directory at random moments; returns how many entries they told of."""
    arguments = [sys.executable, "-W", "ignore", "-c", WRITERS]
    pipe = subprocess.PIPE
    with subprocess.Popen(arguments, stdin=pipe, stdout=pipe, text=True) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        told: dict[str, float] = {}
        for number in cases:
            place = directory / str(number // 20)
            told = told if number % 20 else {}
            print(place, file=parent.stdin, flush=True)
            kill, pid = None, 0
            has_written = bool(number % 2)  # every other one has, however busy the machine
            for line in iter(parent.stdout.readline, "dead\n"):
                word, *values = line.split()
                if word == "pid":
                    pid = int(values[0])
                else:
                    told[f"p{values[0]}r{values[1]}"] = float(values[2])
                    has_written = True
                if kill is None and pid and has_written:
                    kill = threading.Timer(rng.uniform(0.0, 0.06), os.kill, (pid, signal.SIGKILL))
                    kill.start()
            assert kill is not None
            kill.join()
            check_killed(place, told)
        parent.stdin.close()
    return len(accepted_entries(read_events(directory / "0")))


def check_killed(directory: Path, told: dict[str, float]) -> None:
    log = directory / LOG
    if not log.exists() or b"\n" not in log.read_bytes():
        assert told == {}
        return
    events = read_events(directory)
    entries = accepted_entries(events)
    reports = [event for event in events if isinstance(event, Submitted)]
    assert len(entries) == len(reports)  # none twice
    assert told.items() <= {name: entry.score for name, entry in entries.items()}.items()
    state = state_after(events)
    assert state.board == ranking(entries.values())[: state.header.size]
    assert all((directory / entry.checkpoint).is_dir() for entry in kept_entries(state))


@pytest.mark.figure(14)
@pytest.mark.parametrize("number", [4, pytest.param(1000, marks=pytest.mark.slow)])
def test_killed_writers_lose_nothing_that_they_told_of(number: int, tmp_path: Path, cases) -> None:
    assert kill_writers(tmp_path, cases(range(number)), np.random.default_rng(5)) > 1
    for place in tmp_path.iterdir():
        with Leaderboard(place) as board:
            assert board.state == state_after(read_events(place))


# --- the log --------------------------------------------------------------------------------------


def played(directory: Path) -> TournamentState:
    with Leaderboard(directory, HEADER) as board:
        for number in range(12):
            submit(board, number % 4, float(number % 5))
        return board.state


def test_damage_is_refused_with_its_line(tmp_path: Path) -> None:
    state = played(tmp_path)
    log, rng = tmp_path / LOG, np.random.default_rng(7)
    whole = log.read_bytes()
    for _ in range(400):
        data = bytearray(whole)
        at = int(rng.integers(len(data) - 1))
        data[at] ^= 1 << int(rng.integers(8))
        log.write_bytes(data)
        number = whole.count(b"\n", 0, at) + 1
        with pytest.raises(CheckpointError, match=f"line {number} is damaged"):
            read_events(tmp_path)
    lines = whole.splitlines(keepends=True)
    for cut in (lines[:3] + lines[4:], [*lines[:3], lines[2], *lines[3:]], lines[1:]):
        log.write_bytes(b"".join(cut))
        with pytest.raises(CheckpointError, match="damaged"):
            Leaderboard(tmp_path)
    log.write_bytes(whole)
    with Leaderboard(tmp_path) as board:
        assert board.state == state


def test_a_torn_last_line_is_cut_off(tmp_path: Path) -> None:
    """It was never acknowledged, so its number is not noted either."""
    played(tmp_path)
    log = tmp_path / LOG
    acknowledged, length = log.read_bytes(), (tmp_path / LENGTH).read_bytes()
    with Leaderboard(tmp_path) as board:
        board.record(Absent(0, 99))
    whole = log.read_bytes()
    for size in range(len(acknowledged), len(whole), 7):
        log.write_bytes(whole[:size])
        (tmp_path / LENGTH).write_bytes(length)
        before = read_events(tmp_path)
        assert log.stat().st_size == size  # a reader changes nothing
        with Leaderboard(tmp_path) as board:
            assert board.state == state_after(before)
            board.record(Absent(0, 99))
        assert read_events(tmp_path)[:-1] == before


def test_a_log_that_was_cut_is_refused_at_every_place(tmp_path: Path) -> None:
    """Its lines are whole, so only the length tells; without it, what is left goes on."""
    played(tmp_path)
    log, length = tmp_path / LOG, (tmp_path / LENGTH).read_bytes()
    lines = log.read_bytes().splitlines(keepends=True)
    cuts = [b"".join(lines[:count]) for count in range(len(lines))]
    cuts += [cut + lines[number][:20] for number, cut in enumerate(cuts)]
    for cut in cuts:
        log.write_bytes(cut)
        for reader in (read_events, Leaderboard, lambda path: Leaderboard(path, HEADER)):
            with pytest.raises(CheckpointError, match=f"of the {len(lines)} that {LENGTH} has"):
                reader(tmp_path)
        assert (log.read_bytes(), (tmp_path / LENGTH).read_bytes()) == (cut, length)
    log.write_bytes(cuts[9])
    (tmp_path / LENGTH).unlink()
    with Leaderboard(tmp_path) as board:
        assert board.state == state_after(read_events(tmp_path))
        assert board.state.events == 9


def test_a_log_of_another_tournament_beside_the_length_is_refused(tmp_path: Path) -> None:
    played(tmp_path / "one")
    played(tmp_path / "other")
    shutil.copy(tmp_path / "other" / LOG, tmp_path / "one" / LOG)
    with pytest.raises(CheckpointError, match="it was cut or replaced"):
        read_events(tmp_path / "one")


def test_a_disk_that_refuses_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Leaderboard(tmp_path, HEADER) as board:
        submit(board, 0, 1.0)
        state, size = board.state, (tmp_path / LOG).stat().st_size
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, hard))
        try:
            with pytest.raises(OSError, match="space"):
                board.record(Absent(0, 99))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

        def failing(_: int) -> None:
            raise OSError(errno.EIO, "broken")

        monkeypatch.setattr(leaderboard.os, "fsync", failing)
        with pytest.raises(OSError, match="broken") as raised:
            board.record(Absent(0, 99))
        assert raised.value.filename == str(tmp_path / LOG)
        monkeypatch.undo()
        assert board.state is state
        assert state_after(read_events(tmp_path)) == state  # also for one that reads it now
        board.record(Absent(0, 98))
        state = board.state
    assert state_after(read_events(tmp_path)) == state


@pytest.mark.parametrize("is_pipe", [False, True])
def test_the_length_is_written_through_no_link_and_into_no_pipe(is_pipe, tmp_path: Path) -> None:
    """A pipe is not waited for."""
    other = tmp_path / "other"
    other.write_text("mine")
    with Leaderboard(tmp_path / "t", HEADER) as board:
        (tmp_path / "t" / LENGTH).unlink()
        os.mkfifo(tmp_path / "t" / LENGTH) if is_pipe else os.symlink(
            other, tmp_path / "t" / LENGTH
        )
        submit(board, 0, 1.0)
        state = board.state
    assert other.read_text() == "mine"
    (tmp_path / "t" / LENGTH).unlink()
    assert state_after(read_events(tmp_path / "t")) == state


def test_what_is_acknowledged_is_synced_first(tmp_path: Path, monkeypatch) -> None:
    synced: list[bytes] = []
    with Leaderboard(tmp_path, HEADER) as board:
        monkeypatch.setattr(leaderboard.os, "fsync", lambda _: synced.append(log.read_bytes()))
        log = tmp_path / LOG
        submit(board, 0, 1.0)
        assert synced[-1] == log.read_bytes()
        assert len(synced) == 2  # the start of the round and its report


def test_there_is_one_writer_and_any_number_of_readers(tmp_path: Path) -> None:
    with Leaderboard(tmp_path, HEADER) as board:
        submit(board, 0, 1.0)
        before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
        with pytest.raises(ConfigError, match="in use by process"):
            Leaderboard(tmp_path, HEADER)
        assert state_after(read_events(tmp_path)) == board.state
        assert before == {path: path.read_bytes() for path in before}
        submit(board, 0, 2.0)
    with Leaderboard(tmp_path) as board:
        assert len(board.state.board) == 2


def test_another_tournament_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no tournament"):
        Leaderboard(tmp_path / "none")
    assert not (tmp_path / "none").exists()
    played(tmp_path)
    with pytest.raises(ConfigError, match="seed was 0 and is 1"):
        Leaderboard(tmp_path, dataclasses.replace(HEADER, seed=1))
    with pytest.raises(ConfigError, match=r"tournament\.rule was softmax and is"):
        Leaderboard(tmp_path, dataclasses.replace(HEADER, tournament={"rule": "uniform"}))
    with Leaderboard(tmp_path, HEADER) as board:  # each refusal has let go of the lock
        assert len(board.state.board) == 5
    with pytest.raises(ConfigError, match="size must be at least 1, but it is 0"):
        dataclasses.replace(HEADER, size=0)


def test_a_header_that_no_line_can_hold_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a tournament takes finite numbers only"):
        Leaderboard(tmp_path / "new", dataclasses.replace(HEADER, tournament={"rate": math.inf}))
    assert list(tmp_path.iterdir()) == []


def test_another_format_is_refused(tmp_path: Path) -> None:
    fields = {"event": "header", **dataclasses.asdict(HEADER), "format": 2}
    (tmp_path / LOG).write_bytes(leaderboard.encode_line(fields, "")[0])
    with pytest.raises(ConfigError, match="format 2, this version reads 1"):
        read_events(tmp_path)
    (tmp_path / LOG).write_bytes(b"")
    with pytest.raises(ConfigError, match="is empty"):
        Leaderboard(tmp_path)


def test_a_line_is_plain_json(tmp_path: Path) -> None:
    played(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / LOG).read_text().splitlines()]
    assert [line["event"] for line in lines[:3]] == ["header", "started", "submitted"]
    assert all(line["time"] > 0 and len(line["sha256"]) == 16 for line in lines)


# --- the length of the log (T5) -------------------------------------------------------------------


@pytest.mark.figure(14)
def test_the_length_is_noted_anew_where_it_is_damaged_or_missing(tmp_path: Path, cases) -> None:
    rng = np.random.default_rng(8)
    with Leaderboard(tmp_path, HEADER) as board:
        for number in range(12):
            submit(board, number % 4, float(number % 5))
    path = tmp_path / LENGTH
    original = path.read_bytes()
    assert json.loads(original)["events"] == len(read_events(tmp_path))
    for number in cases(range(50)):
        data = bytearray(original)
        if number % 5 == 0:
            path.unlink()
        elif number % 5 == 1:
            path.write_bytes(data[: rng.integers(len(data))])
        else:
            data[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
            path.write_bytes(data)
        with Leaderboard(tmp_path):
            assert path.read_bytes() == original
