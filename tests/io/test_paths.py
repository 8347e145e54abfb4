"""Paths that a user gives: what cannot be saved to is refused before anything is made."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from runs import small_catch

import podracer
from podracer.cli.main import main
from podracer.errors import ConfigError, StorageError
from podracer.io import run_directory as rundir
from podracer.io.code import installed_versions
from podracer.io.paths import user_path
from podracer.recipes.update_rules import with_update_rule
from podracer.reports.run import write_report
from podracer.reports.tournament import write_tournament_report
from podracer.run.setup import make_driver
from podracer.tournament.leaderboard import Leaderboard, read_events

EXPERIMENT = small_catch(5)
FUNCTIONS: dict[str, Callable] = {
    "train": lambda path: podracer.train(EXPERIMENT, run_dir=path),
    "weights": lambda path: podracer.train(EXPERIMENT, begin=podracer.Weights(path)),
    "page": lambda path: write_report([Path("run")], path),
    "rule": lambda path: with_update_rule(EXPERIMENT, path),
    "tournament": lambda path: Leaderboard(path),
    "events": read_events,
    "tournament_page": lambda path: write_tournament_report("tournament", path),
}


@pytest.mark.parametrize("path", ["s3://bucket/run", Path("gs://bucket/run"), "file:///run"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_no_function_takes_an_address_for_a_path(name, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="is an address"):
        FUNCTIONS[name](path)
    assert not list(tmp_path.iterdir())


def test_paths_with_colons_are_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for text in ("a:b/c", "./s3:/x", "/tmp/s3:/x", "runs/a:0", "C:/x"):
        assert user_path(text) == Path(text)
    assert user_path("~/x") == Path.home() / "x"
    with pytest.raises(ConfigError, match="no home directory for '~nosuchuser/x'"):
        user_path("~nosuchuser/x")


@pytest.mark.figure(20)
@pytest.mark.parametrize("run", [b"d\xff/run", b"\xe9"])
def test_a_path_that_is_not_utf8_is_refused_before_anything_is_made(
    run, tmp_path, monkeypatch, capsys
):
    """Also where the folder that the command runs in has such a name."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        main(["train", "catch", "--run-dir", os.fsdecode(run)])
    assert left.value.code == 78
    assert "its bytes are not UTF-8" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/\xff")
    os.mkdir(folder)
    monkeypatch.chdir(folder)
    for run_dir in (None, "run"):
        with pytest.raises(ConfigError, match="its bytes are not UTF-8"):
            podracer.train(EXPERIMENT, run_dir=run_dir)
    assert not os.listdir(folder)


def test_a_locale_that_reads_names_otherwise_is_told(monkeypatch):
    """Checkpoints would be written under the UTF-8 of what the locale makes of a name."""
    monkeypatch.setattr(os, "fsencode", lambda path: path.encode("latin-1"))
    with pytest.raises(ConfigError, match="not in this locale: take another name"):
        user_path("/tmp/é")


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that every user may enter, as pytest's are not."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@contextlib.contextmanager
def no_rights(directory: Path, monkeypatch, mode: int = 0o555):
    """Be a user whom modes keep out, which they do not do to root."""
    directory.parent.chmod(0o755)
    directory.chmod(mode)
    installed_versions()  # whose files are perhaps out of that user's reach
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        directory.chmod(0o755)


@contextlib.contextmanager
def refusing(number: int, monkeypatch):
    class File:
        def __init__(self, dir):
            raise OSError(number, os.strerror(number), str(dir))

    with monkeypatch.context() as patch:
        patch.setattr(rundir.tempfile, "TemporaryFile", File)
        yield


@contextlib.contextmanager
def nearly_full(directory: Path, monkeypatch):
    """There is room for a file, but not for a checkpoint of the run."""
    size = make_driver(EXPERIMENT).saved_bytes
    usage = rundir.shutil.disk_usage(directory)._replace(free=rundir.SPARE_BYTES + size - 1)
    with monkeypatch.context() as patch:
        patch.setattr(rundir.shutil, "disk_usage", lambda path: usage)
        yield


@pytest.mark.figure(20)
@pytest.mark.parametrize(
    ("obstacle", "words"),
    [
        (no_rights, "Permission denied"),
        (partial(no_rights, mode=0), "Permission denied; choose a directory that this user may"),
        (lambda _, patch: refusing(errno.EROFS, patch), "Read-only file system"),
        (lambda _, patch: refusing(errno.ENOSPC, patch), "No space left"),
        (lambda _, patch: refusing(errno.EDQUOT, patch), "quota exceeded"),
        (nearly_full, r"has 1.0 MiB free, and a checkpoint with its records takes up to 1.0 MiB"),
    ],
    ids=["no write", "no rights", "read-only", "full", "quota", "nearly full"],
)
def test_a_directory_that_cannot_be_saved_to_is_refused_before_a_compile(
    obstacle, words, place, monkeypatch
):
    run = place / "run"
    run.mkdir()
    (run / "lock").touch()
    (run / "lock").chmod(0o666)
    files = sorted(run.iterdir())
    compiled = []
    monkeypatch.setattr(
        "podracer.run.training.Run.execute", lambda *_: compiled.append("a program")
    )
    with obstacle(run, monkeypatch), pytest.raises(StorageError, match=words):
        podracer.train(EXPERIMENT, run_dir=run)
    assert not compiled
    assert sorted(run.iterdir()) == files


def test_a_run_without_room_is_not_resumed_and_not_harmed(tmp_path, monkeypatch):
    podracer.train(EXPERIMENT, run_dir=tmp_path / "run")
    files = sorted((tmp_path / "run").rglob("*"))
    longer = dataclasses.replace(EXPERIMENT, frames=10 * 16)
    with nearly_full(tmp_path, monkeypatch), pytest.raises(StorageError, match="or make room"):
        podracer.train(longer, run_dir=tmp_path / "run", resume=True)
    assert sorted((tmp_path / "run").rglob("*")) == files
