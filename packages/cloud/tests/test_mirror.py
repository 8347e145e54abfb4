"""Copies of runs in a store: whole or refused, whatever stores, machines and clocks do."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import socket
import threading
import time
import types
from collections import Counter, deque
from pathlib import Path

import pytest
from child import wait_until
from obstore.exceptions import AlreadyExistsError, GenericError
from stores import (
    MachineLost,
    Run,
    copied,
    files_of,
    hurry,
    moments,
    pause_machine,
    state,
    stored,
    use,
)

from podracer.cli.arguments import parse
from podracer.cli.runs import ReportOptions, report
from podracer.errors import CheckpointError, ConfigError, StorageError
from podracer.io.addresses import local_run
from podracer.io.checkpoint import fingerprint, stored_fingerprint
from podracer.io.seal import CONFIG, encode_sealed
from podracer_cloud import mirror
from podracer_cloud.addresses import restore
from podracer_cloud.lease import Lease
from podracer_cloud.mirror import Mirror
from podracer_cloud.runs import RunCopy
from podracer_cloud.store import open_store

TIMEOUT = TimeoutError("operation timed out")


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"file://{tmp_path / 'store'}"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def ignore(_: str) -> None:
    """Take a report."""


def fingerprints(*steps):
    return {step: fingerprint(state(step)) for step in steps}


# --- the copy -------------------------------------------------------------------------------------


def test_the_store_has_the_files_of_the_run_and_nothing_else(run, address, tmp_path):
    with Run(run, address) as it:
        it.save(1, 2, 3, 4, best=1)
        wait_until(lambda: "mirror_lag" in it.mirror.figures())
    assert copied(tmp_path / "store") == files_of(run)
    kept = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert [int(name) for name in kept] == [1, 3, 4]
    assert it.mirror.figures() == {"mirror_lag": 0.0, "mirror_faults": 0}
    assert "update 4, copied within" in it.mirror.summary()


def test_nothing_is_written_twice_or_deleted_before_an_index_leaves_it_out(
    run, address, monkeypatch
):
    store = use(monkeypatch, address)
    with Run(run, address) as it:
        it.save(1)
        wait_until(lambda: not it.mirror.figures()["mirror_lag"])
        it.save(2, 3)
    puts = [name for name in store.names("put") if not name.startswith("leases/")]
    assert len(puts) == len(set(puts))
    log = [(operation, name) for operation, name in store.log if operation in ("put", "delete")]
    first = log.index(("delete", next(n for n in store.names("delete") if "000000000001/" in n)))
    last = log.index(("put", [name for name in puts if "000000000002/" in name][-1]))
    indexes = [n for n, (operation, name) in enumerate(log) if name.startswith("index/")]
    assert any(last < number < first for number in indexes)
    step = [name for name in puts if "000000000001/" in name]
    assert len([name for name in store.names("delete") if name in step]) == len(step)
    assert "leases" not in {name.partition("/")[0] for name in store.names("delete")}


def test_a_run_comes_back_whole(run, address, tmp_path):
    with Run(run, address) as it:
        it.save(1, 2, 3)
    shutil.rmtree(run)
    other = tmp_path / "other"
    restore(address, other)
    assert files_of(other) == copied(tmp_path / "store")
    for step, digest in fingerprints(2, 3).items():
        assert stored_fingerprint(other, step) == (step, digest)
    with Run(other, address) as it:
        it.save(4)
    assert copied(tmp_path / "store") == files_of(other)


def test_a_directory_that_is_behind_gets_what_is_newer(run, address, tmp_path):
    with Run(run, address) as it:
        it.save(1)
    shutil.copytree(run, tmp_path / "old")
    with Run(run, address) as it:
        it.save(2, 3)
    with pytest.raises(ConfigError, match=r"is newer than .*old: podracer resume file://.*old"):
        Run(tmp_path / "old", address).__enter__()
    restore(address, tmp_path / "old")
    assert stored_fingerprint(tmp_path / "old") == (3, fingerprint(state(3)))


def test_what_is_no_place_for_the_run_is_refused(run, address, tmp_path):
    with pytest.raises(ConfigError, match=r"is no store|holds no run"):
        restore(address, run)
    assert not (tmp_path / "store").exists()
    with Run(run, address) as it:
        it.save(1)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").touch()
    with pytest.raises(ConfigError, match="holds something else: name a new directory"):
        restore(address, tmp_path / "full")
    with Run(tmp_path / "b", None, identity="b") as it:
        it.save(1)
    with pytest.raises(ConfigError, match="holds something else"):
        restore(address, tmp_path / "b")
    with pytest.raises(ConfigError, match="holds another run: choose another address"):
        Run(tmp_path / "b", address).__enter__()
    restore(address, run)  # its own directory, which is as new
    assert stored_fingerprint(run) == (1, fingerprint(state(1)))


# --- faults of stores -----------------------------------------------------------------------------


def test_the_run_of_a_directory_goes_on_where_its_store_has_nothing(
    run, address, tmp_path, monkeypatch
):
    """As after a kill before the first copy, and where the store is gone."""
    reports = []
    with Run(run, address) as it:
        it.save(1)
    shutil.rmtree(tmp_path / "store")
    restore(address, run, report=reports.append)
    (tmp_path / "store").mkdir()
    restore(address, run, report=reports.append)
    use(monkeypatch, address, unavailable)
    restore(address, run, report=reports.append)
    assert "there is no directory" in reports[0]
    assert "holds no run" in reports[1]
    assert "503 Slow Down" in reports[2]
    assert all("goes on." in text for text in reports)
    with pytest.raises(StorageError, match="503 Slow Down"):
        restore(address, tmp_path / "other")


def test_a_store_that_was_emptied_has_a_copy_again_after_a_resume(
    run, address, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(mirror, "CLOSE_SECONDS", 0.5)
    with Run(run, address) as it:
        it.save(1)
        wait_until(lambda: it.mirror.figures()["mirror_lag"] == 0.0)
        shutil.rmtree(tmp_path / "store")
        it.save(2)
        wait_until(lambda: caplog.messages)
    assert "only a resume of the run copies there again" in caplog.messages[0]
    with Run(run, address):
        pass
    assert copied(tmp_path / "store") == files_of(run)


@pytest.mark.parametrize(("choice", "steps"), [("newest", [4]), ("best", [1, 4]), (3, [3])])
def test_a_copy_to_read_has_what_is_read(choice, steps, run, address):
    with Run(run, address) as it:
        it.save(1, 2, 3, 4, best=1)
    copy = local_run(address, choice)
    assert [int(path.name) for path in sorted((copy / "checkpoints").iterdir())] == steps
    step = {"newest": 4, "best": 1}.get(choice, choice)
    assert stored_fingerprint(copy, choice) == (step, fingerprint(state(step)))
    assert not list((local_run(address) / "checkpoints").iterdir())
    assert local_run(address, choice) == copy
    with pytest.raises(CheckpointError, match="has no checkpoint of update 7 that is whole"):
        local_run(address, 7)


def test_a_program_that_reads_a_run_again_sees_what_was_saved_since(run, address):
    for step in (1, 2):
        with Run(run, address) as it:
            it.save(step)
        assert stored_fingerprint(local_run(address, "newest"))[0] == step


def test_a_report_that_is_written_again_reads_the_address_again(
    run, address, tmp_path, monkeypatch
):
    copies = []

    def write(runs, file, every):
        copies.append(local_run(runs[0]))
        return file

    def save_or_stop(seconds):
        if len(copies) == 2:
            raise KeyboardInterrupt
        with Run(run, address) as it:
            it.save(2)

    monkeypatch.setattr("podracer.reports.run.write_report", write)
    monkeypatch.setattr("podracer.cli.runs.time", types.SimpleNamespace(sleep=save_or_stop))
    monkeypatch.chdir(tmp_path)
    with Run(run, address) as it:
        it.save(1)
    assert report(parse(ReportOptions, "report", [address, "--every", "1"])) == 0
    assert [copy.exists() for copy in copies] == [False, True]


def normal(operation, name, call):
    return call()


def unavailable(operation, name, call):
    raise GenericError("503 Slow Down\n\nDebug source: ...")


def refuse_write(operation, name, call):
    if operation in ("put", "delete"):
        raise GenericError("Read-only file system")
    return call()


def timeout_before(operation, name, call):
    raise TIMEOUT


def timeout_after(operation, name, call):
    call()
    raise TIMEOUT


def partial(store):
    def fault(operation, name, call):
        if operation != "put" or "checkpoints" not in name:
            return call()
        store.real.put(name, b"half")
        return {"e_tag": "x", "version": None}

    return fault


def stale(operation, name, call):
    return [] if operation == "list" else call()


FAULTS = {
    "503": lambda store: unavailable,
    "timeout": lambda store: timeout_before,
    "lost answer": lambda store: timeout_after,
    "partial": partial,
    "stale list": lambda store: stale,
}


@pytest.mark.figure(26)
@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_costs_the_copy_and_is_made_good(
    kind, run, address, tmp_path, monkeypatch, caplog, cases
):
    """Each operation of a copy fails once, then all of them for a while."""
    hurry(monkeypatch, 30.0)
    store = use(monkeypatch, address)
    with Run(run, address) as it:
        it.save(1)
        wait_until(lambda: not it.mirror.figures()["mirror_lag"])
        broken = FAULTS[kind](store)
        for number in cases(range(2, 12)):
            left = [number]

            def once(operation, name, call, left=left):
                left[0] -= 1
                return (broken if left[0] == 0 else normal)(operation, name, call)

            store.fault = once
            it.save(number)
            wait_until(lambda: not it.mirror.figures()["mirror_lag"])
            store.fault = normal
        before = it.mirror.figures()["mirror_faults"]
        store.fault = broken
        it.save(12, 13)
        wait_until(lambda: it.mirror.figures()["mirror_faults"] >= before + 3)
        assert it.mirror.figures()["mirror_lag"] > 0
        store.fault = normal
    said = [x for x in caplog.messages if "cannot be copied" in x]
    assert 0 < len(said) < it.mirror.figures()["mirror_faults"]
    assert "Debug source" not in caplog.text
    assert f"{it.mirror.figures()['mirror_faults']} faults" in it.mirror.summary()
    assert copied(tmp_path / "store") == files_of(run)


def test_a_store_that_is_gone_costs_nothing_but_the_copy(
    run, address, tmp_path, monkeypatch, caplog
):
    hurry(monkeypatch, 30.0)
    monkeypatch.setattr(mirror, "CLOSE_SECONDS", 0.3)
    store = use(monkeypatch, address)
    with Run(run, address) as it:
        it.save(1)
        wait_until(lambda: not it.mirror.figures()["mirror_lag"])
        store.fault = unavailable
        it.save(2)
        start = time.monotonic()
    assert time.monotonic() - start < 10
    assert sum("cannot be copied" in x for x in caplog.messages) == 1
    assert "is behind: it has update 1 (503 Slow Down); podracer resume" in caplog.text
    assert "update 1, behind the run" in it.mirror.summary()
    assert stored_fingerprint(run) == (2, fingerprint(state(2)))
    with Run(run, address) as it:  # still gone: a resumed run goes on
        it.save(3)
    assert "is behind: nothing was copied (503 Slow Down)" in caplog.text
    assert "nothing was copied, behind the run" in it.mirror.summary()
    with pytest.raises(StorageError, match="cannot be read: 503 Slow Down"):
        restore(address, tmp_path / "b")
    store.fault = refuse_write
    with pytest.raises(StorageError, match="cannot be written: Read-only file system"):
        restore(address, tmp_path / "b")
    store.fault = lambda operation, name, call: (
        call() if name.startswith("leases") else refuse_write(operation, name, call)
    )
    with Run(run, address):
        pass
    assert "is behind: it has update 1 (Read-only file system)" in caplog.messages[-1]
    store.fault = normal
    monkeypatch.setattr(mirror, "CLOSE_SECONDS", 30.0)
    with Run(run, address):
        pass
    assert copied(tmp_path / "store") == files_of(run)


def test_what_could_not_be_seen_at_the_start_is_looked_at_before_anything_is_written(
    run, address, tmp_path, monkeypatch, caplog
):
    """The store fails at each operation of a claim, and holds another run."""
    with Run(tmp_path / "b", None, identity="b") as it:
        it.save(1)
    with Run(run, address) as it:
        it.save(1)
    before = copied(tmp_path / "store")
    for number in range(1, 8):
        store = use(monkeypatch, address)
        left = [number]

        def fault(operation, name, call, left=left):
            left[0] -= 1
            return unavailable(operation, name, call) if left[0] == 0 else call()

        store.fault = fault
        outcome = ""
        try:
            with Run(tmp_path / "b", address) as it:
                it.save(1 + number)
        except ConfigError as error:
            outcome = str(error)
        assert "holds another run" in outcome + caplog.text
        assert copied(tmp_path / "store") == before
        caplog.clear()


@pytest.mark.figure(26)
@pytest.mark.parametrize("stride", [15, pytest.param(1, marks=pytest.mark.slow)])
def test_a_machine_that_is_lost_at_any_operation_leaves_a_copy_that_comes_back(
    stride, run, address, tmp_path, monkeypatch, cases
):
    """The newest step whose manifest was written comes back; other remains are removed later."""
    hurry(monkeypatch, 0.05)
    monkeypatch.setattr(Lease, "BEAT_SECONDS", 60.0)
    with Run(run, None) as it:
        it.save(1)
    with Run(run, address):
        pass
    with Run(run, None) as it:
        it.save(2, 3, 4)
    shutil.copytree(tmp_path / "store", tmp_path / "old")
    store = use(monkeypatch, address)
    for number in itertools.count(1, stride):
        shutil.rmtree(tmp_path / "store")
        shutil.copytree(tmp_path / "old", tmp_path / "store")
        left = [number]

        def fault(operation, name, call, left=left):
            left[0] -= 1
            if left[0] <= 0:
                raise MachineLost
            return call()

        store.fault = fault
        copier = Mirror(run, address, RunCopy, new=False)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(threading, "excepthook", lambda _: None)
            try:
                copier.__enter__()
                copier.sealed()
                copier.__exit__()
            except MachineLost:
                pass
        is_done = left[0] > 0
        store.fault = normal
        other = tmp_path / f"other{number}"
        restore(address, other, report=ignore)
        step, digest = stored_fingerprint(other)
        assert step in (1, 3, 4)
        assert digest == fingerprint(state(step))
        assert len((other / "metrics.jsonl").read_bytes().splitlines()) >= step
        cases.add(1, 1)
        if number % 5 == 1:
            with Run(other, address) as it:
                it.save(9)
            assert copied(tmp_path / "store") == files_of(other)
        shutil.rmtree(other)
        if is_done:
            break
    assert number > 30


# --- damage of what is stored ---------------------------------------------------------------------


@pytest.mark.figure(26)
@pytest.mark.parametrize("num_trials", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_damage_in_the_store_is_found(num_trials, run, address, tmp_path, cases):
    """Objects of the newest step are changed, cut off, emptied or gone: the step before is used."""
    with Run(run, address) as it:
        it.save(1, 2)
    digest, rng = fingerprint(state(1)), random.Random(0)
    newest = stored(tmp_path / "store", f"checkpoints/{2:012d}")
    files = sorted(path for path in newest.rglob("*") if path.is_file())
    for trial in cases(range(num_trials)):
        path = rng.choice(files)
        content = path.read_bytes()
        bit = rng.randrange(8 * len(content))
        flipped = bytearray(content)
        flipped[bit // 8] ^= 1 << bit % 8
        cut = content[: rng.randrange(len(content))]
        damage = [bytes(flipped), cut, bytes(len(content)), None][trial % 4]
        path.unlink() if damage is None else path.write_bytes(damage)
        other = tmp_path / str(trial)
        restore(address, other, report=ignore)
        assert not (other / "checkpoints" / newest.name).exists()
        assert stored_fingerprint(other) == (1, digest)
        path.write_bytes(content)
        shutil.rmtree(other)


def test_a_store_without_a_whole_checkpoint_is_refused(run, address, tmp_path):
    with Run(run, address) as it:
        it.save(1)
    shutil.rmtree(stored(tmp_path / "store", f"checkpoints/{1:012d}"))
    with pytest.raises(CheckpointError, match="has no checkpoint that is whole"):
        restore(address, tmp_path / "other", report=ignore)
    assert not (tmp_path / "other" / CONFIG).exists()


@pytest.mark.figure(16)
@pytest.mark.parametrize(
    "name", ["../../escaped", "/tmp/escaped", "a/../../b", "manifest.json", ""]
)
def test_a_manifest_leads_nowhere_else(name, run, address, tmp_path):
    with Run(run, address) as it:
        it.save(1)
    manifest = stored(tmp_path / "store", f"checkpoints/{1:012d}") / "manifest.json"
    body = json.loads(manifest.read_bytes())
    del body["sha256"]
    body["files"][name] = {"size": 4, "sha256": "0" * 64}
    manifest.write_bytes(encode_sealed(body))
    (tmp_path / "escaped").write_bytes(b"evil")
    before = copied(tmp_path / "store")
    reports = []
    with pytest.raises(CheckpointError, match="no checkpoint that is whole"):
        restore(address, tmp_path / "deep" / "other", report=reports.append)
    assert any("cannot be the name of a file of a checkpoint" in text for text in reports)
    assert copied(tmp_path / "store") == before
    assert not [path for path in (tmp_path / "deep").rglob("*") if path.name in ("escaped", "b")]


def test_a_copy_that_ends_while_a_record_asks_for_its_lag_is_not_behind(run, address):
    class Taken(deque[float]):
        """The worker has taken the only change since it was seen."""

        def __bool__(self):
            return True

    copier = Run(run, address).mirror
    copier._changes = Taken()
    assert copier.figures() == {"mirror_lag": 0.0, "mirror_faults": 0}


# --- leases ---------------------------------------------------------------------------------------


def test_two_machines_never_write_one_run(run, address, tmp_path, monkeypatch):
    hurry(monkeypatch, 1.0)
    with Run(run, address) as it:
        it.save(1)
        reports = []
        host = socket.gethostname()
        with pytest.raises(
            ConfigError, match=rf"is written by '{host}', whose heartbeat is 0 s old"
        ):
            restore(address, tmp_path / "other", report=reports.append)
        assert any("s ago: if it does not go on, this run takes over in" in x for x in reports)
        assert not (tmp_path / "other" / CONFIG).exists()
        it.save(2)
    restore(address, tmp_path / "other", report=reports.append)  # released, so at once
    assert stored_fingerprint(tmp_path / "other") == (2, fingerprint(state(2)))


def test_a_heartbeat_on_its_way_does_not_take_a_released_lease_again(run, address, monkeypatch):
    hurry(monkeypatch, 16.0)
    monkeypatch.setattr(Lease, "BEAT_SECONDS", 2.0)
    beats = threading.Event()

    def slow_beat(operation, name, call):
        if operation == "put" and threading.current_thread().name == "podracer-lease":
            beats.set()
            time.sleep(0.5)
        return call()

    use(monkeypatch, address, slow_beat)
    with Run(run, address) as it:
        it.save(1)
        assert beats.wait(60.0)
    time.sleep(1.0)
    reports = []
    Lease(open_store(address), address, "other", "run").claim(give_up, reports.append)
    assert reports == []


@pytest.mark.figure(26)
@pytest.mark.parametrize("skew", [0, -86_400, 86_400])
def test_a_lost_machine_is_succeeded_and_stops_if_it_comes_back(
    skew, run, address, tmp_path, monkeypatch, caplog
):
    """Whatever the clocks of the machines: that of the store alone counts."""
    hurry(monkeypatch)
    other = tmp_path / "other"
    with monkeypatch.context() as patch:
        store = use(patch, address)
        first = Run(run, address)
    with first:
        first.save(1)
        wait_until(lambda: not first.mirror.figures()["mirror_lag"])
        store.fault = unavailable  # the network of the first machine
        monkeypatch.setattr(time, "time", lambda now=time.time: now() + skew)
        restore(address, other, report=ignore)
        with Run(other, address) as second:
            second.save(2, 3)
            wait_until(lambda: not second.mirror.figures()["mirror_lag"])
            store.fault = normal
            first.save(4)
            wait_until(lambda: "writes the copy at" in caplog.text)
            second.save(5)
    assert "this run goes on without it" in caplog.text
    assert copied(tmp_path / "store") == files_of(other)
    assert stored_fingerprint(run) == (4, fingerprint(state(4)))


@pytest.mark.figure(26)
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_machine_that_stood_still_takes_nothing_from_its_successor(
    every, run, address, tmp_path, monkeypatch, caplog, cases
):
    """It stands still at any operation of a copy, and goes on when its successor has ended."""
    hurry(monkeypatch, 0.05)
    monkeypatch.setattr(Lease, "BEAT_SECONDS", 60.0)
    with Run(run, address) as it:
        it.save(1)
    with Run(run, None) as it:
        it.save(2, 3, 4)
    shutil.copytree(tmp_path / "store", tmp_path / "old")
    store, other = use(monkeypatch, address), tmp_path / "other"

    def machine():
        try:
            with Mirror(run, address, RunCopy, new=False) as copier:
                copier.sealed()
        except ConfigError as error:
            ends.append(str(error))

    def successor():
        restore(address, other, report=ignore)
        if (other / "checkpoints" / f"{4:012d}").exists():
            ends.append("had ended")
        with Run(other, address) as it:
            it.save(9)

    for number in cases(moments(store, machine, every)):
        shutil.rmtree(tmp_path / "store")
        shutil.copytree(tmp_path / "old", tmp_path / "store")
        ends = []
        caplog.clear()
        pause_machine(store, number, machine, successor)
        ends = [*ends, *caplog.messages]
        words = ("goes on without it", "is newer than", "had ended")
        assert any(word in end for end in ends for word in words), (number, ends)
        assert copied(tmp_path / "store", alone=False) == files_of(other)
        with Run(other, address):  # which removes what is left of the first
            pass
        assert copied(tmp_path / "store") == files_of(other)
        shutil.rmtree(other)


@pytest.mark.figure(26)
def test_answers_that_arrive_damaged_are_read_again(
    run, address, tmp_path, monkeypatch, caplog, cases
):
    """Every second answer of each object has a bit that was flipped."""
    rng, reads = random.Random(0), Counter()

    def damage(name, content):
        reads[name] += 1
        content = bytearray(content)
        if content and reads[name] % 2:
            bit = rng.randrange(8 * len(content))
            content[bit // 8] ^= 1 << bit % 8
        return bytes(content)

    def fault(operation, name, call):
        result = call()
        if operation == "get_range":
            return damage(name, result)
        if operation == "get":
            content = damage(name, result.bytes())
            return types.SimpleNamespace(meta=result.meta, bytes=lambda: content)
        return result

    use(monkeypatch, address, fault)
    reports = []
    for trial in cases(range(2)):
        with Run(run, address) as it:
            for step in (2 * trial + 1, 2 * trial + 2):
                it.save(step)
                wait_until(lambda: not it.mirror.figures()["mirror_lag"])
        restore(address, tmp_path / str(trial), report=reports.append)
        assert copied(tmp_path / "store") == files_of(tmp_path / str(trial)) == files_of(run)
    assert reads.total() > 100
    assert not [text for text in (*caplog.messages, *reports) if "skipped" in text]
    assert "writes the copy" not in caplog.text


def test_a_copy_of_an_earlier_version_goes_on(run, address, tmp_path):
    """It had the files under their names, and a lease without a seal."""
    with Run(run, None) as it:
        it.save(1, 2, 3)
    shutil.copytree(run, tmp_path / "store", ignore=shutil.ignore_patterns("lock"))
    (tmp_path / "store" / "leases").mkdir()
    (tmp_path / "store" / "other").mkdir()  # nothing of the copy
    (tmp_path / "store" / "other" / CONFIG).touch()
    lease = {"holder": "a", "host": "b", "released": True, "time": 0.0}
    path = tmp_path / "store" / "leases" / "000003"
    path.write_text(json.dumps(lease))
    os.utime(path, (0, 0))
    other = tmp_path / "other"
    assert stored_fingerprint(local_run(address, 2), 2) == (2, fingerprint(state(2)))
    restore(address, other, report=ignore)
    assert files_of(other) == files_of(run)
    with Run(other, address) as it:
        it.save(4)
    shutil.rmtree(tmp_path / "store" / "other")  # FileNotFoundError if it was deleted
    assert copied(tmp_path / "store") == files_of(other)
    assert (tmp_path / "store" / "leases" / "000005").exists()


def test_a_copied_directory_is_another_machine(run, address, tmp_path, monkeypatch):
    hurry(monkeypatch, 1.0)
    with Run(run, address) as it:
        it.save(1)
        shutil.copytree(run, tmp_path / "twin")
        with pytest.raises(ConfigError, match="whose heartbeat is"):
            Run(tmp_path / "twin", address).__enter__()


def test_a_claim_whose_answer_is_lost_is_one(run, address, monkeypatch):
    def lost_answer(operation, name, call):
        if (operation, name) == ("put", "leases/000001") and not done:
            done.append(call())
            raise AlreadyExistsError("created by the first attempt")
        return call()

    done = []
    use(monkeypatch, address, lost_answer)
    start = time.monotonic()
    with Run(run, address) as it:
        it.save(1)
    assert done
    assert time.monotonic() - start < Lease.EXPIRY_SECONDS / 2


@pytest.mark.figure(26)
def test_of_many_that_claim_at_once_one_does(address, monkeypatch, cases):
    hurry(monkeypatch, 30.0)
    for trial in cases(range(20)):
        store = open_store(f"{address}/{trial}", writes=True)
        leases = [Lease(store, address, f"machine {number}", "run") for number in range(8)]
        barrier, refused = threading.Barrier(8), []

        def claim(lease, barrier=barrier, refused=refused):
            barrier.wait()
            try:
                lease.claim(give_up, ignore)
            except LookupError:
                refused.append(lease)

        threads = [threading.Thread(target=claim, args=(lease,)) for lease in leases]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [lease.number for lease in leases].count(1) == 1
        assert len(refused) == 7


def give_up(_: float) -> None:
    """Wait for nobody."""
    raise LookupError
