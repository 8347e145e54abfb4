"""Run directories: names stay under the root, one run at a time, whole files."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from podracer.errors import CheckpointError, ConfigError, StorageError
from podracer.io import run_directory as rundir
from podracer.io import seal as seals
from podracer.io.run_directory import RunLock, run_directory, write_json

# --- names ----------------------------------------------------------------------------------------

PIECES = ["..", ".", "/", "\\", "\0", "\n", "~", "a", "B-2", "con", ":", "%2e", "é", " ", "x" * 79]


@pytest.mark.figure(16)
@settings(max_examples=100, deadline=None, database=None)
@given(st.one_of(st.text(max_size=90), st.lists(st.sampled_from(PIECES)).map("".join)))
@example("../x")
@example("/etc")
@example("run\n")
@example("..")
@example("a" * 81)
def test_every_name_is_a_plain_child_of_the_root_or_refused(name: str) -> None:
    root = Path("/runs/root")
    try:
        path = run_directory(root, name)
    except ConfigError:
        return
    assert path.parent == root.resolve()
    assert os.path.normpath(path) == str(path)
    assert name == path.name
    assert name.isascii()


@pytest.mark.parametrize("name", ["catch-ppo.1_2", "Z" * 80, "a..b", "-", "run 1"])
def test_ordinary_names_are_taken_as_they_are(tmp_path: Path, name: str) -> None:
    assert run_directory(tmp_path, name) == tmp_path.resolve() / name
    assert list(tmp_path.iterdir()) == []


@pytest.mark.figure(16)
@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "a" * 81, " a", "a ", "a\tb"])
def test_unusable_names_say_what_would_be_right(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"A-Z, a-z, 0-9|choose another"):
        run_directory(tmp_path, name)


@pytest.mark.figure(16)
def test_links_and_files_are_not_run_directories(tmp_path: Path) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (root / "link").symlink_to(outside)
    (root / "dangling").symlink_to(tmp_path / "nowhere")
    (root / "file").touch()
    for name, message in {"link": "symbolic", "dangling": "symbolic", "file": "a file"}.items():
        with pytest.raises(ConfigError, match=message):
            run_directory(root, name)
    (tmp_path / "alias").symlink_to(root)  # the root itself may be wherever the user wants it
    assert run_directory(tmp_path / "alias", "run") == root.resolve() / "run"


# --- the lock -------------------------------------------------------------------------------------

HOLD = """
import sys
from pathlib import Path
from podracer.io.run_directory import RunLock
with RunLock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_run_is_refused_until_the_first_has_died(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "run"
    environment = {**os.environ, "PYTHONPATH": str(Path(rundir.__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        with pytest.raises(ConfigError, match=rf"in use by process {child.pid} on "):
            RunLock(directory).__enter__()
        child.send_signal(signal.SIGKILL)
    with RunLock(directory):
        assert json.loads((directory / "lock").read_text())["pid"] == os.getpid()


def test_one_process_cannot_run_twice_in_one_directory(tmp_path: Path) -> None:
    with RunLock(tmp_path), pytest.raises(ConfigError, match=f"process {os.getpid()} "):
        RunLock(tmp_path).__enter__()
    with RunLock(tmp_path):
        pass


@pytest.mark.parametrize("record", ["", "[1]", "{}", '{"pid": "x; rm", "host": 1}', "\0" * 9])
def test_a_lock_with_an_odd_record_is_still_a_lock(tmp_path: Path, record: str) -> None:
    with RunLock(tmp_path):
        (tmp_path / "lock").write_text(record)
        with pytest.raises(ConfigError, match="in use by another process"):
            RunLock(tmp_path).__enter__()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_a_sentence(tmp_path: Path, monkeypatch, number) -> None:
    def fail(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    files = len(os.listdir("/dev/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(rundir.fcntl, "flock", fail)
        with pytest.raises(StorageError, match="on a file system that has locks"):
            RunLock(tmp_path).__enter__()
    with monkeypatch.context() as patch:
        patch.setattr(rundir.os, "ftruncate", fail)
        with pytest.raises(OSError, match="lock"):
            RunLock(tmp_path).__enter__()
    assert len(os.listdir("/dev/fd")) == files
    with RunLock(tmp_path):
        pass


@pytest.mark.figure(16)
def test_the_lock_does_not_follow_a_link(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("keep")
    (tmp_path / "lock").symlink_to(tmp_path / "precious")
    with pytest.raises(StorageError, match="lock: Too many levels of symbolic links"):
        RunLock(tmp_path).__enter__()
    assert (tmp_path / "precious").read_text() == "keep"


# --- files ----------------------------------------------------------------------------------------


def test_json_is_replaced_whole_and_synced_before_it_is_named(tmp_path: Path, monkeypatch) -> None:
    calls: list[str] = []

    def record(name: str, real) -> None:
        def call(*arguments: object) -> None:
            calls.append(name)
            real(*arguments)

        monkeypatch.setattr(rundir.os, name, call)

    record("fsync", os.fsync)
    record("replace", os.replace)
    write_json(tmp_path / "config.json", {"seed": 1})
    write_json(tmp_path / "config.json", {"seed": 2, "name": "é"})
    assert json.loads((tmp_path / "config.json").read_text()) == {"seed": 2, "name": "é"}
    assert calls == ["fsync", "replace", "fsync"] * 2
    assert os.listdir(tmp_path) == ["config.json"]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file_alone(
    tmp_path: Path, monkeypatch, call: str
) -> None:
    write_json(tmp_path / "config.json", 1)

    def refuse(*names: object) -> None:
        named = (names[0], None, names[1]) if call == "replace" else ()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), *named)

    monkeypatch.setattr(rundir.os, call, refuse)
    with pytest.raises(OSError, match=r"No space left on device: '.*config\.json'$"):
        write_json(tmp_path / "config.json", 2)
    assert os.listdir(tmp_path) == ["config.json"]
    assert (tmp_path / "config.json").read_text() == "1\n"


# --- seals ----------------------------------------------------------------------------------------


def test_a_seal_syncs_every_file_before_the_manifest(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "state").mkdir()
    contents = [tmp_path / "state", tmp_path / "state" / "array", tmp_path / "meta.json"]
    for path in contents[1:]:
        path.write_bytes(b"1")
    synced: set[int] = set()

    def sync(descriptor: int) -> None:
        synced.add(os.fstat(descriptor).st_ino)

    def replace(draft: Path, path: Path) -> None:
        assert {p.stat().st_ino for p in (*contents, draft)} <= synced
        synced.clear()
        draft.rename(path)

    monkeypatch.setattr(rundir.os, "fsync", sync)
    monkeypatch.setattr(rundir.os, "replace", replace)
    seals.seal(tmp_path)
    seals.verify_seal(tmp_path)
    assert synced == {tmp_path.stat().st_ino, tmp_path.parent.stat().st_ino}  # the new names


def test_any_flipped_bit_breaks_a_seal(tmp_path: Path) -> None:
    """Bits of a small sealed directory, manifest included."""
    directory = tmp_path / "sealed"
    (directory / "inner").mkdir(parents=True)
    (directory / "inner" / "data").write_bytes(b"\0\xff")
    seals.seal(directory)
    seals.verify_seal(directory)
    for file in [directory / "inner" / "data", directory / seals.MANIFEST]:
        whole = file.read_bytes()
        for bit in range(0, 8 * len(whole), 5):
            broken = bytearray(whole)
            broken[bit // 8] ^= 1 << bit % 8
            file.write_bytes(broken)
            with pytest.raises(CheckpointError, match="sealed"):
                seals.verify_seal(directory)
        file.write_bytes(whole)
    seals.verify_seal(directory)


def test_a_broken_seal_names_the_file(tmp_path: Path) -> None:
    directory = tmp_path / "sealed"
    directory.mkdir()
    (directory / "data").write_bytes(b"1")
    seals.seal(directory)
    (directory / "more").touch()
    with pytest.raises(CheckpointError, match="'more' was not there when it was sealed"):
        seals.verify_seal(directory)
    (directory / "more").rename(directory / "data")
    with pytest.raises(CheckpointError, match="'data' has changed since it was sealed"):
        seals.verify_seal(directory)
    (directory / "data").unlink()
    with pytest.raises(CheckpointError, match="'data' is missing"):
        seals.verify_seal(directory)


@pytest.mark.parametrize(("host", "left"), [("socket.gethostname()", 0), ("'elsewhere'", 1)])
def test_what_a_killed_process_has_left_is_removed_on_its_own_host(host, left, tmp_path) -> None:
    """In a shared directory the process of a draft may live on another host."""
    code = (
        f"import os, socket; host = {host}; socket.gethostname = lambda: host\n"
        "from podracer.io import run_directory\n"
        "os.replace = lambda *_: os._exit(0)\n"
        "run_directory.write_json(run_directory.Path('a.json'), {})"
    )
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)
    assert len(os.listdir(tmp_path)) == 1
    write_json(tmp_path / "a.json", {})
    assert len(os.listdir(tmp_path)) == 1 + left


def test_a_folder_of_runs_is_refused_with_the_name_of_one(tmp_path: Path) -> None:
    run = tmp_path / "first"
    run.mkdir()
    write_json(run / "config.json", {})
    seals.check_is_run(run)
    with pytest.raises(ConfigError, match=f"holds no run itself, but others: .* {run}.$"):
        seals.check_is_run(tmp_path)
    with pytest.raises(ConfigError, match="holds no run: there is no such directory"):
        seals.check_is_run(run / "checkpoints")
    (run / "checkpoints").mkdir()
    with pytest.raises(ConfigError, match=r"holds no run: there is no config\.json in it"):
        seals.check_is_run(run / "checkpoints")
