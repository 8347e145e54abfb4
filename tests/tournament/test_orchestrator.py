"""The orchestrator with pods that only pretend to train: what any order of ends and faults does.

A pod's score is a function of its number, its round and its parents, so a tournament with faults
must come to the entries of one without.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from killing import killed

from podracer import recipes
from podracer.cli import pods as command_line
from podracer.cli.leaderboard import LeaderboardOptions, leaderboard
from podracer.drivers.population import Hyperparameter, Pod
from podracer.drivers.selection import Range, Selection, Truncation
from podracer.errors import ConfigError, PodracerError
from podracer.io.run_directory import RunLock, write_json
from podracer.io.signals import StopSignals
from podracer.schedules import Linear
from podracer.tournament import orchestrator, selection
from podracer.tournament import pod as pods
from podracer.tournament.config import Tournament, read_tournament, with_pod_seeds
from podracer.tournament.engine import EngineLost, open_log
from podracer.tournament.events import (
    Failed,
    Stopped,
    Submitted,
    accepted_entries,
    lineage,
    state_after,
)
from podracer.tournament.leaderboard import Leaderboard, read_events
from podracer.tournament.orchestrator import Orchestrator
from podracer.tournament.pod import REPORT, read_task

TOURNAMENT = Tournament(
    (recipes.find("cartpole_ppo"),), selection.Independent(), pods=4, rounds=4, episodes=10
)
MIXED = (recipes.find("cartpole_ppo"), recipes.find("cartpole_dqn"))


TWO_RATES = tuple(MIXED[0].with_fields({"agent": {"learning_rate": rate}}) for rate in (1e-4, 1e-3))


DECAYING = MIXED[0].with_fields({"agent": {"learning_rate": Linear(1e-3, 0.0)}})


SWEEP = dataclasses.replace(
    MIXED[0], pods=tuple(Pod(0, (Hyperparameter("learning_rate", rate),)) for rate in (1e-4, 1e-3))
)


GENERATIONS_OF_200 = dataclasses.replace(
    recipes.find("catch_a2c"),
    pods=tuple(Pod(seed) for seed in range(64)),
    exchange=Selection(Truncation(), every=200),
)


class Pretence:
    """An engine whose processes live for a few polls and then end as `fate` says.

    `fate(pod, round, attempt)` is "done", "crash", "killed", "hang", "half" (killed after a save)
    or an exit code; `polls(pod)` is for how long an attempt lives.
    """

    is_ready, waiting = True, frozenset[int]()

    def __init__(self, fate: Any = None, polls: Any = None) -> None:
        self.fate, self.polls = fate or (lambda *_: "done"), polls or (lambda pod: 1 + pod % 3)
        self.attempts: dict[tuple[int, int], int] = {}
        self.alive: dict[int, dict[str, Any]] = {}
        self.most = 0
        self.signals = StopSignals()
        self.time = 0.0  # seconds, on the clock of the tournament

    def start(self, token: int, directory: Path) -> None:
        task = read_task(directory)
        assert task.token == token
        place = (task.pod, task.round)
        assert all(each["place"] != place for each in self.alive.values())
        attempt = self.attempts[place] = self.attempts.get(place, 0) + 1
        self.alive[token] = {
            "place": place, "task": task, "directory": directory, "left": self.polls(task.pod),
            "fate": self.fate(task.pod, task.round, attempt), "code": None,
        }  # fmt: skip
        self.most = max(self.most, len(self.alive))

    def poll(self) -> dict[int, int]:
        codes = {}
        self.time += 0.001 if self.alive else 0.5
        if any(each["fate"] == "hang" for each in self.alive.values()):
            self.time += 3600.0
        for token, each in list(self.alive.items()):
            each["left"] -= 1
            if each["fate"] != "hang":  # it records
                (each["directory"] / "log.txt").write_text("alive\n")
                os.utime(each["directory"] / "log.txt", (0.0, self.time))
            if each["code"] is None and each["left"] <= 0 and each["fate"] != "hang":
                each["code"] = self.end(token, each)
            if each["code"] is not None:
                codes[token] = each["code"]
                del self.alive[token]
        return codes

    def end(self, token: int, each: dict[str, Any]) -> int:
        pod, round = each["place"]
        directory = each["directory"]
        if isinstance(each["fate"], int):
            return each["fate"]
        if each["fate"] == "crash":
            write_json(directory / "crash.json", {"message": "a fault for the test"})
            return 70
        step = directory / "checkpoints" / f"{len(self.attempts):012d}"
        step.mkdir(parents=True, exist_ok=True)
        (step / "manifest.json").write_text(str(token))
        if each["fate"] in ("killed", "half"):
            if each["fate"] == "killed":
                (step / "manifest.json").unlink()
            return -9
        report = {
            "token": token, "score": score(pod, round, each["task"].parents), "standard_error": 1.0,
            "episodes": 10, "frames": 100 * (round + 1), "seconds": 1.0,
            "checkpoint": step.relative_to(directory.parents[1]).as_posix(),
            "digest": hashlib.sha256(b"").hexdigest(),
        }  # fmt: skip
        write_json(directory / REPORT, report)
        return 0

    def stop(self, token: int) -> None:
        if token in self.alive:
            self.alive[token]["code"] = 75

    def kill(self, token: int) -> None:
        if token in self.alive:
            self.alive[token]["code"] = -9

    def close(self) -> None:
        self.alive.clear()


def score(pod: int, round: int, parents: Any) -> float:
    return float((pod * 7 + round * 13) % 29)


def run(directory: Path, tournament: Tournament, engine: Pretence) -> int:
    """Run a tournament by the clock and the signals of its engine; return the exit code."""
    watch, clock = (lambda state: None), (lambda: engine.time)
    with Leaderboard(directory, tournament.header()) as board:
        return Orchestrator(tournament, board, engine, engine.signals, watch, clock).run()


def play(directory: Path, tournament: Tournament = TOURNAMENT, engine: Any = None) -> Any:
    """The state at the end, and the engine."""
    engine = engine or Pretence()
    assert run(directory, tournament, engine) == 0
    return state_after(read_events(directory)), engine


def results(directory: Path) -> dict[str, Any]:
    entries = accepted_entries(read_events(directory)).values()
    return {e.id: (e.score, e.frames, e.parents, dict(e.hyperparameters)) for e in entries}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(orchestrator, "PAUSE_SECONDS", 0.0)


def test_every_pod_does_its_rounds_and_the_board_is_ranked(tmp_path):
    state, _ = play(tmp_path)
    assert set(results(tmp_path)) == {f"p{p}r{r}" for p in range(4) for r in range(4)}
    scores = [entry.score for entry in state.board]
    assert scores == sorted(scores, reverse=True)
    assert [e.id for e in lineage(accepted_entries(read_events(tmp_path)), "p2r3")] == [
        f"p2r{r}" for r in (3, 2, 1, 0)
    ]
    kept = {entry.checkpoint for entry in state.board}
    assert all((tmp_path / path).is_dir() for path in kept)
    assert read_tournament(tmp_path) == TOURNAMENT


@pytest.mark.figure(13)
@pytest.mark.parametrize(
    ("pods", "rounds"), [(8, 5), pytest.param(20, 10, marks=pytest.mark.slow)], ids=["40", "200"]
)
def test_faults_change_no_result(pods, rounds, tmp_path, cases):
    """Crashes, kills before and after a save, and hangs, in half of all attempts."""
    tournament = dataclasses.replace(TOURNAMENT, pods=pods, rounds=rounds)
    plain, _ = play(tmp_path / "plain", tournament)
    faults = []

    def fate(pod, round, attempt):
        chosen = np.random.default_rng([pod, round]).choice(["crash", "killed", "half", "hang"])
        if attempt == 1:
            faults.append(chosen)
            return chosen
        return "done"

    faulty, engine = play(tmp_path / "faulty", tournament, Pretence(fate))
    assert len(faults) == pods * rounds
    assert set(faults) == {"crash", "killed", "half", "hang"}
    equal = results(tmp_path / "faulty") == results(tmp_path / "plain")
    cases.add(len(faults) * equal, len(faults))
    assert equal
    assert [e.id for e in faulty.board] == [e.id for e in plain.board]
    assert all(count == 2 for count in engine.attempts.values())
    reasons = [e.reason for e in read_events(tmp_path / "faulty") if isinstance(e, Failed)]
    assert reasons.count("recorded nothing for 1800 s (stall_seconds)") == faults.count("hang")


def test_a_pod_without_progress_is_quarantined_with_the_reason_and_the_others_go_on(tmp_path):
    def fate(pod, round, attempt):
        return "crash" if (pod, round) == (2, 1) else "done"

    engine = Pretence(fate)
    with pytest.raises(PodracerError, match=r"1 of 4 pods failed .* pod 2: .*a fault for the test"):
        play(tmp_path, engine=engine)
    state = state_after(read_events(tmp_path))
    assert engine.attempts[2, 1] == TOURNAMENT.retries == 3
    assert state.pods[2].status == "quarantined"
    assert "a fault for the test" in state.pods[2].reason
    assert set(results(tmp_path)) == {f"p{p}r{r}" for p in (0, 1, 3) for r in range(4)} | {"p2r0"}


def test_a_kill_between_the_last_failure_and_its_quarantine_earns_no_attempt(tmp_path, monkeypatch):
    record = Leaderboard.record

    def killed(board, event):
        if isinstance(event, Stopped):
            raise SystemError
        record(board, event)

    engine = Pretence(lambda pod, *_: "crash" if pod == 2 else "done")
    with monkeypatch.context() as patch:
        patch.setattr(Leaderboard, "record", killed)
        with pytest.raises(SystemError):
            play(tmp_path, engine=engine)
    engine = Pretence()
    with pytest.raises(PodracerError, match=r"1 of 4 pods failed .* pod 2: .*a fault for the test"):
        play(tmp_path, engine=engine)
    assert (2, 0) not in engine.attempts


def test_progress_earns_another_attempt(tmp_path):
    def fate(pod, round, attempt):
        return "half" if (pod, round) == (1, 1) and attempt < 6 else "done"

    state, engine = play(tmp_path, engine=Pretence(fate))
    assert engine.attempts[1, 1] == 6
    assert state.pods[1].round == 4


@pytest.mark.figure(13)
@pytest.mark.parametrize("code", [73, 75, 77, -signal.SIGTERM])
def test_what_a_machine_loses_is_no_fault_of_the_pod(tmp_path, code):
    """Four losses in a row, where three failures would be one too many."""
    times = []

    def fate(pod, round, attempt):
        if (pod, round) != (1, 1):
            return "done"
        times.append(engine.time)
        return code if attempt <= 4 else "done"

    engine = Pretence(fate)
    state, _ = play(tmp_path, engine=engine)
    assert state.pods[1].round == 4
    failed = [e for e in read_events(tmp_path) if isinstance(e, Failed)]
    assert [(e.pod, e.fault) for e in failed] == [(1, "machine")] * 4
    waits = np.diff(times)
    assert (waits >= [1.0, 2.0, 4.0, 8.0]).all(), "it does not back off"
    assert waits[-1] < 10.0


@pytest.mark.figure(13)
def test_losses_without_end_end_the_tournament_and_quarantine_nothing(tmp_path):
    engine = Pretence(lambda pod, *_: 77 if pod == 2 else "done")
    with pytest.raises(EngineLost, match="pod 2 was lost 20 times in a row, by no fault"):
        play(tmp_path, engine=engine)
    state, _ = play(tmp_path)
    assert all(pod.status == "waiting" and pod.round == 4 for pod in state.pods.values())


def test_a_reader_that_has_left_changes_no_exit_code(tmp_path, monkeypatch):
    reader, writer = os.pipe()
    os.close(reader)
    output = os.fdopen(writer, "w", buffering=1)
    monkeypatch.setattr(command_line, "run_tournament", lambda *_: 75)
    with monkeypatch.context() as patch:
        patch.setattr("sys.stdout", output)
        assert command_line.run_on_terminal(TOURNAMENT, tmp_path, ()) == 75
    with pytest.raises(BrokenPipeError):
        output.close()


def test_a_log_that_cannot_be_read_at_the_end_is_no_reader_that_has_left(
    tmp_path, monkeypatch, capfd
):
    def best_run(directory):
        raise PermissionError(13, "Permission denied", str(directory))

    monkeypatch.setattr(command_line, "run_tournament", lambda *_: 0)
    monkeypatch.setattr(command_line, "best_run", best_run)
    with pytest.raises(PermissionError):
        command_line.run_on_terminal(TOURNAMENT, tmp_path, ())


def test_a_released_pod_goes_on(tmp_path, capsys):
    engine = Pretence(lambda pod, *_: "crash" if pod == 2 else "done")
    with pytest.raises(PodracerError, match="1 of 4 pods failed"):
        play(tmp_path, engine=engine)
    with pytest.raises(PodracerError, match="1 of 4 pods failed"):
        play(tmp_path)
    assert leaderboard(LeaderboardOptions(tmp_path, release=2)) == 0
    assert "podracer resume" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--json prints the ranking once"):
        leaderboard(LeaderboardOptions(tmp_path, watch=True, json=True))
    play(tmp_path)
    assert len(results(tmp_path)) == 16


def test_a_pod_that_waits_for_a_machine_does_not_stall(tmp_path):
    class Full(Pretence):
        """A cluster that has room for pod 3 after an hour."""

        def poll(self):
            self.waiting = (
                {token for token, each in self.alive.items() if each["place"][0] == 3}
                if self.time < 3600.0
                else frozenset()
            )
            self.time += 100.0
            for token in self.waiting:
                self.alive[token]["left"] = 2
            return super().poll()

    state, engine = play(tmp_path, engine=Full())
    assert engine.time > 3600.0
    assert state.pods[3].round == 4
    assert not [e for e in read_events(tmp_path) if isinstance(e, Failed)]


def test_when_every_pod_fails_it_says_why(tmp_path):
    with pytest.raises(PodracerError, match=r"every pod has failed: .*a fault for the test"):
        play(tmp_path, engine=Pretence(lambda *_: "crash"))


@pytest.mark.figure(13)
def test_killed_before_and_after_every_event_nothing_is_lost_or_counted_twice(
    tmp_path, monkeypatch, cases
):
    tournament = dataclasses.replace(TOURNAMENT, pods=3, rounds=2)
    play(tmp_path / "plain", tournament)
    events = len(read_events(tmp_path / "plain"))
    moments = 0
    for at in range(1, events):
        for after in (False, True):
            directory = tmp_path / f"{at}{after}"
            with killed(monkeypatch, at, after=after):
                play(directory, tournament)
            play(directory, tournament)  # its pods are gone, too: started again
            assert results(directory) == results(tmp_path / "plain")
            submitted = [e for e in read_events(directory) if isinstance(e, Submitted)]
            assert len(submitted) == 6
            moments += 1
            cases.add(1, 1)
    assert moments == 2 * (events - 1)


def test_a_report_counts_though_its_tournament_was_killed_before_it_was_read(tmp_path):
    class Killed(Pretence):
        def poll(self):
            codes = super().poll()
            if (tmp_path / "pods" / "p1r1" / REPORT).exists():
                raise SystemError
            return codes

    with pytest.raises(SystemError):
        play(tmp_path, engine=Killed())
    _, engine = play(tmp_path)
    assert (1, 1) not in engine.attempts
    assert len(results(tmp_path)) == 16
    assert not [e for e in read_events(tmp_path) if isinstance(e, Failed)]


def test_a_report_of_an_attempt_that_was_replaced_does_not_count(tmp_path):
    class Haunted(Pretence):
        def end(self, token, each):
            code = super().end(token, each)
            if each["place"] == (1, 1) and self.attempts[1, 1] == 1:
                path = each["directory"] / REPORT
                report = json.loads(path.read_text())
                write_json(path, {**report, "token": token - 1, "score": 1e6})
            return code

    state, engine = play(tmp_path, engine=Haunted())
    assert engine.attempts[1, 1] == 2
    assert state.board[0].score < 1e6
    assert len(results(tmp_path)) == 16


REPORT_DAMAGES: tuple[Any, ...] = (
    *(lambda report, name=name: {k: v for k, v in report.items() if k != name}
      for name in ("score", "standard_error", "episodes", "frames", "checkpoint", "digest")),
    lambda report: {**report, "score": None},
    lambda report: {**report, "seconds": "1.0"},
    lambda report: {**report, "frames": 10**400},
    lambda report: {**report, "digest": 7},
    lambda report: {**report, "checkpoint": ["a", "b"]},
    lambda report: {**report, "matches": [["p0r0", "random", 1]]},
    lambda report: {**report, "matches": [["p0r0", "random", 1, "2", 3, ""]]},
    lambda report: {**report, "an unknown field": 1.0},
    lambda report: [report],
    lambda report: b"\xff{",
)  # fmt: skip


def test_a_damaged_report_costs_its_attempt_alone(tmp_path):
    """Each round of each pod has another damage, in its first attempt."""

    class Damaging(Pretence):
        def end(self, token, each):
            code = super().end(token, each)
            pod, round = each["place"]
            if self.attempts[pod, round] == 1:
                path = each["directory"] / REPORT
                damaged = REPORT_DAMAGES[4 * pod + round](json.loads(path.read_text()))
                path.write_bytes(
                    damaged if isinstance(damaged, bytes) else json.dumps(damaged).encode()
                )
            return code

    _, engine = play(tmp_path, engine=Damaging())
    assert set(engine.attempts.values()) == {2}
    assert len(results(tmp_path)) == len(REPORT_DAMAGES) == 16
    reasons = [e.reason for e in read_events(tmp_path) if isinstance(e, Failed)]
    assert all("\n" not in reason and len(reason) < 300 for reason in reasons)
    assert sum("report.json is damaged: " in reason for reason in reasons) == 15
    assert sum("'score'" in reason for reason in reasons) == 2


def test_a_crash_at_the_exit_loses_no_report(tmp_path):
    class Crashing(Pretence):
        def end(self, token, each):
            super().end(token, each)
            return -11

    _, engine = play(tmp_path, engine=Crashing())
    assert set(engine.attempts.values()) == {1}
    assert len(results(tmp_path)) == 16


def test_a_slow_pod_delays_nobody(tmp_path):
    """The others have done all their rounds before it has done one."""
    play(tmp_path, engine=Pretence(polls=lambda pod: 100 if pod == 3 else 1))
    order = [(e.pod, e.round) for e in read_events(tmp_path) if isinstance(e, Submitted)]
    assert order.index((3, 0)) == 12


class Deaf(Pretence):
    """An engine whose attempts never end; each poll takes a step of `script`, the last one stops.

    `script(engine)` is a generator. Nothing has started before its first step.
    """

    def __init__(self, script: Callable[[Deaf], Iterator[None]]) -> None:
        super().__init__(polls=lambda pod: 10**9)
        self.script = script(self)
        self.stopped: list[int] = []
        self.killed: list[int] = []

    def poll(self) -> dict[int, int]:
        if next(self.script, "over") == "over":
            self.signals.exit_code = 75
            self.time += 2 * orchestrator.GRACE_SECONDS
        return {}

    def stop(self, token: int) -> None:
        self.stopped.append(token)

    def kill(self, token: int) -> None:
        self.killed.append(token)


def test_whoever_records_lives_whatever_the_clock_of_the_files_says(tmp_path):
    def script(engine):
        yield
        engine.time += 3900.0
        for attempt in engine.alive.values():
            if (pod := attempt["place"][0]) < 3:
                path = attempt["directory"] / "metrics.jsonl"
                path.write_text("{}")
                year = (0, 1e9, 4e9)[pod]  # 1970, 2001 and 2096
                os.utime(path, (year, year))
        yield
        assert [engine.alive[token]["place"] for token in engine.killed] == [(3, 0)]

    assert run(tmp_path, TOURNAMENT, Deaf(script)) == 75


def test_whoever_does_not_save_in_time_is_named(tmp_path, caplog):
    def script(engine):
        yield

    engine = Deaf(script)
    assert run(tmp_path, TOURNAMENT, engine) == 75
    assert sorted(engine.stopped) == sorted(engine.alive)
    assert "which continue from their last save: 0, 1, 2, 3." in caplog.text


def test_an_attempt_that_does_not_end_keeps_its_directory(tmp_path, monkeypatch):
    clock = itertools.count(step=61.0)
    monkeypatch.setattr(pods.time, "monotonic", lambda: next(clock))
    with RunLock(tmp_path), pytest.raises(pods.StillInUse, match="in use by an earlier attempt"):
        pods.wait_for_lock(tmp_path)
    pods.wait_for_lock(tmp_path)


def test_pods_that_are_sweeps_have_seeds_of_their_own():
    sweep = dataclasses.replace(TOURNAMENT.experiments[0], pods=tuple(map(Pod, range(100))))
    seeds = set[int]()
    for number in (0, 1, 9_999):
        experiment = with_pod_seeds(sweep, 429_494, number)
        experiment.check()
        seeds |= {experiment.seed, *(member.seed for member in experiment.pods)}
    assert len(seeds) == 3 * 101


def test_pods_that_a_signal_to_all_processes_has_ended_did_not_fail(tmp_path):
    class Preempted(Pretence):
        def poll(self):
            if len(results(tmp_path)) >= 2:
                self.signals.exit_code = 75
                for attempt in self.alive.values():
                    attempt["code"] = 75
            return super().poll()

    with pytest.raises(AssertionError, match="75"):
        play(tmp_path, engine=Preempted())
    assert not any(type(event).__name__ == "Failed" for event in read_events(tmp_path))


def test_no_round_starts_after_a_stop_while_another_was_scored(tmp_path):
    """Inline, a start is a whole round, and its scores do not look for signals."""

    class Scoring(Pretence):
        def start(self, token, directory):
            super().start(token, directory)
            if len(self.attempts) == 2:
                self.signals.exit_code = 75

    engine = Scoring(polls=lambda pod: 0)
    with pytest.raises(AssertionError, match="75"):
        play(tmp_path, engine=engine)
    assert list(engine.attempts) == [(0, 0), (1, 0)]
    assert set(results(tmp_path)) == {"p0r0", "p1r0"}


# --- rules and settings ---------------------------------------------------------------------------


def test_generations_wait_for_each_other_and_fuse_their_groups(tmp_path):
    rule = selection.Generational(group_size=2, parents=1)
    tournament = dataclasses.replace(TOURNAMENT, pods=6, rounds=3, selection=rule)
    play(tmp_path, tournament, Pretence(polls=lambda pod: 1 + 3 * pod))
    order = [e.round for e in read_events(tmp_path) if isinstance(e, Submitted)]
    assert order == sorted(order)
    entries = accepted_entries(read_events(tmp_path))
    means = {g: np.mean([entries[f"p{p}r0"].score for p in (2 * g, 2 * g + 1)]) for g in range(3)}
    best = max(means, key=lambda g: means[g])
    for pod in range(6):
        assert entries[f"p{pod}r1"].parents == (f"p{2 * best}r0", f"p{2 * best + 1}r0")


def test_a_straggler_is_waited_for_so_long_and_no_longer(tmp_path, monkeypatch):
    monkeypatch.setattr(orchestrator, "LOOK_SECONDS", 0.02)
    rule = selection.Generational(group_size=1, parents=1)
    tournament = dataclasses.replace(TOURNAMENT, rounds=2, selection=rule, straggler_seconds=0.05)
    play(tmp_path, tournament, Pretence(polls=lambda pod: 200 if pod == 3 else 1))
    order = [(e.pod, e.round) for e in read_events(tmp_path) if isinstance(e, Submitted)]
    assert order.index((0, 1)) < order.index((3, 0))


def test_the_log_alone_gives_the_same_decisions(tmp_path):
    """Every start is what the rule chooses from the events before it."""
    rule = selection.PopulationBased()
    tournament = dataclasses.replace(TOURNAMENT, pods=8, rounds=6, selection=rule)
    play(tmp_path, tournament, Pretence(polls=lambda pod: 1 + pod))
    events = read_events(tmp_path)
    adopted = 0
    for n, event in enumerate(events):
        if type(event).__name__ != "Started":
            continue
        sweep = n
        while type(events[sweep - 1]).__name__ == "Started":
            sweep -= 1  # one sweep decides for all that wait before it starts any
        view = selection.SelectionView(state_after(events[:sweep]), event.pod, event.round)
        rng = selection.generator(tournament.seed, event.pod, event.round)
        start = selection.choose(rule, view, rng)
        assert start is not None
        assert start.parents == event.parents
        for name, value in start.hyperparameters.items():
            assert event.hyperparameters[name] == pytest.approx(value, rel=1e-6)
        adopted += bool(event.parents) and not event.parents[0].startswith(f"p{event.pod}r")
    assert adopted > 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"experiments": ()}, "needs a recipe"),
        ({"rounds": 0}, "rounds must be at least 1"),
        ({"round_seconds": 0}, "round_seconds must be above 0, but it is 0"),
        ({"seed": 10**6}, "seed must be at most 429,494"),
        ({"stall_seconds": math.inf}, "stall_seconds must be finite as a float32, but it is inf"),
        ({"pod_gpus": 1.0}, "`pod_gpus` is for Ray clusters: add `engine=ray`, or leave it out"),
        ({"experiments": ("cartpole_ppo",)}, "must be a tuple of Experiment objects, such as"),
        ({"selection": selection.PopulationBased((Range("depth", 1, 2),))}, "'depth'"),
        ({"selection": selection.PopulationBased((Range("discount", 0.5, 5),))}, "discount must"),
        (
            {"selection": selection.Generational(2), "experiments": MIXED},
            "need one agent, not DQN, PPO",
        ),
        (
            {"selection": selection.Generational(2), "experiments": TWO_RATES},
            "2 pods of a group are fused, so they need one recipe, not 2",
        ),
        (
            {"experiments": (recipes.find("cartpole_ppo"), recipes.find("catch_a2c"))},
            "need the same one, not cartpole, catch",
        ),
        (
            {"experiments": (SWEEP,), "selection": selection.PopulationBased()},
            "the sweep 'cartpole_ppo' chooses hyperparameters by itself",
        ),
        ({"experiments": (GENERATIONS_OF_200,), "round_frames": 10_000}, "never reached"),
        # What only a later round could not do.
        ({"rounds": 10**6, "round_frames": 10**6}, "an environment makes at most"),
        (
            {"experiments": (DECAYING,), "rounds": 10**5, "round_frames": 10**5},
            "learning_rate would change over 10,035,200,000 frames",
        ),
        ({"experiments": MIXED * 3}, "pods is 4, but there are 6 recipes, and pod i"),
    ],
)
def test_what_cannot_be_meant_is_refused(changes, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        orchestrator.run_tournament(dataclasses.replace(TOURNAMENT, **changes), tmp_path)
    assert not (tmp_path / "leaderboard.jsonl").exists()


def test_arguments_that_do_not_fit_are_refused_in_a_sentence(tmp_path):
    with pytest.raises(ConfigError, match="attach cannot be 'mirror:x': write"):
        orchestrator.run_tournament(TOURNAMENT, tmp_path, attach="mirror:x")
    with pytest.raises(ConfigError, match="tournament cannot be 'cartpole_ppo'"):
        orchestrator.run_tournament("cartpole_ppo", tmp_path)


@pytest.mark.parametrize("remains", [b"", b'{"event": "head'], ids=["empty", "torn"])
def test_a_tournament_that_was_killed_before_its_first_line_may_begin(
    remains, tmp_path, monkeypatch
):
    def begin(tournament, directory, *_):
        with Leaderboard(directory, tournament.header()):
            return 0

    monkeypatch.setattr(command_line, "run_tournament", begin)
    (tmp_path / "leaderboard.jsonl").write_bytes(remains)
    arguments = ["cartpole_ppo", "--run-dir", str(tmp_path)]
    assert command_line.tournament(arguments) == 0
    assert len(read_events(tmp_path)) == 1
    with pytest.raises(ConfigError, match="already holds a tournament: resume it"):
        command_line.tournament(arguments)


def test_the_command_on_the_best_pod_names_its_own_recipe(tmp_path, monkeypatch, capsys):
    names, best = ("mine:a2c", "mine:ppo"), tmp_path / "pods" / "p0r0"
    monkeypatch.setattr(command_line, "run_tournament", lambda *_: 130)
    monkeypatch.setattr(command_line, "best_run", lambda _: best)
    monkeypatch.setattr(command_line, "recipe_name", {best: "ppo"}.get)
    assert command_line.run_on_terminal(TOURNAMENT, tmp_path, names) == 130
    _, of_best, _, resume = capsys.readouterr().out.splitlines()
    assert of_best.endswith(f"podracer eval {best} --recipe mine:ppo")
    assert resume.endswith(f"podracer resume {tmp_path} --recipe mine:a2c,mine:ppo")


@pytest.mark.figure(16)
@pytest.mark.parametrize(
    "changes",
    [
        {"rounds": "many"}, {"rounds": None}, {"experiments": {}}, {"experiments": [[]]},
        {"selection": []}, {"kind": []}, {"kind": "PPO"}, {"experiments": [{"recipe": "x"}]},
        {"experiments": [{"recipe": "x", "kind": []}]}, {"selection": {"kind": "Popen"}},
    ],
)  # fmt: skip
def test_a_hostile_header_is_refused_in_a_sentence(changes, tmp_path):
    header = TOURNAMENT.header()
    header = dataclasses.replace(header, tournament={**header.tournament, **changes})
    with Leaderboard(tmp_path, header):
        pass
    with pytest.raises(ConfigError):
        read_tournament(tmp_path)


@pytest.mark.figure(16)
def test_links_in_a_tournament_are_not_followed(tmp_path):
    outside, directory = tmp_path / "outside", tmp_path / "t"
    outside.mkdir()
    (outside / "log.txt").write_text("mine")
    for link in (directory / "pods", directory / "pods" / "p0r0"):
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(outside)
        with pytest.raises(ConfigError, match="must be a directory of the run itself"):
            play(directory)
        link.unlink()
    log = directory / "log.txt"
    log.symlink_to(outside / "log.txt")
    with open_log(log) as file:
        file.write(b"a pod's output")
    assert (outside / "log.txt").read_text() == "mine"
    log.unlink()
    os.mkfifo(log)  # nobody reads it, so that its writer would wait
    with open_log(log) as file:
        file.write(b"a pod's output")
    assert log.read_bytes() == b"a pod's output"
    assert [path.name for path in outside.iterdir()] == ["log.txt"]
