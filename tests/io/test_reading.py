"""Files that are no files: each reader refuses them by kind and size, and waits for none."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
from pathlib import Path

import pytest

from podracer import recipes
from podracer.config.serialization import read_config
from podracer.errors import CheckpointError, PodracerError
from podracer.io import reading
from podracer.io.directories import holds_begun_tournament
from podracer.io.jsonl import read_records
from podracer.io.models import check_promoted
from podracer.io.reading import read_limited, read_lines
from podracer.io.run_directory import write_bytes
from podracer.io.seal import read_sealed_json, seal_json
from podracer.io.sinks import read_metrics
from podracer.io.steps import newest_saved
from podracer.recipes.update_rules import with_update_rule
from podracer.scores.runs import read_object
from podracer.tournament.leaderboard import read_log as read_log
from podracer.tournament.report import reason_of_failure

READERS = {
    "config.json": read_config,
    "saved.json": read_sealed_json,
    "best.json": read_config,
    "crash.json": read_object,
    "metrics.jsonl": read_metrics,
    "pods.jsonl": read_records,
    "leaderboard.jsonl": read_log,
    "rule.npz": lambda path: with_update_rule(recipes.find("catch_a2c"), str(path)),
    "record.jsonl": lambda path: check_promoted(path.parent / "000001"),
}
KINDS = {
    "pipe": os.mkfifo,
    "huge": lambda path: (path.touch(), os.truncate(path, 10**11)),
    "memory": lambda path: path.symlink_to("/proc/self/mem"),
    "endless": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.figure(16)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", READERS)
def test_what_is_no_file_is_refused(name, kind, tmp_path):
    """A link to the memory of the process is as an empty file."""
    KINDS[kind](tmp_path / name)
    with contextlib.suppress(PodracerError):
        content = READERS[name](tmp_path / name)
        assert not content or content == ([], [], 0)


@pytest.mark.figure(16)
@pytest.mark.parametrize("kind", KINDS)
def test_what_only_looks_at_a_file_passes_over_it(kind, tmp_path):
    KINDS[kind](tmp_path / "log.txt")
    assert reason_of_failure(tmp_path, 3) == "exit code 3"
    KINDS[kind](tmp_path / "leaderboard.jsonl")
    try:
        assert not holds_begun_tournament(tmp_path)
    except CheckpointError:
        assert kind == "huge"


def test_no_more_is_read_than_a_file_has(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"one\ntwo\nthr")
    assert read_limited(path) == b"one\ntwo\nthr"
    assert list(read_lines(path)) == [b"one\n", b"two\n", b"thr"]
    with pytest.raises(CheckpointError, match="larger than 10 bytes"):
        read_limited(path, 10)
    monkeypatch.setattr(reading, "LINE_LIMIT", 3)
    with pytest.raises(CheckpointError, match="a line of more than 3 bytes"):
        list(read_lines(path))
    with pytest.raises(FileNotFoundError):
        read_limited(tmp_path / "nothing")


@pytest.mark.figure(16)
@pytest.mark.parametrize("step", [float("inf"), float("nan"), 10**20, -5, 1.0, True, "1", None])
def test_a_newest_step_that_is_none_is_refused(step, tmp_path):
    seal_json(tmp_path / "saved.json", {"step": step})
    with pytest.raises(CheckpointError, match="says that the newest step is"):
        newest_saved(tmp_path)
    seal_json(tmp_path / "saved.json", {"step": 7})
    assert newest_saved(tmp_path) == 7


@pytest.mark.figure(16)
@pytest.mark.parametrize("line", ["{}", "[1]", "3", '{"model": "000001"}'])
def test_a_record_of_models_that_is_none_is_refused(line, tmp_path):
    (tmp_path / "record.jsonl").write_text(f"{line}\n")
    with pytest.raises(CheckpointError, match="is not a record of models"):
        check_promoted(tmp_path / "000001")


def test_what_a_killed_process_left_of_a_file_goes_with_its_next_write(tmp_path):
    process = subprocess.Popen(["true"])
    process.wait()
    host = re.sub("[^A-Za-z0-9]", "-", socket.gethostname())[:40]
    names = {
        f".page.html.{host}.{process.pid}.1": False,
        f".page.html.{host}.{os.getpid()}.1": True,  # of another thread
        f".page.html.elsewhere.{process.pid}.1": True,
        f".page.htm.{host}.{process.pid}.1": True,
        f".page.html.{host}.{process.pid}": True,
    }
    for name in names:
        Path(tmp_path, name).touch()
    write_bytes(tmp_path / "page.html", b"page")
    kept = {name for name, is_kept in names.items() if is_kept}
    assert set(os.listdir(tmp_path)) == {"page.html", *kept}
