"""Checkpoints: exact round trips, and every kind of damage, misfit and interruption refused."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import os
import pydoc
import random
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from podracer.errors import CheckpointError, ConfigError, StorageError
from podracer.io import arrays, checkpoint, seal, steps, text
from podracer.io import run_directory as rundir
from podracer.io.checkpoint import Checkpointer, fingerprint, load, load_part, stored_fingerprint
from podracer.io.seal import encode_json, encode_sealed
from podracer.rollout import ActorState, zero_episode_stats
from podracer.types import LearnerState, leaves_by_path

MESH = jax.make_mesh((len(jax.devices()),), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
SHARDED = NamedSharding(MESH, PartitionSpec("data"))
REPLICATED = NamedSharding(MESH, PartitionSpec())

ACTOR = ActorState(env_state=(), timestep=(), carry=(), episodes=())


def small(seed: int = 0) -> LearnerState:
    """A few leaves, quick to save."""
    key = jax.random.key(seed)
    return LearnerState(shared={"w": jax.random.normal(key, (3, 5)), "key": key})


def rich(seed: int = 0) -> LearnerState:
    """Every kind of leaf that a run may keep."""
    key = jax.random.key(seed)
    size = 2 * len(jax.devices())
    shared = {
        "linear/w": jax.random.normal(key, (3, 5)),
        "linear": {"../w": jnp.int8(3), "": {".": jnp.int8(4)}},
        "a b.é\0": jax.random.normal(key, (7,), jnp.bfloat16),
        "flag": jnp.array(True),
        "count": jnp.uint32(2**32 - 1 - seed),
        "nothing": (),
        "none": None,
        "zero": jnp.zeros((0, 3), jnp.int8),
        "keys": [key, jax.random.key(seed, impl="rbg")],
        "nan": jnp.array([jnp.nan, -0.0, jnp.inf]),
    }
    local = {
        "frames": jax.random.randint(key, (size, 4), 0, 255).astype(jnp.uint8),
        "keys": jax.random.split(key, size),
    }
    return LearnerState(
        shared={**jax.device_put(shared, REPLICATED), "uncommitted": key},
        local={**jax.device_put(local, SHARDED), "host": np.arange(4, dtype=np.int64) + seed},
    )


def save(directory: Path, *steps: int, keep: int = 3) -> list[str]:
    """Save `small(step)` under each step; their fingerprints."""
    with Checkpointer(directory, keep=keep) as checkpointer:
        for step in steps:
            checkpointer.save(step, small(step), {"step": step})
    return [fingerprint(small(step)) for step in steps]


@pytest.fixture
def reports() -> Iterator[list[str]]:
    """Sentences on checkpoints that are missing or refused, which are printed."""
    texts: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "print_stderr", texts.append)
        yield texts


def sealed_steps(run: Path) -> list[int]:
    return sorted(int(path.parent.name) for path in run.glob("checkpoints/[0-9]*/manifest.json"))


def step_path(directory: Path, step: int) -> Path:
    return directory / "checkpoints" / f"{step:012d}"


# --- round trips ----------------------------------------------------------------------------------


def test_a_round_trip_keeps_every_byte_the_structure_and_the_shardings(tmp_path: Path) -> None:
    state = rich(3)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(7, state, {"frames": 10**12, "name": "é"})
        restored = checkpointer.restore(rich(4))
        assert sealed_steps(checkpointer.run) == [7]
    assert (restored.step, restored.metadata) == (7, {"frames": 10**12, "name": "é"})
    assert fingerprint(restored.state) == fingerprint(state) != fingerprint(rich(4))
    assert jax.tree.structure(restored.state) == jax.tree.structure(state)
    for new, old in zip(jax.tree.leaves(restored.state), jax.tree.leaves(state), strict=True):
        assert type(new) is type(old)
        assert (new.dtype, new.shape) == (old.dtype, old.shape)
        if isinstance(old, jax.Array):
            assert (new.sharding, new.committed) == (old.sharding, old.committed)
    assert stored_fingerprint(tmp_path) == (7, fingerprint(state))


def test_a_checkpoint_without_the_error_of_the_totals_is_read_with_zeros(tmp_path: Path) -> None:
    episodes = jax.device_put(zero_episode_stats(8), SHARDED)
    fields = {name: x + 1 for name, x in vars(episodes).items() if name != "total_error"}
    earlier = dataclasses.make_dataclass("Earlier", fields)
    jax.tree_util.register_dataclass(earlier, [*fields], [])

    def holding(episodes: Any) -> Any:
        return dataclasses.replace(ACTOR, episodes=episodes)

    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, holding(earlier(**fields)), {})
        restored = checkpointer.restore(holding(episodes)).state
    expected = holding(dataclasses.replace(episodes, **fields))
    assert fingerprint(restored) == fingerprint(expected)


def test_a_part_is_read_by_paths_and_nothing_else_is(
    tmp_path: Path, monkeypatch, reports: list[str]
) -> None:
    state = rich(3)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(7, state, {"note": 1})
    size = sum(np.asarray(x).nbytes for x in leaves_by_path(state.shared["linear"]).values())
    monkeypatch.setattr(arrays, "MEMORY_BYTES", size)
    part = load_part(tmp_path, ".shared['linear']")
    assert (part.step, part.metadata) == (7, {"note": 1})
    assert part.state.keys() == leaves_by_path(state.shared["linear"]).keys()
    monkeypatch.undo()
    shared = load_part(tmp_path, ".shared").state
    assert fingerprint(list(shared.values())) == fingerprint(
        [leaves_by_path(state.shared)[path] for path in shared]
    )
    assert reports == []


def test_what_is_saved_is_what_was_there_at_the_call(tmp_path: Path) -> None:
    """The driver donates the state to the next update while it is still being written."""
    wreck = jax.jit(lambda tree: jax.tree.map(lambda x: -1 - x, tree), donate_argnums=0)
    with Checkpointer(tmp_path, keep=5) as checkpointer:
        expected = {}
        for step in range(5):
            state = jax.device_put({"w": jnp.arange(2**18) + step}, SHARDED)
            host = np.full(2**16, step)
            expected[step] = fingerprint({"device": state, "host": host})
            checkpointer.save(step, {"device": state, "host": host}, {})
            jax.block_until_ready(wreck(state))
            state["w"].delete()  # CPU keeps a donated buffer that is being read: no help wanted
            host[:] = -1
    like = {"device": {"w": jnp.arange(2**18)}, "host": host}
    for step, digest in expected.items():
        assert fingerprint(load(tmp_path, like, step).state) == digest


def test_a_sealed_step_is_not_written_again(tmp_path: Path) -> None:
    (first,) = save(tmp_path, 5)
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(5, small(6), {})
    assert stored_fingerprint(tmp_path) == (5, first)


def test_a_fingerprint_sees_values_dtypes_shapes_paths_and_key_kinds() -> None:
    states = [
        {"x": jnp.zeros(4)},
        {"x": jnp.zeros(4).at[3].set(-0.0)},
        {"x": jnp.zeros(4, jnp.int32)},
        {"x": jnp.zeros((2, 2))},
        {"y": jnp.zeros(4)},
        {"x": (jnp.zeros(4),)},
        {"x": jax.random.key(0)},
        {"x": jax.random.key_data(jax.random.key(0))},
        {"x": jax.random.key(0, impl="rbg")},
        {"x": jax.random.key(0, impl="unsafe_rbg")},
    ]
    assert len({fingerprint(state) for state in states}) == len(states)
    whole = {"x": jnp.arange(16.0)}
    assert fingerprint(whole) == fingerprint(jax.device_put(whole, SHARDED))


# --- damage ---------------------------------------------------------------------------------------


def damage(path: Path, rng: random.Random) -> str:
    """One seeded fault in one file of a step."""
    file = rng.choice(sorted(p for p in path.rglob("*") if p.is_file() and p.stat().st_size))
    data = bytearray(file.read_bytes())
    kind = rng.choice(["flip", "flip", "truncate", "zero", "delete", "extend"])
    if kind == "flip":
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == "truncate":
        del data[rng.randrange(len(data)) :]
    elif kind == "zero":
        data = bytearray(len(data))
    elif kind == "extend":
        data += b"\0"
    file.unlink() if kind == "delete" else file.write_bytes(data)
    return f"{kind} {file.relative_to(path)}"


@pytest.mark.figure(3)
@pytest.mark.parametrize("trials", [30, pytest.param(400, marks=pytest.mark.slow)])
def test_random_damage_is_always_found_and_the_step_before_restored(
    trials: int, tmp_path: Path, cases, reports: list[str]
) -> None:
    good, bad = save(tmp_path / "clean", 1, 2)
    rng, handled, like = random.Random(0), Counter(), small()
    for trial in cases(range(trials)):
        directory = tmp_path / "trial"
        shutil.copytree(tmp_path / "clean", directory)
        fault = damage(step_path(directory, 2), rng)
        reports.clear()
        with Checkpointer(directory) as checkpointer:
            restored = checkpointer.restore(like)
        assert (restored.step, fingerprint(restored.state)) == (1, good), (trial, fault)
        assert len(reports) == 1, (trial, fault)
        assert not step_path(directory, 2).exists(), (trial, fault)
        handled[fault.split()[0]] += 1
        shutil.rmtree(directory)
    assert (handled.total(), len(handled)) == (trials, 5)
    assert stored_fingerprint(tmp_path / "clean") == (2, bad)


def plant_symlink(path: Path) -> None:
    file = path / "meta.json"
    file.rename(path.parent / "elsewhere")
    file.symlink_to(path.parent / "elsewhere")


def plant_linked_folder(path: Path) -> None:
    (path / "state").rename(path.parent / "elsewhere")
    (path / "state").symlink_to(path.parent / "elsewhere")


def plant_linked_step(path: Path) -> None:
    path.rename(path.parent / "elsewhere")
    path.symlink_to(path.parent / "elsewhere")


def plant_pipe(path: Path) -> None:
    os.mkfifo(path / "state" / "pipe")


def plant_extra_file(path: Path) -> None:
    (path / "state" / "d" / "extra").write_bytes(b"")


def plant_way_out(path: Path) -> None:
    """A manifest that is consistent in itself, and names a file outside."""
    outside = path.parent / "outside"
    outside.write_bytes(b"secret")
    reseal(path, lambda files: files.update({"../outside": files["meta.json"]}))


def plant_foreign_step(path: Path) -> None:
    shutil.rmtree(path)
    shutil.copytree(path.with_name(f"{1:012d}"), path)


def plant_sparse_file(path: Path) -> None:
    """A terabyte that takes no room: to be refused by its size, not by its hash."""
    os.truncate(path / "meta.json", 2**40)


def plant_nonsense(path: Path) -> None:
    (path / "manifest.json").write_bytes(b"[" * 100_000)


def plant_wrong_types(path: Path) -> None:
    reseal(path, lambda files: files.update({"meta.json": ["size", 1]}))


def plant_huge_manifest(path: Path) -> None:
    os.truncate(path / "manifest.json", 2**40)


def plant_directory_for_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()
    (path / "manifest.json").mkdir()


def reseal(path: Path, change) -> None:
    manifest = json.loads((path / "manifest.json").read_bytes())
    del manifest["sha256"]
    change(manifest["files"])
    (path / "manifest.json").write_bytes(encode_sealed(manifest))


@pytest.mark.figure(16)
@pytest.mark.parametrize(
    "plant",
    [value for name, value in sorted(globals().items()) if name.startswith("plant_")],
    ids=lambda plant: plant.__name__,
)
def test_hostile_content_is_quarantined_and_never_followed(
    tmp_path: Path, plant, reports: list[str]
) -> None:
    good, _ = save(tmp_path, 1, 2)
    plant(step_path(tmp_path, 2))
    with pytest.raises(CheckpointError, match="000000000002"):
        load(tmp_path, small(), step=2)
    with Checkpointer(tmp_path) as checkpointer:
        restored = checkpointer.restore(small())
        assert (restored.step, fingerprint(restored.state)) == (1, good)
        assert sealed_steps(checkpointer.run) == [1]
    assert ["quarantine" in report for report in reports] == [True]
    assert os.path.lexists(tmp_path / "checkpoints" / "quarantine" / f"{2:012d}")


def test_an_explicit_step_is_never_replaced_by_another(tmp_path: Path) -> None:
    save(tmp_path, 1, 2)
    damage(step_path(tmp_path, 2) / "state", random.Random(0))
    with pytest.raises(CheckpointError, match="000000000002"):
        load(tmp_path, small(), step=2)
    with pytest.raises(CheckpointError, match="no checkpoint of update 9, but of 1, 2"):
        load(tmp_path, small(), step=9)
    assert sealed_steps(tmp_path) == [1, 2]


def test_nothing_valid_is_an_error_with_its_exit_code(tmp_path: Path, capsys) -> None:
    with pytest.raises(CheckpointError, match="no valid checkpoint"):
        load(tmp_path / "absent", small())
    for _ in range(2):  # the second time, the name in quarantine is taken
        save(tmp_path, 1)
        damage(step_path(tmp_path, 1) / "state", random.Random(0))
        refused = pytest.raises(CheckpointError, match="no valid checkpoint")
        with Checkpointer(tmp_path) as checkpointer, refused as caught:
            checkpointer.restore(small())
    assert caught.value.exit_code == 65
    assert sorted(os.listdir(tmp_path / "checkpoints" / "quarantine")) == [
        f"{1:012d}",
        f"{1:012d}.1",
    ]
    assert capsys.readouterr().err.count("checkpoint skipped") == 2


def test_a_reader_moves_nothing(tmp_path: Path, reports: list[str]) -> None:
    good, _ = save(tmp_path, 1, 2)
    damage(step_path(tmp_path, 2) / "state", random.Random(0))
    (tmp_path / "checkpoints" / "000000000003.draft").mkdir()  # a save in flight
    before = sorted(tmp_path.rglob("*"))
    assert stored_fingerprint(tmp_path) == (1, good)
    assert load(tmp_path, small()).step == 1
    assert sorted(tmp_path.rglob("*")) == before
    assert len(reports) == 2


# --- whose it is, and what is lost or cannot be read ----------------------------------------------


def own(run: Path, run_id: str, experiment: str = "e") -> Path:
    """A run directory with an identity."""
    run.mkdir(exist_ok=True)
    seal.seal_json(run / "config.json", {"run": {"id": run_id, "experiment": experiment}})
    return run


def listing(run: Path) -> list[Path]:
    return sorted(run.rglob("*"))


@pytest.mark.figure(3)
@pytest.mark.parametrize(("run_id", "experiment"), [("a", "other"), ("b", "e")])
def test_a_checkpoint_of_another_run_is_refused_wherever_it_is_opened(
    tmp_path: Path, run_id: str, experiment: str, reports: list[str]
) -> None:
    run, other = own(tmp_path / "run", "a"), own(tmp_path / "other", run_id, experiment)
    (good,), _ = save(run, 1), save(other, 2)
    shutil.copytree(step_path(other, 2), step_path(run, 2))
    assert stored_fingerprint(run) == (1, good)
    assert load(run, small()).step == 1
    with pytest.raises(CheckpointError, match="belongs to run"):
        load(run, small(), step=2)
    assert step_path(run, 2).exists()
    with Checkpointer(run) as checkpointer:
        assert fingerprint(checkpointer.restore(small()).state) == good
    assert len(reports) == 3
    assert all("step 1 is used instead" in text and "belongs to" in text for text in reports)
    assert (run / "checkpoints" / "quarantine" / f"{2:012d}").exists()


def test_a_run_keeps_no_checkpoint_without_its_configuration(tmp_path: Path) -> None:
    run = own(tmp_path / "run", "a")
    save(run, 1)
    config = bytearray((run / "config.json").read_bytes())
    config[config.index(b'"a"') + 1] ^= 1
    (run / "config.json").write_bytes(config)
    with pytest.raises(CheckpointError, match=r"config\.json has changed since it was sealed"):
        load(run, small())
    (run / "config.json").unlink()
    with pytest.raises(CheckpointError, match="no valid checkpoint"):
        load(run, small())


def test_retention_deletes_no_checkpoint_of_another_run(tmp_path: Path) -> None:
    run, other = own(tmp_path / "run", "a"), own(tmp_path / "other", "b")
    save(other, 1)
    save(run, 2)
    shutil.copytree(step_path(other, 1), step_path(run, 1))
    save(run, 3, 4, keep=1)
    with Checkpointer(run) as checkpointer:
        assert sealed_steps(checkpointer.run) == [1, 4]


def test_a_failed_deletion_says_that_the_checkpoint_is_saved(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        (step_path(tmp_path, 1).with_suffix(".removed") / "held").mkdir(parents=True)
        checkpointer.save(2, small(2), {})
        with pytest.raises(StorageError, match="step 2 is saved, but older ones could not"):
            checkpointer.wait()
    assert sealed_steps(tmp_path) == [1, 2]


LOSSES = {
    "the directory": lambda run: shutil.rmtree(run / "checkpoints"),
    "all manifests": lambda run: [
        path.unlink() for path in (run / "checkpoints").glob("*/manifest.json")
    ],
    "all steps": lambda run: [shutil.rmtree(step_path(run, step)) for step in (1, 2)],
}


@pytest.mark.figure(3)
@pytest.mark.parametrize("loss", LOSSES)
def test_lost_checkpoints_are_not_taken_for_a_run_that_saved_none(
    tmp_path: Path, loss: str
) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        assert not checkpointer.has_saved()
    save(tmp_path, 1, 2)
    files = [path.name for path in listing(tmp_path / "checkpoints") if path.is_file()]
    LOSSES[loss](tmp_path)
    for _ in range(2):
        refused = pytest.raises(CheckpointError, match="no valid checkpoint, but one was saved")
        with Checkpointer(tmp_path) as checkpointer, refused:
            assert checkpointer.has_saved()
            checkpointer.restore(small())
    if loss == "all manifests":  # nothing else is deleted
        aside = listing(tmp_path / "checkpoints" / "quarantine")
        left = [path.name for path in aside if path.is_file()]
        assert sorted(left) == sorted(name for name in files if name != "manifest.json")


@pytest.mark.parametrize("lost", ["manifest.json", "."])
def test_a_fall_back_is_said(tmp_path: Path, lost: str, reports: list[str]) -> None:
    good, _ = save(tmp_path, 1, 2)
    path = step_path(tmp_path, 2) / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert stored_fingerprint(tmp_path) == (1, good)
    with Checkpointer(tmp_path) as checkpointer:
        assert checkpointer.restore(small()).step == 1
    assert ["step 1 is used instead" in report for report in reports] == [True, True]
    if lost != ".":
        assert (tmp_path / "checkpoints" / "quarantine" / f"{2:012d}" / "meta.json").exists()


@pytest.mark.figure(3)
def test_an_error_of_reading_is_no_damage(
    tmp_path: Path, monkeypatch, cases, reports: list[str]
) -> None:
    """It is tried again, and ends the run (73) with the name of the file; nothing is touched."""
    _, best = save(tmp_path, 1, 2)
    before = listing(tmp_path)
    monkeypatch.setattr(seal, "RETRY_SECONDS", (0.0, 0.0))
    calls = ("open", "stat", "scandir", "listdir")
    codes = (errno.EACCES, errno.EIO, errno.EMFILE, errno.ESTALE)
    with Checkpointer(tmp_path) as checkpointer:
        for call, code in cases(list(itertools.product(calls, codes))):
            attempts = []
            real = getattr(os, call)

            def refuse(path, *arguments, call=call, code=code, attempts=attempts, real=real, **etc):
                if (f"{2:012d}" if call != "listdir" else "checkpoints") in str(path):
                    attempts.append(path)
                    raise OSError(code, os.strerror(code), str(path))
                return real(path, *arguments, **etc)

            for read in (lambda: checkpointer.restore(small()), lambda: load(tmp_path, small())):
                with monkeypatch.context() as patch:
                    patch.setattr(os, call, refuse)
                    with pytest.raises(StorageError) as failed:
                        read()
                assert f"{attempts[-1]} cannot be read" in str(failed.value)
                assert failed.value.exit_code == 73
            assert len(attempts) == 6
            assert listing(tmp_path) == before
        assert fingerprint(checkpointer.restore(small()).state) == best
    assert reports == []


@pytest.mark.parametrize("moment", ["steps.verify_seal", "checkpoint.read_arrays"])
@pytest.mark.parametrize("reader", [load, stored_fingerprint])
def test_a_step_that_its_run_deletes_meanwhile_is_chosen_again(
    tmp_path: Path, monkeypatch, moment: str, reader, reports: list[str]
) -> None:
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        checkpointer.save(1, small(1), {})
        checkpointer.save(2, small(2), {"best": {"updates": 1}})  # which stays
        checkpointer.wait()

        def late(*arguments):
            monkeypatch.undo()
            checkpointer.save(3, small(3), {"best": {"updates": 1}})
            checkpointer.wait()
            return real(*arguments)

        target = f"podracer.io.{moment}"
        real = pydoc.locate(target)
        monkeypatch.setattr(target, late)
        arguments = (tmp_path, small()) if reader is load else (tmp_path,)
        result = reader(*arguments)
        assert (result.step if reader is load else result[0]) == 3
        assert sealed_steps(checkpointer.run) == [1, 3]
    assert reports == []


def test_a_step_that_is_deleted_again_and_again_is_given_up(tmp_path: Path, monkeypatch) -> None:
    save(tmp_path, *range(9), keep=9)
    lost = []

    def delete(path: Path) -> None:
        shutil.rmtree(path)
        lost.append(path)
        raise CheckpointError("it is gone")

    monkeypatch.setattr(steps, "verify_seal", delete)
    with pytest.raises(CheckpointError, match="it is gone"):
        load(tmp_path, small())
    assert len(lost) == 5


def test_an_error_of_reading_that_passes_costs_nothing(
    tmp_path: Path, monkeypatch, reports: list[str]
) -> None:
    _, best = save(tmp_path, 1, 2)
    errors = [OSError(errno.ESTALE, "stale"), OSError(errno.EMFILE, "many"), None, None]
    real = seal.file_digest

    def flaky(path: Path, **options: bool) -> str:
        if errors and (error := errors.pop(0)):
            raise error
        return real(path, **options)

    monkeypatch.setattr(seal, "RETRY_SECONDS", (0.0, 0.0))
    monkeypatch.setattr(seal, "file_digest", flaky)
    assert stored_fingerprint(tmp_path) == (2, best)
    assert reports == []


@pytest.mark.parametrize("target", ["checkpoints", "nowhere"])
def test_a_link_that_leads_nowhere_is_a_loss(tmp_path: Path, target: str) -> None:
    save(tmp_path, 1)
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").symlink_to(target)
    with pytest.raises(CheckpointError, match="no valid checkpoint, but one was saved"):
        load(tmp_path, small())


@pytest.mark.figure(16)
def test_links_are_not_followed_for_writing_or_deleting(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "000000000007.draft").mkdir(parents=True)
    for name in ("checkpoints", "file"):
        run = tmp_path / name
        run.mkdir()
        (run / "checkpoints").symlink_to(outside) if name != "file" else (
            run / "checkpoints"
        ).touch()
        with pytest.raises(ConfigError, match="a directory of the run itself, not a link"):
            Checkpointer(run)
    run = tmp_path / "run"
    save(run, 1, 2)
    damage(step_path(run, 2) / "state", random.Random(0))
    (run / "checkpoints" / "quarantine").symlink_to(outside)
    with Checkpointer(run) as checkpointer, pytest.raises(ConfigError, match="quarantine must be"):
        checkpointer.restore(small())
    assert os.listdir(outside) == ["000000000007.draft"]
    assert step_path(run, 2).exists()


@pytest.mark.parametrize("replaced", [False, True])
def test_a_directory_that_vanishes_under_a_run_ends_it(tmp_path: Path, replaced: bool) -> None:
    run = tmp_path / "run"
    with Checkpointer(run) as checkpointer:
        checkpointer.save(1, small(), {})
        checkpointer.wait()
        run.rename(tmp_path / "away")
        if replaced:
            (run / "checkpoints").mkdir(parents=True)
        with pytest.raises(StorageError, match="is gone"):
            checkpointer.check()
        with pytest.raises(StorageError, match="is gone"):
            checkpointer.save(2, small(), {})
    assert listing(tmp_path / "run") == [run / "checkpoints"] * replaced


# --- misfits --------------------------------------------------------------------------------------

SAVED = {"w": jnp.ones((2, 3)), "n": jnp.int32(1), "k": jax.random.key(0), "zero": jnp.ones((0,))}
MISFITS = {
    "dtype": (SAVED | {"w": jnp.ones((2, 3), jnp.bfloat16)}, r"\['w'\] is float32\[2, 3\] in the "
              r"checkpoint, bfloat16\[2, 3\] expected"),
    "dtype of the same size": (SAVED | {"n": jnp.uint32(1)}, "int32.*uint32"),
    "dtype of an empty leaf": (SAVED | {"zero": jnp.ones((0,), jnp.int8)}, "zero"),
    "shape": (SAVED | {"w": jnp.ones((3, 2))}, r"\[2, 3\].*\[3, 2\]"),
    "one more row": (SAVED | {"w": jnp.ones((3, 3))}, r"\[3, 3\]"),
    "rank": (SAVED | {"n": jnp.ones((1,), jnp.int32)}, r"int32\[\].*int32\[1\]"),
    "missing": (SAVED | {"m": jnp.ones(1)}, r"\['m'\] is absent"),
    "left out": ({"w": SAVED["w"]}, r"\['k'\].*absent expected; \['n'\]"),
    "renamed": ({"v" if k == "w" else k: v for k, v in SAVED.items()}, r"\['v'\].*\['w'\]"),
    "nested": ({"inner": SAVED}, r"\['inner'\]\['k'\]"),
    "sequence for dictionary": (list(SAVED.values()), r"\[0\]"),
    "key implementation": (SAVED | {"k": jax.random.key(0, impl="rbg")}, "threefry2x32.*rbg"),
    "raw for typed key": (SAVED | {"k": jax.random.key_data(SAVED["k"])}, "threefry2x32 keys"),
    "batch of keys": (SAVED | {"k": jax.random.split(SAVED["k"])}, r"uint32\[2, 2\]"),
    "not an array": (SAVED | {"n": 1}, r"\['n'\] is of type int, not an array"),
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(1, SAVED, {})
    return directory


@pytest.mark.figure(10)
@pytest.mark.parametrize("misfit", MISFITS)
def test_a_state_that_does_not_fit_is_refused_with_the_difference(saved: Path, misfit: str) -> None:
    like, message = MISFITS[misfit]
    with Checkpointer(saved) as checkpointer:
        with pytest.raises(CheckpointError, match=message):
            checkpointer.restore(like)
        assert sealed_steps(checkpointer.run) == [1]  # a misfit is not damage


@pytest.mark.figure(10)
def test_a_dtype_that_jax_would_narrow_is_refused(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"n": np.arange(2)}, {})
        with pytest.raises(CheckpointError, match=r"int64\[2\] in the checkpoint.*int32"):
            checkpointer.restore({"n": jax.ShapeDtypeStruct((2,), np.int64)})


def forge(path: Path, **changes: object) -> None:
    """Rewrite meta.json and seal it again, as somebody with another version would."""
    meta = json.loads((path / "meta.json").read_bytes()) | changes
    (path / "meta.json").write_bytes(encode_json(meta))
    seal.seal(path)


@pytest.mark.figure(10)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 1}, "format 1"),
        ({"schema": {"['w']": [[2, 3], "float64", None]}}, "do not match meta.json"),
        ({"schema": {"['w']": [[10**15], "float32", None]}}, "do not match meta.json"),
        ({"schema": {"['w']": [["__import__"], {}, []]}}, "do not match meta.json"),
        ({"schema": {"['w']": 3}}, "not usable"),
        ({"schema": None}, "not usable"),
        ({"metadata": "no"}, "not usable"),
    ],
)
def test_a_forged_schema_is_refused_before_anything_is_read(
    saved: Path, tmp_path: Path, changes: dict, message: str, reports: list[str]
) -> None:
    shutil.copytree(saved, tmp_path / "forged")
    forge(step_path(tmp_path / "forged", 1), **changes)
    with pytest.raises(CheckpointError) as refused:
        stored_fingerprint(tmp_path / "forged")
    assert message in f"{refused.value} {reports}"


@pytest.mark.figure(16)
def test_arrays_beyond_memory_are_refused_before_they_are_read(saved: Path, monkeypatch) -> None:
    monkeypatch.setattr(arrays, "MEMORY_BYTES", 20)
    with pytest.raises(CheckpointError, match="36 bytes, more than this machine's"):
        stored_fingerprint(saved)


# --- retention and leftovers ----------------------------------------------------------------------


def test_the_best_step_is_kept_as_long_as_a_step_names_it(tmp_path: Path) -> None:
    best_of = {1: 1, 2: 1, 3: 1, 4: 4, 5: 4, 6: 4, 7: 4}
    kept = [[1], [1, 2], [1, 2, 3], [1, 3, 4], [4, 5], [4, 5, 6], [4, 6, 7]]
    with Checkpointer(tmp_path, keep=2) as checkpointer:
        for (step, best), steps in zip(best_of.items(), kept, strict=True):
            checkpointer.save(step, small(step), {"best": {"updates": best}})
            checkpointer.wait()
            assert sealed_steps(checkpointer.run) == steps
            restored = load(tmp_path, small(), "best")
            assert (restored.step, fingerprint(restored.state)) == (best, fingerprint(small(best)))


@pytest.mark.figure(3)
def test_a_best_step_that_is_lost_is_refused_and_no_other_taken(
    tmp_path: Path, cases, reports: list[str]
) -> None:
    run, other = own(tmp_path / "run", "a"), own(tmp_path / "other", "b")
    for directory in (run, other):
        with Checkpointer(directory) as checkpointer:
            for step in (1, 2):
                checkpointer.save(step, small(step), {"best": {"updates": 1}})
    path = step_path(run, 1)

    def lose() -> None:
        shutil.rmtree(path)

    def swap() -> None:
        shutil.rmtree(path)
        shutil.copytree(step_path(other, 1), path)

    def rename() -> None:
        shutil.rmtree(path)
        shutil.copytree(step_path(run, 2), path)

    for change in cases([lambda: damage(path, random.Random(0)), swap, rename, lose]):
        change()
        with pytest.raises(CheckpointError, match="the best checkpoint is lost: "):
            load(run, small(), "best")
        assert load(run, small()).step == 2
    assert reports == []


def test_no_older_best_step_is_taken_where_the_newest_step_is_lost(tmp_path: Path) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, small(step), {"best": {"updates": step}})
    damage(step_path(tmp_path, 2), random.Random(0))
    assert load(tmp_path, small()).step == 1
    with pytest.raises(CheckpointError, match="the best checkpoint is lost: only step 2 named it"):
        load(tmp_path, small(), "best")


@pytest.mark.parametrize("metadata", [{}, {"best": None}, {"best": []}, {"best": {"updates": "1"}}])
def test_a_choice_that_no_checkpoint_fits_is_refused(tmp_path: Path, metadata: dict) -> None:
    with Checkpointer(tmp_path) as checkpointer:
        for step in (5, 10):
            checkpointer.save(step, small(step), metadata)
    assert load(tmp_path, small(), 5).step == 5
    with pytest.raises(CheckpointError, match="has no best checkpoint"):
        load(tmp_path, small(), "best")
    for step in (-1, 6, 10**12):
        with pytest.raises(CheckpointError, match=f"no checkpoint of update {step}, but of 5, 10"):
            load(tmp_path, small(), step)


def files_of(path: Path) -> dict[str, int]:
    """Size of each file of a step but the manifest, by its path."""
    paths = (file for file in path.rglob("*") if file.is_file() and file.name != seal.MANIFEST)
    return {file.relative_to(path).as_posix(): file.stat().st_size for file in paths}


def test_a_save_hashes_each_byte_once_and_so_does_a_restore(tmp_path: Path, monkeypatch) -> None:
    """A new best or the end of an old step reads nothing once more."""
    hashed: list[Path] = []
    real = seal.file_digest

    def count(path: Path, **options: bool) -> str:
        hashed.append(path)
        return real(path, **options)

    monkeypatch.setattr(seal, "file_digest", count)
    with Checkpointer(tmp_path, keep=1) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, small(step), {"best": {"updates": step}})
            checkpointer.wait()
            draft, sizes = step_path(tmp_path, step).with_suffix(".draft"), Counter()
            for path in hashed:
                name = path.relative_to(draft).as_posix()
                sizes[name] += (step_path(tmp_path, step) / name).stat().st_size
            assert sizes == files_of(step_path(tmp_path, step))
            assert sealed_steps(checkpointer.run) == [step]
            hashed.clear()
        checkpointer.restore(small())
        names = [path.relative_to(step_path(tmp_path, 3)).as_posix() for path in hashed]
        assert sorted(names) == sorted(files_of(step_path(tmp_path, 3)))


def test_files_that_another_process_hashed_are_not_read(tmp_path: Path, monkeypatch) -> None:
    step = tmp_path / "1"
    for name, content in (("theirs", b"123"), ("ours", b"4")):
        (step / name).mkdir(parents=True)
        (step / name / "data").write_bytes(content)
    of_others = {f"theirs/{k}": entry for k, entry in seal.digest_files(step / "theirs").items()}
    with monkeypatch.context() as patch:
        real = seal.file_digest
        own = {step / "ours" / "data": real}
        patch.setattr(seal, "file_digest", lambda path, sync: own[path](path, sync=sync))
        seal.seal(step, digests=of_others)
    seal.verify_seal(step)
    (step / "theirs" / "data").write_bytes(b"1234")  # this machine sees another file than that one
    with pytest.raises(OSError, match="other files than are here"):
        seal.seal(step, digests=of_others)
    (step / "theirs" / "data").unlink()
    with pytest.raises(OSError, match="other files than are here"):
        seal.seal(step, digests=of_others)


def test_a_deletion_cut_short_leaves_debris_and_not_a_damaged_step(
    tmp_path: Path, monkeypatch, reports: list[str]
) -> None:
    save(tmp_path, 1)

    def half(path: Path, ignore_errors: bool = False) -> None:
        if path.suffix == ".removed":
            (path / "meta.json").unlink()
            if not ignore_errors:  # as where a reader of a network's disk holds a file open
                raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.shutil, "rmtree", half)
        save(tmp_path, 2, keep=1)
    assert (tmp_path / "checkpoints" / "000000000001.removed").is_dir()
    with Checkpointer(tmp_path) as checkpointer:
        assert sealed_steps(checkpointer.run) == [2]
        assert checkpointer.restore(small()).step == 2
    assert reports == []


def test_leftovers_of_killed_saves_are_swept_and_nothing_else(tmp_path: Path) -> None:
    (good,) = save(tmp_path, 1)
    folder = tmp_path / "checkpoints"
    debris = [folder / "000000000002.draft", folder / "000000000000.removed"]
    for path in debris:
        (path / "state.orbax-checkpoint-tmp").mkdir(parents=True)
        (path / "meta.json").write_text("{}")
    debris.append(tmp_path / ".saved.json.13085.140009675937472")
    debris[-1].write_text("{")
    others = [folder / name for name in ("3", "quarantine", "000000000004.mine", "000000000004")]
    for other in others:
        other.mkdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    step_path(tmp_path, 5).symlink_to(elsewhere)
    with Checkpointer(tmp_path) as checkpointer:
        assert not any(path.exists() for path in debris)
        assert all(other.is_dir() for other in [*others, elsewhere])
        checkpointer.save(2, small(2), {})
    assert stored_fingerprint(tmp_path) == (2, fingerprint(small(2)))
    assert fingerprint(load(tmp_path, small(), step=1).state) == good


# --- the disk refuses -----------------------------------------------------------------------------


def settle(checkpointer: Checkpointer) -> None:
    """Poll `check` as a driver does, until the save in flight has failed."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        checkpointer.check()
        time.sleep(0.01)


def test_a_full_disk_surfaces_at_the_next_check_and_costs_only_that_step(tmp_path: Path) -> None:
    (good,) = save(tmp_path, 1)
    noise = {"x": np.random.default_rng(0).random(2**19)}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with Checkpointer(tmp_path) as checkpointer:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
        try:
            checkpointer.save(2, noise, {})
            with pytest.raises(StorageError, match="step 2 could not be written") as caught:
                settle(checkpointer)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert caught.value.exit_code == 73
        assert isinstance(caught.value, OSError)
        assert not step_path(tmp_path, 2).exists()
        assert fingerprint(checkpointer.restore(small()).state) == good
        checkpointer.save(2, noise, {})
    assert stored_fingerprint(tmp_path) == (2, fingerprint(noise))


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_an_error_while_sealing_leaves_no_half_step(tmp_path: Path, monkeypatch, call: str) -> None:
    (good,) = save(tmp_path, 1)

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    checkpointer = Checkpointer(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(rundir.os, call, refuse)
        checkpointer.save(2, small(2), {})
        with pytest.raises(StorageError, match=r"step 2 could not be written.*No space left"):
            checkpointer.save(3, small(3), {})
        checkpointer.save(3, small(3), {})
        with pytest.raises(StorageError, match=r"step 3 could not be written.*No space left"):
            checkpointer.close()
    assert stored_fingerprint(tmp_path) == (1, good)
    assert os.listdir(tmp_path / "checkpoints") == [f"{1:012d}"]


def test_the_first_error_is_the_one_that_leaves_the_context(
    tmp_path: Path, monkeypatch, reports: list[str]
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(checkpoint, "seal", refuse)

    def run() -> None:
        with Checkpointer(tmp_path) as checkpointer:
            checkpointer.save(1, small(), {})
            raise KeyError("the cause")

    with pytest.raises(KeyError, match="the cause"):
        run()
    assert ["Input/output error" in report for report in reports] == [True]


# --- killed ---------------------------------------------------------------------------------------


def launch(*arguments: object, **environment: str) -> subprocess.Popen[str]:
    root = Path(checkpoint.__file__).parents[2]
    return subprocess.Popen(
        [sys.executable, "-c", *map(str, arguments)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(root), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


TWO_PROCESSES = """
import json, sys
from pathlib import Path
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", 2)
rank, address = int(sys.argv[2]), sys.argv[3]
jax.distributed.initialize(address, num_processes=2, process_id=rank)
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from podracer.io.checkpoint import Checkpointer
from podracer.errors import CheckpointError
from podracer.io import seal

hashed, real = {}, seal.file_digest
def count(path, **options):
    name = str(path).replace(".draft", "")
    assert name not in hashed, name
    hashed[name] = path.stat().st_size
    return real(path, **options)
seal.file_digest = count

mesh = Mesh(np.array(jax.devices()), ("data",))
def state(step):
    rows = np.arange(8.0, dtype=np.float32) + step
    sharding = NamedSharding(mesh, P("data"))
    make = jax.make_array_from_callback
    return {
        "local": make((8,), sharding, lambda index: rows[index]),
        "shared": make((8,), NamedSharding(mesh, P()), lambda index: rows[index]),
        "keys": jax.jit(
            lambda: jax.random.split(jax.random.key(step), 8), out_shardings=sharding
        )(),
    }
def values(tree):
    arrays = tree | {"keys": jax.random.key_data(tree["keys"])}
    return [s.data.tolist() for _, a in sorted(arrays.items()) for s in a.addressable_shards]

with Checkpointer(Path(sys.argv[1]), keep=2) as checkpointer:
    for step in (1, 2, 3, 3):
        checkpointer.save(step, state(step), {"step": step})
    checkpointer.wait()
    saved = dict(hashed)
    hashed.clear()
    like = state(0)
    restored = checkpointer.restore(like)
    assert restored.step == 3 and restored.metadata == {"step": 3}
    assert values(restored.state) == values(state(3)) != values(like)
    assert all(restored.state[name].sharding == like[name].sharding for name in like)
    (Path(sys.argv[1]) / f"{rank}.json").write_text(json.dumps([saved, hashed]))
    def damage(step):  # a file that the other process wrote
        if rank == 1:
            names = [name for name in saved if f"{step:012d}" in name]
            target = Path(max(names, key=saved.get))
            target.write_bytes(bytes(saved[str(target)]))
        multihost_utils.sync_global_devices(f"damaged {step}")
        hashed.clear()
    damage(3)
    restored = checkpointer.restore(like)
    assert restored.step == 2 and values(restored.state) == values(state(2))
    damage(2)
    try:
        checkpointer.restore(like)
        raise SystemExit("restored a step that is damaged")
    except CheckpointError:
        print("done")
jax.distributed.shutdown()
"""


@pytest.mark.slow
def test_two_processes_share_one_directory(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    flags = {"XLA_FLAGS": ""}
    children = [launch(TWO_PROCESSES, tmp_path, rank, address, **flags) for rank in range(2)]
    try:
        outputs = [child.communicate(timeout=90)[0] for child in children]
        for child, output in zip(children, outputs, strict=True):
            assert (child.returncode, "done" in output) == (0, True), output
    finally:
        for child in children:
            child.kill()
    *_, kept, newest = sorted((tmp_path / "checkpoints" / "quarantine").iterdir())
    assert (int(kept.name), int(newest.name)) == (2, 3)
    saved, read = zip(
        *(json.loads((tmp_path / f"{rank}.json").read_bytes()) for rank in range(2)), strict=True
    )
    assert not saved[0].keys() & saved[1].keys()
    assert not read[1]
    step = f"{step_path(tmp_path, 2)}/"
    both = {name: size for name, size in (saved[0] | saved[1]).items() if name.startswith(step)}
    assert both == {step + name: size for name, size in files_of(kept).items()}
    assert {"ocdbt.process_1" in name for name in saved[1]} == {True}
    assert not any("ocdbt.process_1" in name for name in saved[0])
    assert len(saved[1]) > 0
    step = f"{step_path(tmp_path, 3)}/"
    both = {name: size for name, size in (saved[0] | saved[1]).items() if name.startswith(step)}
    assert read[0] == both


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
