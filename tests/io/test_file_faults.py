"""Whatever happens to the files of a run: it is read as it was written, or refused."""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import hashlib
import itertools
import logging
import os
import random
import shutil
import signal
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from crash_points import Server, lose_unsynced
from runs import small_catch

import podracer
from podracer.config.serialization import read_config, to_json
from podracer.drivers.population import Pod
from podracer.errors import PodracerError
from podracer.io import seal, text
from podracer.io.checkpoint import Checkpointer, fingerprint, load, stored_fingerprint
from podracer.io.jsonl import JsonlSink
from podracer.run import sweep
from podracer.run.loading import reopen
from podracer.run.resume import shows_saves
from podracer.run.setup import make_driver

NOBODY = 65534
EXPERIMENT = small_catch(25, evaluations=5, evaluation_episodes=2, save_seconds=0)
EXPERIMENTS = {
    "seed-0": EXPERIMENT,
    "seed-1": dataclasses.replace(EXPERIMENT, seed=1),
    "learning-rate": EXPERIMENT.with_fields({"agent": {"learning_rate": 0.5}}),
    "sweep": dataclasses.replace(EXPERIMENT, pods=(Pod(0), Pod(1))),
}


class Truth(NamedTuple):
    """What a run was before anything happened to its files."""

    experiment: dict[str, Any]
    like: Any
    steps: dict[int, str]  # fingerprints
    best: dict[int, int]  # step that each of them names best
    records: bytes
    best_pod: int | None
    end: str  # fingerprint of the finished run


def train_and_stop(name: str, run: Path) -> Truth:
    """Train a run to its last chunk but one, and its twin to the end."""
    experiment = EXPERIMENTS[name]
    podracer.train(experiment, run_dir=run, callbacks=[lambda at: at.metrics["updates"] >= 20])
    steps, best_steps, like = {}, {}, make_driver(experiment).abstract_state
    for step in sorted(map(int, os.listdir(run / "checkpoints"))):
        restored = load(run, like, step)
        steps[step] = fingerprint(restored.state)
        best_steps[step] = restored.metadata["best"]["updates"]
    best = sweep.best_pod(run, restored) if experiment.pods else None
    twin = run.with_name(f"{run.name}-finished")
    shutil.copytree(run, twin)
    podracer.train(experiment, run_dir=twin, resume=True)
    records, end = (run / "metrics.jsonl").read_bytes(), stored_fingerprint(twin)[1]
    return Truth(to_json(experiment), like, steps, best_steps, records, best, end)


# --- what may happen to files ---------------------------------------------------------------------


class Faults:
    """Random operations on the files of a run; `other` is another run to take files from."""

    KINDS = ("copy", "rename", "swap", "truncate", "flip", "delete", "link", "chmod")

    def __init__(self, run: Path, other: Path, outside: Path, rng: random.Random) -> None:
        self.run, self.other, self.outside, self.rng = run, other, outside, rng

    def apply(self, kind: str) -> str:
        path = self.pick(self.run, files_only=kind in ("truncate", "flip"))
        return f"{kind} {path.relative_to(self.run)} {getattr(self, kind)(path) or ''}"

    def pick(self, run: Path, files_only: bool = False, like: Path | None = None) -> Path:
        """Return a file or a directory of a run; those near the top come as often as the others."""
        paths = [path for path in run.rglob("*") if "tensorboard" not in path.parts]
        if files_only:
            paths = [path for path in paths if path.is_file() and path.stat().st_size]
        if like is not None:
            paths = [path for path in paths if path.is_dir() == like.is_dir()] or [run]
        depth = self.rng.choice(sorted({len(path.parts) for path in paths}))
        return self.rng.choice(sorted(path for path in paths if len(path.parts) == depth))

    def source(self, path: Path) -> Path:
        """Return something of the same kind: of this run, of another, or the other's same file."""
        twin = self.other / path.relative_to(self.run)
        choices = [self.pick(self.run, like=path), self.pick(self.other, like=path), twin, twin]
        return self.rng.choice([source for source in choices if source.exists()])

    def copy(self, path: Path) -> str:
        source = self.source(path)
        if source != path and source not in path.parents and path not in source.parents:
            remove(path)
            (shutil.copytree if source.is_dir() else shutil.copy2)(source, path)
        return f"from {source}"

    def rename(self, path: Path) -> str:
        step = f"{self.rng.choice([5, 10, 15, 20, 25, 99]):012d}"
        names = [f"{path.name}.bak", f"{path.name}.draft", step, self.pick(self.run).name]
        target = path.with_name(self.rng.choice(names))
        if os.path.lexists(target) and target != path:
            remove(target)
        path.rename(target)
        return f"to {target.name}"

    def swap(self, path: Path) -> str:
        other = self.pick(self.run, like=path)
        if path not in other.parents and other not in path.parents and other != path:
            draft = path.with_name("swap")
            path.rename(draft)
            other.rename(path)
            draft.rename(other)
        return f"with {other}"

    def truncate(self, path: Path) -> None:
        os.truncate(path, self.rng.randrange(path.stat().st_size))

    def flip(self, path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
        path.write_bytes(data)

    def delete(self, path: Path) -> None:
        remove(path)

    def link(self, path: Path) -> str:
        source = self.source(path)
        if source == path or self.rng.random() < 0.5:
            source = self.outside / str(self.rng.random())
            path.rename(source)
        else:
            remove(path)
        path.symlink_to(source)
        return f"to {source}"

    def chmod(self, path: Path) -> str:
        mode = self.rng.choice([0o000, 0o200, 0o444])
        path.chmod(mode)
        return f"{mode:o}"


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


@contextlib.contextmanager
def ordinary_user(directory: Path) -> Iterator[None]:
    """Own a directory and act as a user whom modes keep out, which they do not do to root."""
    if os.geteuid():
        yield
        return
    for folder, folders, files in os.walk(directory):
        for name in (".", *folders, *files):
            os.chown(Path(folder, name), NOBODY, NOBODY, follow_symlinks=False)
    for encoding in ("utf-16-be", "utf-16-le", "utf-32-be", "utf-32-le"):  # of damaged JSON
        codecs.lookup(encoding)  # from a library that the user may not read
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


# --- what a run is worth afterwards ---------------------------------------------------------------


def stored_files(run: Path) -> Counter[str]:
    """Return the digests of all files of checkpoints, wherever they lie."""
    files = (Path(folder, name) for folder, _, names in os.walk(run) for name in names)
    return Counter(
        hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
        if "checkpoints" in path.parts and not path.is_symlink()
        and not any(part.endswith((".draft", ".removed")) for part in path.parts)
    )  # fmt: skip


def read(run: Path, truths: dict[str, Truth], log: list[str]) -> tuple[Truth, int] | None:
    """Read a run as `eval` and `fingerprint` do; None if it is refused."""
    try:
        experiment = to_json(reopen(run))
        truth = truths[read_config(run / "config.json")["run"]["id"]]
        step, digest = stored_fingerprint(run)
    except PodracerError as error:
        log.append(str(error))
        return None
    assert experiment == truth.experiment
    assert truth.steps[step] == digest
    with contextlib.suppress(PodracerError):
        best = load(run, truth.like, "best")
        assert best.step == truth.best[step]
        assert truth.steps[best.step] == fingerprint(best.state)
    return truth, step


def resume(
    run: Path, truths: dict[str, Truth], log: list[str], caplog: Any, to_the_end: bool
) -> bool:
    """Resume a run, to its end or up to the first update; False if it is refused."""
    try:
        experiment = reopen(run)
        truth = truths[read_config(run / "config.json")["run"]["id"]]
        if to_the_end:
            podracer.train(experiment, run_dir=run, resume=True)
            assert stored_fingerprint(run)[1] == truth.end
            return True
        with Checkpointer(run) as checkpointer:
            assert checkpointer.has_saved() or shows_saves(run)
            restored = checkpointer.restore(truth.like)
        assert truth.steps[restored.step] == fingerprint(restored.state)
        if truth.best_pod is not None and restored.step == max(truth.steps):
            assert sweep.best_pod(run, restored) == truth.best_pod
        name = "metrics.jsonl"
        sealed = restored.metadata["records"][name]
        JsonlSink(run / name, resume_updates=restored.step, sealed=sealed).close()
        records = b"".join(truth.records.splitlines(keepends=True)[: restored.step // 5])
        assert (run / name).read_bytes() == records or "not as it was" in caplog.text
    except PodracerError as error:
        log.append(str(error))
        return False
    return True


@pytest.mark.figure(3)
@pytest.mark.parametrize(
    ("trials", "names"),
    [
        (10, ("seed-0", "seed-1")),
        pytest.param(2000, tuple(EXPERIMENTS), marks=pytest.mark.timeout(7200)),
    ],
)
@pytest.mark.slow
def test_whatever_happens_to_its_files_a_run_is_right_or_refused(
    trials: int, names: tuple[str, ...], tmp_path: Path, monkeypatch, caplog, cases
) -> None:
    """Operations on files of random runs: nothing wrong is taken, and every fall-back is said."""
    monkeypatch.setattr(seal, "RETRY_SECONDS", ())
    log: list[str] = []
    monkeypatch.setattr(text, "print_stderr", log.append)
    runs = [tmp_path / name for name in names]
    truths = {}
    for run in runs:
        truth = train_and_stop(run.name, run)
        truths[read_config(run / "config.json")["run"]["id"]] = truth
    outcomes: Counter[str] = Counter()
    for trial in cases(range(trials)):
        rng = random.Random(trial)
        with tempfile.TemporaryDirectory() as folder, caplog.at_level(logging.WARNING):
            os.chmod(folder, 0o755)
            source, other = rng.sample(runs, 2)
            run, outside = Path(folder) / "run", Path(folder) / "outside"
            shutil.copytree(source, run)
            outside.mkdir()
            faults = Faults(run, other, outside, rng)
            kinds = [rng.choice(Faults.KINDS) for _ in range(rng.choice([1, 1, 2]))]
            note = [f"trial {trial}", source.name, *(faults.apply(kind) for kind in kinds)]
            caplog.clear()
            log.clear()
            to_the_end = trial % 50 == 49 and "chmod" not in kinds
            before = stored_files(run)
            user = ordinary_user(Path(folder)) if "chmod" in kinds else contextlib.nullcontext()
            with user:
                result = read(run, truths, log)
                if result and len(kinds) == 1:
                    truth, step = result
                    assert step == max(truth.steps) or log, note
                resumed = resume(run, truths, log, caplog, to_the_end)
            assert result or log, note
            assert to_the_end or not before - stored_files(run), note
            refused = not (result and resumed)
            outcomes["refused" if refused else "reported" if log else "unharmed"] += 1
    cases.note(", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common()))


# --- killed at every call -------------------------------------------------------------------------


@pytest.mark.figure(2)
@pytest.mark.skipif(not shutil.which("gcc"), reason="needs gcc, to come between a process and libc")
@pytest.mark.parametrize(
    "stride", [56, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])]
)
def test_killed_at_any_call_of_a_save_the_newest_step_is_whole(
    stride: int, tmp_path: Path, cases
) -> None:
    """Whatever the call, also where a power cut empties what was not synced: nothing is said.

    The step that the newest one names best is there, too.
    """
    run, journal = tmp_path / "run", tmp_path / "journal"
    with Server(tmp_path) as server:
        assert server.ask("prepare", run)["status"] == 0
        clean = shutil.copytree(run, tmp_path / "clean")
        calls = server.ask("save", run, 0, journal)["calls"]
        assert calls >= 100
        numbers = range(1, calls + 1, stride)
        cuts = (False, True) if stride == 1 else (True,)
        for call, is_power_cut in cases(list(itertools.product(numbers, cuts))):
            shutil.rmtree(run)
            shutil.copytree(clean, run)
            saved = server.ask("save", run, call, journal)
            is_over = saved["status"] == 0 and saved["calls"] < call  # this save made fewer
            assert is_over or saved["status"] == -signal.SIGKILL
            if is_power_cut:
                lose_unsynced(journal)
            found = server.ask("check", run)
            assert found | {"status": 0, "right": True, "said": []} == found, (call, found)
            assert found["step"] in ((3,) if is_over else (2, 3))
            left = (0, 2, 4) if found["step"] == 2 else (3, 4)
            assert found["left"] == [f"{step:012d}" for step in left], call
    cases.note(f"{calls} calls")
