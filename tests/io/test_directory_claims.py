"""Claims of directories: what another process did between the check and the lock is noticed."""

from __future__ import annotations

import dataclasses
import fcntl
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import small_catch

import podracer
from podracer.drivers.population import Pod
from podracer.errors import ConfigError
from podracer.io import run_directory as rundir
from podracer.io.checkpoint import stored_fingerprint
from podracer.tournament.events import Header
from podracer.tournament.leaderboard import Leaderboard, read_events

EXPERIMENT = small_catch(5)
SWEEP = dataclasses.replace(EXPERIMENT, pods=(Pod(0), Pod(1)))
HEADER = Header({"rule": "softmax"}, seed=0, pods=4, size=5, evaluation="e1", episodes=10)


def train(directory: Path) -> None:
    podracer.train(EXPERIMENT, run_dir=directory)


def sweep(directory: Path) -> None:
    podracer.train(SWEEP, run_dir=directory)


def begin_tournament(directory: Path) -> None:
    with Leaderboard(directory, HEADER):
        pass


@pytest.mark.figure(13)
@pytest.mark.parametrize(
    ("slow", "fast", "words"),
    [
        (train, train, "already holds a run"),
        (sweep, train, "already holds a run"),
        (train, sweep, "already holds a run"),
        (train, begin_tournament, "holds a tournament"),
        (begin_tournament, train, "holds a run"),
    ],
)
def test_what_another_process_began_before_the_lock_is_left_as_it_is(
    slow: Callable, fast: Callable, words: str, tmp_path: Path, monkeypatch
) -> None:
    """The slow one has found the directory unused, and waits just before it takes the lock."""
    directory, lock = tmp_path / "run", fcntl.flock

    def wait(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(rundir.fcntl, "flock", lock)
        fast(directory)
        contents.update(files(directory))
        lock(descriptor, operation)

    contents: dict[str, bytes] = {}
    monkeypatch.setattr(rundir.fcntl, "flock", wait)
    with pytest.raises(ConfigError, match=words):
        slow(directory)
    assert files(directory) == contents
    if fast is begin_tournament:
        assert len(read_events(directory)) == 1
    else:
        assert stored_fingerprint(directory)[0] == 5


def files(directory: Path) -> dict[str, bytes]:
    paths = (path for path in directory.rglob("*") if path.is_file() and path.name != "lock")
    return {str(path.relative_to(directory)): path.read_bytes() for path in paths}


def test_a_tournament_that_is_gone_under_the_lock_is_not_resumed(tmp_path: Path, monkeypatch):
    begin_tournament(tmp_path)
    lock = fcntl.flock

    def remove(descriptor: int, operation: int) -> None:
        (tmp_path / "leaderboard.jsonl").unlink()
        lock(descriptor, operation)

    monkeypatch.setattr(rundir.fcntl, "flock", remove)
    with pytest.raises(ConfigError, match="holds no tournament"):
        Leaderboard(tmp_path)
    assert not (tmp_path / "leaderboard.jsonl").exists()
