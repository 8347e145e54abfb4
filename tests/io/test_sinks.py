"""The record survives kills and faults; no sink can hurt or delay a run."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import logging
import math
import os
import re
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from podracer import recipes
from podracer.errors import PodracerError
from podracer.io import jsonl
from podracer.io.jsonl import JsonlSink
from podracer.io.sinks import Sinks, TensorBoardSink, read_metrics
from podracer.reports.standings import LiveStandings
from podracer.run.console import Console, Terminal, line
from podracer.run.result import RunInfo
from podracer.run.sweep import MAX_PODS, readable_records
from podracer.tournament.events import Header, state_after


def record(updates, **metrics):
    return {"updates": updates, "frames": 100 * updates, "seconds": 0.5 * updates, **metrics}


def write_metrics(path, updates):
    sink = JsonlSink(path)
    for update in updates:
        sink.write(record(update, loss=1 / update))
    sink.close()


class Recorder:
    """A sink in memory that fails or waits when told to."""

    def __init__(self, fail_at=None, gate=None):
        self.seen, self.closed = [], False
        self.fail_at, self.gate, self.entered = fail_at, gate, threading.Event()

    def write(self, record):
        self.entered.set()
        if self.gate is not None:
            self.gate.wait(60)
        if record["updates"] == self.fail_at:
            raise OSError("no space left on device")
        self.seen.append(record["updates"])

    def close(self):
        self.closed = True


# --- the record -----------------------------------------------------------------------------------


def test_jsonl_writes_plain_json_and_null_for_what_is_not_finite(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.write(record(1, loss=np.float32(0.5), entropy=math.nan, value_loss=-math.inf, eval=None))
    assert json.loads(path.read_text(), parse_constant=pytest.fail) == {  # flushed, not closed
        "updates": 1, "frames": 100, "seconds": 0.5,
        "loss": 0.5, "entropy": None, "value_loss": None, "eval": None,
    }  # fmt: skip
    sink.close()


def test_what_a_checkpoint_seals_is_durable(tmp_path, monkeypatch, caplog):
    path, synced = tmp_path / "metrics.jsonl", []

    def sync(descriptor):
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        synced.append((name, path.read_bytes()))

    monkeypatch.setattr(os, "fsync", sync)
    sink = JsonlSink(path)
    assert synced == [(str(tmp_path), b"")]  # the name of the file
    sink.write(record(1))
    sink.write(record(2))
    assert sink.seal()["size"] == path.stat().st_size
    assert synced[1:] == [(str(path), path.read_bytes())]

    def refuse(descriptor):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", refuse)
    sealed = sink.seal()  # a fault of the records never ends a run
    assert f"{path} may not survive a power cut: Input/output error" in caplog.text
    sink.close()  # as after a record that could not be written
    caplog.clear()
    assert sink.seal() == sealed
    assert caplog.text == ""


def test_jsonl_refuses_a_step_back(tmp_path):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.write(record(2))
    for updates in (2, 1):
        with pytest.raises(ValueError, match="came after"):
            sink.write(record(updates))
    sink.write(record(3))
    sink.close()
    assert [r["updates"] for r in read_metrics(path)] == [2, 3]


def test_a_new_run_never_overwrites_a_record(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_metrics(path, [1, 2])
    with pytest.raises(FileExistsError):
        JsonlSink(path)
    assert len(read_metrics(path)) == 2


def test_any_torn_last_line_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_metrics(path, range(1, 5))
    whole, records = path.read_bytes(), read_metrics(path)
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        # A line that lacks only its end is complete.
        complete = (whole[:cut] + b"\n").count(b"}\n")
        assert read_metrics(path) == records[:complete]


@pytest.mark.parametrize("resume_updates", [0, 2, 3, 9])
@pytest.mark.parametrize("torn", [b"", b'{"updates": 6, "lo', b"\0\0\0"])
def test_resume_keeps_what_the_checkpoint_knows_and_goes_on(tmp_path, resume_updates, torn):
    path = tmp_path / "metrics.jsonl"
    write_metrics(path, range(1, 6))
    before = read_metrics(path)
    path.write_bytes(path.read_bytes() + torn)
    sink = JsonlSink(path, resume_updates=resume_updates)
    kept = [r for r in before if r["updates"] <= resume_updates]
    assert read_metrics(path) == kept
    sink.write(record(10))
    sink.close()
    assert read_metrics(path) == [*kept, record(10)]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_resume_keeps_a_last_record_that_lacks_only_its_end(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write_metrics(path, [1, 2])
    path.write_bytes(path.read_bytes()[:-1])
    sink = JsonlSink(path, resume_updates=2)
    sink.write(record(3))
    sink.close()
    assert [r["updates"] for r in read_metrics(path)] == [1, 2, 3]


def test_resume_repairs_duplicates_and_damage(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"updates": 1}\n{"updates": 2}\nnot json\n{"updates": 2}\n{"updates": 3}\n[4]\n'
    )
    JsonlSink(path, resume_updates=9).close()
    assert [r["updates"] for r in read_metrics(path)] == [1, 2, 3]


@pytest.mark.figure(24)
@pytest.mark.parametrize("damage", ["none", "later", "flip", "cut", "garbage", "missing"])
def test_records_that_are_not_those_of_the_checkpoint_are_said_and_kept(tmp_path, caplog, damage):
    path, link = tmp_path / "metrics.jsonl", tmp_path / "link"
    sink = JsonlSink(path)
    for updates in (1, 2):
        sink.write(record(updates))
    sealed, data = sink.seal(), path.read_bytes()
    if damage == "later":
        sink.write(record(3))
    sink.close()
    damaged = {
        "flip": data.replace(b"2", b"1", 1), "cut": data[:-9], "garbage": b"\0\n" * 9,
        "missing": b"",
    }.get(damage, path.read_bytes())  # fmt: skip
    link.write_bytes(damaged)
    path.unlink()
    if damage != "missing":
        path.symlink_to(link)
    sink = JsonlSink(path, resume_updates=2, sealed=sealed)
    is_whole = damage in ("none", "later")
    assert not path.is_symlink()
    assert (path.read_bytes() == data) == is_whole
    assert link.read_bytes() == damaged
    assert caplog.text.count("is not as it was at update 2") == (not is_whole)
    if not is_whole:
        assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == damaged
    sink.write(record(9))
    sink.close()
    again = JsonlSink(path, resume_updates=9, sealed=sink.seal())
    assert caplog.text.count("is not as it was") == (not is_whole)
    again.close()


def test_however_many_records_there_are_a_run_goes_on(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    for updates in (1, 2, 3):
        sink.write(record(updates))
    sealed, kept = sink.seal(), path.read_bytes()
    sink.write(record(4))
    sink.close()
    monkeypatch.setattr(jsonl, "LARGE_FILE", len(kept) - 1)
    sink = JsonlSink(path, resume_updates=3, sealed=sealed)
    assert (path.read_bytes(), sink.seal()) == (kept, sealed)
    with pytest.raises(ValueError, match="came after that of 3"):
        sink.write(record(3))
    sink.close()
    assert [r["updates"] for r in readable_records(tmp_path)] == [1, 2, 3]


def test_a_record_of_the_largest_population_is_read(tmp_path):
    path = tmp_path / "pods.jsonl"
    metrics = dict.fromkeys(map(str, range(16)), np.full(MAX_PODS, np.float32(1 / 3)))
    sink = JsonlSink(path)
    sink.write(record(1, **metrics))
    sink.close()
    assert len(read_metrics(path)[0]["15"]) == MAX_PODS


def test_damage_within_the_record_is_refused(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"updates": 1}\n{"upda\n{"updates": 3}\n')
    with pytest.raises(PodracerError, match="line 2 is not a record"):
        read_metrics(path)


# --- TensorBoard ----------------------------------------------------------------------------------


def scalars(directory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory)).Reload()
    return {
        tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]
    }


def test_tensorboard_reads_what_was_written_and_forgets_what_a_resume_undid(tmp_path):
    sink = TensorBoardSink(tmp_path / "tb")
    for updates in (1, 2, 3):
        sink.write(record(updates, loss=0.5, episode_return=None, time_step=1.0, lag_max=1))
    sink.close()
    sink = TensorBoardSink(tmp_path / "tb", resume_updates=1)
    sink.write(record(2, loss=0.25, evaluation_return=7.0))
    sink.close()
    assert scalars(tmp_path / "tb") == {
        "learn/loss": [(1, 0.5), (2, 0.25)],
        "run/frames": [(1, 100.0), (2, 200.0)],
        "run/seconds": [(1, 0.5), (2, 1.0)],
        "time/step": [(1, 1.0)],
        "sebulba/lag_max": [(1, 1.0)],
        "evaluation/return": [(2, 7.0)],
    }


# --- all sinks together ---------------------------------------------------------------------------


@pytest.fixture
def warnings_logged(caplog):
    caplog.set_level(logging.WARNING, logger="podracer")
    return lambda: [message.getMessage() for message in caplog.records]


def test_all_sinks_get_all_records_and_are_closed():
    gate = threading.Event()
    sinks = [Recorder(), Recorder(), Recorder(gate=gate)]
    with Sinks(sinks, close_seconds=60.0) as together:
        for updates in range(50):
            together.write(record(updates))
        threading.Timer(0.1, gate.set).start()  # the last one ends later than the run
    assert all(sink.seen == list(range(50)) and sink.closed for sink in sinks)


@pytest.mark.figure(24)
@pytest.mark.parametrize("broken", [0, 1])
def test_a_sink_that_raises_is_dropped_with_one_warning(broken, warnings_logged):
    sinks = [Recorder(), Recorder(), Recorder()]
    sinks[broken].fail_at = 2
    with Sinks(sinks) as together:
        for updates in range(6):
            together.write(record(updates))
    assert sinks[broken].seen == [0, 1]
    assert all(sink.seen == list(range(6)) for sink in sinks if sink is not sinks[broken])
    (warning,) = warnings_logged()
    assert "Recorder failed" in warning
    assert "no space left" in warning


def test_a_sink_that_has_nothing_to_close_needs_no_close(warnings_logged):
    written = []
    sink = SimpleNamespace(write=written.append)
    with Sinks([Recorder(), sink]) as sinks:
        sinks.write(record(1))
    assert written == [record(1)]
    assert not warnings_logged()


@pytest.mark.figure(24)
def test_a_slow_sink_drops_its_oldest_records_and_delays_nobody(warnings_logged):
    gate = threading.Event()
    slow, record_sink = Recorder(gate=gate), Recorder()
    with Sinks([record_sink, slow], queue_size=3) as together:
        together.write(record(0))
        assert slow.entered.wait(60)
        for updates in range(1, 10):
            together.write(record(updates))  # would hang here if it waited
        assert record_sink.seen == list(range(10))
        gate.set()
    assert slow.seen == [0, 7, 8, 9]
    (warning,) = warnings_logged()
    assert "too slow for 6 records" in warning


@pytest.mark.figure(24)
def test_a_sink_that_never_returns_is_left_behind(warnings_logged):
    gate = threading.Event()
    stuck, other = Recorder(gate=gate), Recorder()
    late = threading.Timer(10, gate.set)
    with Sinks([Recorder(), stuck, other], close_seconds=0.1) as together:
        together.write(record(1))
        assert stuck.entered.wait(60)
        late.start()
    assert not gate.is_set()  # it was not waited for
    late.cancel()
    (warning,) = warnings_logged()
    assert "did not finish in time" in warning
    assert other.closed
    gate.set()


def raises(error):
    def write(_):
        raise error

    return write


WAYS_TO_FAIL = {
    "full disk": raises(OSError(errno.ENOSPC, "No space left on device")),
    "broken pipe": raises(BrokenPipeError(errno.EPIPE, "Broken pipe")),
    "bug": raises(KeyError("loss")),
    "out of memory": raises(MemoryError()),
    "too deep": raises(RecursionError()),
    "exits": raises(SystemExit(1)),
    "empties the record": dict.clear,
    "slow": lambda _: threading.Event().wait(0.005),
    "hangs": lambda _: threading.Event().wait(2),
}


@pytest.mark.figure(24)
def test_every_way_to_fail_leaves_the_caller_and_the_other_sinks_alone(cases):
    microseconds = []
    for way in cases(list(WAYS_TO_FAIL)):
        first, other, broken = Recorder(), Recorder(), Recorder()
        broken.write = WAYS_TO_FAIL[way]
        with Sinks([first, broken, other], close_seconds=0.5) as together:
            began = time.thread_time()
            for updates in range(500):
                together.write(record(updates))
            microseconds.append((time.thread_time() - began) / 500 * 1e6)
        assert first.seen == list(range(500)), way
        assert other.seen == list(range(500)), way
    cases.note(f"at most {max(microseconds):.0f} us of the run's time for a record")


def test_sinks_close_when_the_run_fails():
    sinks = [Recorder(), Recorder()]
    together = Sinks(sinks)
    together.write(record(1))
    with pytest.raises(KeyboardInterrupt), together:
        raise KeyboardInterrupt
    assert all(sink.seen == [1] and sink.closed for sink in sinks)


# --- the terminal ---------------------------------------------------------------------------------


def info(frames, **settings):
    experiment = dataclasses.replace(recipes.find("catch"), frames=frames, **settings)
    return RunInfo(experiment, Path("runs/run"), "8 x cpu", 2048)


FAULTS = {
    "environment_faults": 3, "environment_faults_died": 2, "environment_faults_hung": 1,
}  # fmt: skip


@pytest.mark.figure(24)
def test_a_broken_pipe_costs_only_the_console(warnings_logged):
    reader, writer = os.pipe()
    os.close(reader)
    kept = Recorder()
    file = os.fdopen(writer, "w")
    console = Console(file=file)
    console.open(info(10))
    with Sinks([kept, console]) as together:
        for updates in (1, 2, 3):
            together.write(record(updates))
    assert kept.seen == [1, 2, 3]
    assert len(warnings_logged()) == 1
    with pytest.raises(BrokenPipeError):
        file.close()


def test_a_line_counts_the_distinct_episodes_of_one_learner_alone():
    record = {"updates": 1, "evaluation_return": 1.0, "evaluation_distinct_episodes": 12_345.0}
    assert line(record, 10).endswith("distinct 12,345")
    assert "distinct" not in line(record | {"pods_failed": 0.0}, 10)  # there it is a mean


def test_a_terminal_that_nobody_reads_ends_no_process():
    reader, writer = os.pipe()
    os.close(reader)
    file = os.fdopen(writer, "w")
    state = state_after([Header({"rounds": 1}, 0, 1, 1, "e", 1)])
    with pytest.raises(BrokenPipeError, match="nobody reads"):  # which is code 0 of a command
        LiveStandings(1, Path("cup"), whole=True, file=file).show(state)
    terminal = Terminal(file=file)
    terminal.print("finished")
    assert terminal.quiet
    with pytest.raises(BrokenPipeError):
        file.close()


def drain(master):
    """All that was written to a terminal whose other end is closed."""
    with os.fdopen(master, "rb", buffering=0) as file, contextlib.suppress(OSError):
        while data := file.read(1 << 16):
            yield data


@pytest.mark.parametrize("waits", [{}, {"actor_idle": 0.12, "learner_idle": 0.03}])
def test_the_panel_shows_the_run_and_gives_the_terminal_back(monkeypatch, waits):
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "90")
    master, slave = os.openpty()
    stdout = sys.stdout
    with os.fdopen(slave, "w", encoding="utf-8") as terminal:
        console = Console(file=terminal)
        console.open(info(50_000))
        together = Sinks([Recorder(), console])
        assert sys.stdout is not stdout  # what others print goes above the panel
        for updates in (100, 200):
            metrics = {"episode_return": updates / 1000, "policy_loss": 0.125, **waits}
            if waits:
                metrics |= {"lag_mean": 1.0, "lag_max": 1, "queue_occupancy": 0.5, **FAULTS}
            together.write(record(updates, evaluation_return=0.75, **metrics))
        with pytest.raises(ZeroDivisionError), together:
            raise ZeroDivisionError
        assert sys.stdout is stdout
    shown = b"".join(drain(master)).decode()
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor is back
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
    for part in (
        "run",
        "catch  ·  8 x cpu",
        "40 %",
        "20.0k/50.0k",
        "0.750",
        "ended",
        "policy loss",
    ):
        assert part in text
    for fact in (r"Actors wait +12 %", r"Learner waits +3 %", r"Policy lag +1 mean, 1 max",
                 r"Queue +50 %", r"Environment faults +3 \(died 2, hung 1\)"):  # fmt: skip
        assert bool(re.search(fact, text)) == bool(waits)
