"""Checkpoints that are restored completely and unchanged, or rejected.

`checkpoints/<step>/` holds `state/` (Orbax), `meta.json` (schema and metadata) and, written last,
`manifest.json` with size and SHA-256 of every file and of itself. Only a step whose manifest agrees
with every byte is restored: Orbax alone restores flipped bits silently, and casts dtypes.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import hashlib
import itertools
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils  # no stable home yet

from podracer.io.run_directory import (
    MANIFEST,
    encode_json,
    read_limited,
    seal,
    verify_seal,
    write_bytes,
)
from podracer.io.schema import Schema, leaves_by_path, schema, schema_difference
from podracer.types import CheckpointError, PodracerError, PyTree

Report = Callable[[str], None]

_FORMAT = 1
_STEP = re.compile(r"[0-9]{12}")
_MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # bytes


def _to_stderr(message: str) -> None:
    print(f"podracer: {message}", file=sys.stderr)


class StorageError(PodracerError, OSError):
    """A checkpoint could not be written; earlier ones are untouched."""

    exit_code = 73


@dataclasses.dataclass(frozen=True)
class Restored:
    """A restored checkpoint, its arrays on their devices."""

    step: int
    state: PyTree  # structure, shapes, dtypes and shardings of `like`
    metadata: dict[str, Any]


class Checkpointer:
    """Writer and reader of the checkpoints of one run; a context manager.

    Only the holder of the run's lock may have one, because it first removes the remains of
    interrupted saves in `directory`. Readers of a run that may still be running use `load`.

    With several processes (`jax.distributed`) all share `directory` and must make the same calls of
    `save` and `restore`; process 0 decides, seals and deletes, so `wait` guarantees the seal only
    there.

    Args:
        directory: usually `RUN/checkpoints`.
        keep: number of sealed steps to keep; an older one is deleted once a newer one was verified.
        report: called with one sentence for each damaged step.
    """

    def __init__(self, directory: Path, *, keep: int = 3, report: Report = _to_stderr) -> None:
        if keep < 1:
            raise ValueError(f"keep is {keep}; at least one checkpoint must stay")
        self.directory = Path(directory).absolute()
        self._keep = keep
        self._report = report
        self._orbax = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
        self._worker = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._pending: concurrent.futures.Future[None] | None = None
        if jax.process_index() == 0:
            self.directory.mkdir(parents=True, exist_ok=True)
            for path in _step_directories(self.directory):
                if not _is_sealed(path) and path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)

    def save(self, step: int, state: PyTree, metadata: dict[str, Any]) -> None:
        """Start to save `state` under `step`; a sealed step stays unchanged.

        Waits for the previous save, then returns once `state` is copied to the host: its buffers
        may be donated or overwritten at once. `metadata` must be JSON-serializable.
        Raises `StorageError` if this save or the previous one failed.
        """
        self.wait()
        target = self.directory / _name(step)
        if _from_first_process(lambda: _is_sealed(target)):
            return
        meta = encode_json({"format": _FORMAT, "schema": schema(state), "metadata": metadata})
        leaves = {
            path: leaf for path, leaf in leaves_by_path(state).items() if leaf.size
        }  # Orbax's limit
        try:
            if jax.process_index() == 0:
                shutil.rmtree(target, ignore_errors=True)  # remains of a failed save
                target.mkdir()
            arrays = {path: _data(leaf) for path, leaf in leaves.items()}
            self._orbax.save(target / "state", args=ocp.args.PyTreeSave(arrays))
        except OSError as error:
            raise _storage_error(step, error) from error
        self._pending = self._worker.submit(self._finish, target, meta)

    def check(self) -> None:
        """Raise the `StorageError` of a save that has failed in the background; never block."""
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the last save is sealed. Raises `StorageError` if it failed."""
        if self._pending is not None:
            concurrent.futures.wait([self._pending])
            pending, self._pending = self._pending, None
            pending.result()

    def restore(self, like: PyTree, step: int | None = None) -> Restored:
        """Restore the newest valid checkpoint, or exactly `step`, in the structure of `like`.

        Each leaf of `like` is an array or a `ShapeDtypeStruct`, and its sharding is that of the
        restored leaf (host for numpy arrays, default device if there is none). A damaged step is
        reported and moved to `quarantine/`, and the previous one is used, unless `step` is given.
        Raises `CheckpointError` if no step is valid, or if shapes, dtypes, keys or paths differ
        from `like`: nothing is ever cast, padded or left out.
        """
        self.wait()
        aside = self.directory / "quarantine"
        newest = _from_first_process(lambda: _valid_step(self.directory, step, self._report, aside))
        return _read(self.directory / _name(newest), like)

    def steps(self) -> list[int]:
        """Return the sealed steps, oldest first, without verifying their bytes."""
        return [int(path.name) for path in _step_directories(self.directory) if _is_sealed(path)]

    def close(self) -> None:
        """Seal the last save and release the threads. Raises `StorageError` if it failed."""
        try:
            self.wait()
        finally:
            self._worker.shutdown()
            self._orbax.close()

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except StorageError as late:
            if error is None:
                raise
            self._report(str(late))  # the first error is raised

    def _finish(self, target: Path, meta: bytes) -> None:
        step, first = int(target.name), jax.process_index() == 0
        try:
            self._orbax.wait_until_finished()  # on process 0: until all processes have written
            if first:
                write_bytes(target / "meta.json", meta)
                seal(target)
                self._retire(step)
        except Exception as error:
            if first and not _is_sealed(target):
                shutil.rmtree(target, ignore_errors=True)
            raise _storage_error(step, error) from error

    def _retire(self, step: int) -> None:
        old = [s for s in self.steps() if s <= step][: -self._keep]
        if old:
            verify_seal(self.directory / _name(step))
        for path in (self.directory / _name(s) for s in old):
            # Unsealed first: after a kill half way there are remains to remove, not a damaged step.
            (path / MANIFEST).unlink()
            shutil.rmtree(path)


def load(
    directory: Path, like: PyTree, step: int | None = None, *, report: Report = _to_stderr
) -> Restored:
    """Restore as `Checkpointer.restore` does, moving nothing: the run may still be running."""
    directory = Path(directory).absolute()
    return _read(directory / _name(_valid_step(directory, step, report)), like)


def fingerprint(state: PyTree) -> str:
    """Return the SHA-256 over path, dtype, shape, key implementation and bytes of all leaves.

    Leaves are sorted by path. Every leaf must be addressable in this process.
    """
    leaves = leaves_by_path(state)
    return _digest(schema(state), lambda path: np.asarray(_data(leaves[path])))


def stored_fingerprint(directory: Path, *, report: Report = _to_stderr) -> tuple[int, str]:
    """Return the newest valid step and the `fingerprint` of its state.

    Reads by the checkpoint's own schema and moves nothing. Raises `CheckpointError` if no step is
    valid, or if it declares more than this machine's memory.
    """
    directory = Path(directory).absolute()
    step = _valid_step(directory, None, report)
    path = directory / _name(step)
    stored = _meta(path)["schema"]
    return step, _digest(stored, _read_arrays(path, stored, dict.fromkeys(stored)).__getitem__)


def _digest(entries: Schema, array: Callable[[str], np.ndarray]) -> str:
    digest = hashlib.sha256()
    for path in sorted(entries):
        digest.update(encode_json([path, *entries[path]]))
        digest.update(np.ascontiguousarray(array(path)).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _valid_step(
    directory: Path, step: int | None, report: Report, quarantine: Path | None = None
) -> int:
    if step is not None:
        verify_seal(directory / _name(step))
        return step
    for path in reversed(_step_directories(directory)):
        if _is_sealed(path):
            try:
                verify_seal(path)
                return int(path.name)
            except CheckpointError as fault:
                moved = f"; moved to {_move(path, quarantine)}" if quarantine else ""
                report(f"damaged checkpoint skipped: {fault}{moved}")
    raise CheckpointError(f"{directory} has no valid checkpoint")


def _move(path: Path, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    names = itertools.chain([path.name], (f"{path.name}.{n}" for n in itertools.count(1)))
    return path.rename(next(folder / n for n in names if not os.path.lexists(folder / n)))


def _read(path: Path, like: PyTree) -> Restored:
    meta, leaves, expected = _meta(path), leaves_by_path(like), schema(like)
    if meta["schema"] != expected:
        raise CheckpointError(f"{path} does not fit: {schema_difference(meta['schema'], expected)}")
    arrays = _read_arrays(path, expected, {name: _sharding(leaf) for name, leaf in leaves.items()})
    placed = [_place(leaf, arrays[name], expected[name][2]) for name, leaf in leaves.items()]
    state = jax.tree.unflatten(jax.tree.structure(like), placed)
    if schema(state) != expected:
        raise CheckpointError(
            f"{path} cannot be represented here: {schema_difference(expected, schema(state))}"
        )
    return Restored(int(path.name), state, meta["metadata"])


def _read_arrays(
    path: Path, entries: Schema, shardings: dict[str, jax.sharding.Sharding | None]
) -> dict[str, Any]:
    """Read arrays by path: onto their devices, or onto the host where there is no sharding."""
    stored = {name: entry for name, entry in entries.items() if 0 not in entry[0]}
    host = ocp.RestoreArgs(restore_type=np.ndarray)
    targets = {
        name: ocp.ArrayRestoreArgs(sharding=place) if (place := shardings[name]) else host
        for name in stored
    }
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        try:
            stored_arrays = reader.metadata(path / "state").item_metadata.tree
            declared = {
                name: [list(a.shape), np.dtype(a.dtype).name] for name, a in stored_arrays.items()
            }
            if declared != {name: entry[:2] for name, entry in stored.items()}:
                raise CheckpointError(f"{path}: the arrays do not match meta.json")
            size = sum(
                math.prod(a.shape) * np.dtype(a.dtype).itemsize for a in stored_arrays.values()
            )
            if not any(shardings.values()) and size > _MEMORY:
                raise CheckpointError(f"{path} holds {size:,} bytes, more than this machine's RAM")
            item = ocp.args.PyTreeRestore(dict.fromkeys(targets, 0), restore_args=targets)
            arrays = reader.restore(path / "state", args=item)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{path}: Orbax cannot read the arrays: {error}") from error
    return {n: arrays[n] if n in stored else np.zeros(*entry[:2]) for n, entry in entries.items()}


def _meta(path: Path) -> dict[str, Any]:
    """Parse `meta.json` of a verified step; it is untrusted, so check every type."""
    try:
        meta = json.loads(read_limited(path / "meta.json"))
        if meta["format"] != _FORMAT:
            raise CheckpointError(f"{path} has format {meta['format']!r}, not {_FORMAT}")
        schema = {path: [list(s), str(d), i] for path, (s, d, i) in meta["schema"].items()}
        return {"schema": schema, "metadata": dict(meta["metadata"])}
    except (OSError, AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: meta.json is not usable: {error}") from error


def _name(step: int) -> str:
    if not 0 <= step < 10**12:
        raise ValueError(f"step {step} is not within 0 and 10**12")
    return f"{step:012d}"


def _step_directories(directory: Path) -> list[Path]:
    names = sorted(os.listdir(directory)) if directory.is_dir() else []
    return [directory / name for name in names if _STEP.fullmatch(name)]


def _is_sealed(path: Path) -> bool:
    return os.path.lexists(path / MANIFEST)


def _data(leaf: Any) -> Any:
    """Return the array that is stored for a leaf."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if isinstance(leaf, jax.Array) and leaf.is_fully_replicated and leaf.is_fully_addressable:
        # Orbax would have each device slice and send its part: a kernel per device and leaf.
        return leaf.addressable_data(0)
    return leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)


def _sharding(leaf: Any) -> jax.sharding.Sharding | None:
    uncommitted = isinstance(leaf, jax.Array) and not leaf.committed
    return None if uncommitted else getattr(leaf, "sharding", None)


def _place(leaf: Any, value: Any, impl: str | None) -> Any:
    if isinstance(leaf, np.ndarray | np.generic):
        return value
    if not isinstance(value, jax.Array):
        sharding = _sharding(leaf)
        value = jnp.array(value) if sharding is None else jax.device_put(value, sharding)
    return jax.random.wrap_key_data(value, impl=impl) if impl else value


def _from_first_process(decide: Callable[[], int]) -> int:
    """Return the decision of process 0 on all processes. Raises its `CheckpointError` on all."""
    if jax.process_count() == 1:
        return decide()
    answer, failure = -1, CheckpointError("process 0 has no valid checkpoint")
    if jax.process_index() == 0:
        try:
            answer = decide()
        except CheckpointError as error:
            failure = error
    # Two halves, because JAX without x64 would truncate a 64-bit step.
    halves = multihost_utils.broadcast_one_to_all(np.array([answer], np.int64).view(np.int32))
    answer = int(np.array(halves).view(np.int64)[0])
    if answer < 0:
        raise failure
    return answer


def _storage_error(step: int, error: Exception) -> StorageError:
    reason = (str(error) or type(error).__name__).splitlines()[0]
    return StorageError(f"the checkpoint of step {step} could not be written: {reason}")
