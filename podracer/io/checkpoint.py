"""Checkpoints that are restored completely and unchanged, or rejected.

`RUN/checkpoints/<step>/` holds `state/` (Orbax), `meta.json` (run, schema and metadata) and
`manifest.json` with size and SHA-256 of every file and of itself. It is written as `<step>.draft`
and gets its name last. Only a step whose manifest agrees with every byte, and which belongs to the
run of `RUN/config.json`, is restored: Orbax alone restores flipped bits silently, and casts dtypes.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import errno
import hashlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from podracer.errors import CheckpointError, StorageError
from podracer.io import agreement, steps, text
from podracer.io.arrays import (
    Schema,
    place,
    read_arrays,
    schema,
    schema_difference,
    sharding_of,
    silence_orbax,
    stored_array,
)
from podracer.io.run_directory import fsync_directory, own_directory, write_bytes
from podracer.io.seal import MANIFEST, encode_json, is_there, seal, seal_json
from podracer.io.steps import CHECKPOINTS, Choice
from podracer.types import PyTree, leaves_by_path

QUARANTINE = "quarantine"
_DRAFT, _REMOVED = ".draft", ".removed"
_ADDED = ("episodes.total_error",)  # leaves that 0.2.0 began without: zero in each checkpoint
_REMAINS = re.compile(r"[0-9]{12}\.(draft|removed)")


@dataclasses.dataclass(frozen=True)
class Restored:
    """A restored checkpoint, its arrays on their devices."""

    step: int
    state: PyTree  # structure, shapes, dtypes and shardings of the target
    metadata: dict[str, Any]


class Checkpointer(contextlib.AbstractContextManager["Checkpointer"]):
    """Writer and reader of the checkpoints of one run; a context manager.

    Only the holder of the run's lock may have one, because it first removes the remains of
    interrupted saves in `RUN/checkpoints`. Readers of a run that may still be running use `load`.

    With several processes (`jax.distributed`) all share the directory and must make the same calls
    of `save` and `restore`. Each hashes what it wrote; process 0 verifies, decides, seals and
    deletes, so `wait` guarantees the seal only there. If one is lost during a save, the others
    raise JAX's error.

    Args:
        run: directory of the run; what is saved belongs to the run of its `config.json`.
        keep: number of sealed steps to keep, besides those that their metadata names best; an older
            one is deleted once a newer one is sealed.
        sealed: called on process 0 after each seal, in a thread of the checkpointer.

    Raises `ConfigError` if `RUN/checkpoints` is a link or a file.
    """

    def __init__(
        self, run: Path, *, keep: int = 3, sealed: Callable[[], None] = lambda: None
    ) -> None:
        self.run = Path(run).absolute()
        self.directory = self.run / CHECKPOINTS
        self._keep = keep
        self._sealed = sealed
        self._inode: int | None = None  # inode of `directory`, on process 0
        if jax.process_index() == 0:
            self._inode = own_directory(self.directory)
            for path in steps.paths_in(self.directory):
                if _REMAINS.fullmatch(path.name):
                    shutil.rmtree(path, ignore_errors=True)
            for path in self.run.glob(f".{steps.SAVED}.*"):  # a process was killed while it wrote
                path.unlink(missing_ok=True)
        self._worker = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._pending: concurrent.futures.Future[None] | None = None
        self._orbax: concurrent.futures.Future[Any] | None = None

    def has_saved(self) -> bool:
        """Return whether the run has ever sealed a checkpoint, be they all lost since."""

        def decide() -> bool:
            if steps.step_directories(self.directory) or is_there(self.directory / QUARANTINE):
                return True
            return steps.newest_saved(self.run) is not None

        return bool(agreement.decide_on_first_process(decide))

    def load_orbax(self) -> concurrent.futures.Future[Any]:
        """Import Orbax in a thread, as that takes longer than the start of a small run."""
        if self._orbax is None:
            self._orbax = self._worker.submit(_make_orbax)
        return self._orbax

    def save(self, step: int, state: PyTree, metadata: dict[str, Any]) -> None:
        """Start to save `state` under `step`; a sealed step stays unchanged.

        Waits for the previous save, then returns once `state` is copied to the host: its buffers
        may be donated or overwritten at once. `metadata` must be JSON-serializable; the step of its
        `["best"]["updates"]`, if it has that, is kept as long as this one.
        Raises `StorageError` if this save or the previous one failed.
        """
        import orbax.checkpoint as ocp  # takes long, see `load_orbax`

        self.wait()
        target = self.directory / steps.step_name(step)
        if agreement.decide_on_first_process(lambda: is_there(target / MANIFEST)):
            return
        content = {
            "format": steps.FORMAT,
            "run": steps.identity_of(self.run),
            "schema": schema(state),
        }
        meta = encode_json({**content, "metadata": metadata})
        draft = target.with_suffix(_DRAFT)
        try:
            if jax.process_index() == 0:
                self._check_directory()
                if os.path.lexists(target):
                    raise FileExistsError(errno.EEXIST, "something is in its place", str(target))
                shutil.rmtree(draft, ignore_errors=True)  # remains of a failed save
                draft.mkdir()
            leaves = leaves_by_path(state).items()
            arrays = {path: stored_array(x) for path, x in leaves if x.size}  # Orbax's limit
            self.load_orbax().result().save(draft / "state", args=ocp.args.PyTreeSave(arrays))
        except OSError as error:
            raise _failure_of_save(step, error, "could not be written") from error
        self._pending = self._worker.submit(self._finish, draft, target, meta)

    def check(self) -> None:
        """Raise the `StorageError` of a save that failed or of a directory that is gone.

        Never blocks.
        """
        if self._pending is not None and self._pending.done():
            self.wait()
        self._check_directory()

    def wait(self) -> None:
        """Wait until the last save is sealed. Raises `StorageError` if it failed."""
        if self._pending is not None:
            concurrent.futures.wait([self._pending])
            pending, self._pending = self._pending, None
            pending.result()

    def restore(self, target: PyTree) -> Restored:
        """Restore the newest valid checkpoint in the structure of `target`.

        Each leaf of `target` is an array or a `ShapeDtypeStruct`, and its sharding is that of the
        restored leaf (host for numpy arrays, default device if there is none). A step that is
        damaged or belongs to another run is reported and moved to `quarantine/`, and the previous
        one is used. Raises `StorageError` if a file cannot be read, which moves nothing;
        `CheckpointError` if no step is valid, or if shapes, dtypes, keys or paths differ from
        `target`: nothing is ever cast, padded or left out.
        """
        self.wait()
        aside = self.directory / QUARANTINE
        valid = agreement.decide_on_first_process(lambda: steps.valid_step(self.run, aside))
        return _read(self.directory / steps.step_name(valid), target)

    def close(self) -> None:
        """Seal the last save and release the threads. Raises `StorageError` if it failed."""
        try:
            self.wait()
        finally:
            self._worker.shutdown()
            if self._orbax is not None:
                with contextlib.suppress(OSError):  # metadata that nobody reads
                    self._orbax.result().close()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except Exception as late:
            if error is None:
                raise
            text.print_stderr(str(late))  # the first error is raised

    def _finish(self, draft: Path, target: Path, meta: bytes) -> None:
        """Seal a save and give it its name, so that a directory with a step's name is complete."""
        step, first = int(target.name), jax.process_index() == 0
        outcome = "could not be written"
        try:
            self.load_orbax().result().wait_until_finished()  # until all processes have written
            digests = agreement.digests_of_arrays(draft)
            if first:
                self._check_directory()
                write_bytes(draft / "meta.json", meta)
                seal(draft, target.name, digests)
                draft.rename(target)
                fsync_directory(self.directory)
                seal_json(self.run / steps.SAVED, {"step": step})
                outcome = "is saved, but older ones could not be deleted"
                self._retire(step)
        except Exception as error:
            if first:
                shutil.rmtree(draft, ignore_errors=True)
            raise _failure_of_save(step, error, outcome) from error
        if first:
            self._sealed()  # its faults are no faults of the disk

    def _retire(self, step: int) -> None:
        """Delete the oldest steps of this run that none names best; this one is sealed."""
        paths = [path for path in steps.step_directories(self.directory) if self._is_own(path)]
        old = [path for path in paths if int(path.name) <= step][: -self._keep]
        metas = [steps.read_meta(path)["metadata"] for path in paths if path not in old]
        best = set(map(steps.best_step, metas))
        old = [path for path in old if int(path.name) not in best]
        # Renamed first: a kill half way leaves remains to remove, not a damaged step.
        remains = [path.rename(path.with_suffix(_REMOVED)) for path in old]
        if remains:
            fsync_directory(self.directory)
        for path in remains:  # where a reader holds one open, the next start removes what is left
            shutil.rmtree(path, ignore_errors=True)

    def _is_own(self, path: Path) -> bool:
        try:
            return steps.read_meta(path)["run"] == steps.identity_of(self.run)
        except CheckpointError:
            return False

    def _check_directory(self) -> None:
        """Raise `StorageError` if the directory has been removed or replaced under the run."""
        if self._inode is None:
            return
        try:
            inode = os.lstat(self.directory).st_ino
        except OSError as error:
            raise StorageError(f"{self.directory} is gone: {error.strerror}.") from error
        if inode != self._inode:
            raise StorageError(f"{self.directory} is gone, and another is in its place.")


def load(
    run: Path, target: PyTree, step: Choice = "newest", *, excluded: tuple[str, ...] = ()
) -> Restored:
    """Restore as `Checkpointer.restore` does, moving nothing: the run may still be running.

    Arrays whose paths begin with one of `excluded` are not read: `target` has none of them.
    """
    return steps.read_chosen(Path(run).absolute(), step, lambda path: _read(path, target, excluded))


def load_part(run: Path, prefix: str, step: Choice = "newest") -> Restored:
    """Restore the arrays whose paths begin with `prefix`, by the rest of their paths, on the host.

    Reads by the checkpoint's own schema, so the classes that made the state need not be known, and
    moves nothing. Raises as `stored_fingerprint`.
    """

    def read(path: Path) -> Restored:
        meta = steps.read_meta(path)
        names = [name for name in meta["schema"] if name.startswith(prefix)]
        arrays = read_arrays(path, meta["schema"], dict.fromkeys(names))
        for name in names:
            if (impl := meta["schema"][name][2]) is not None:
                arrays[name] = jax.random.wrap_key_data(arrays[name], impl=impl)
        state = {name.removeprefix(prefix): array for name, array in arrays.items()}
        return Restored(int(path.name), state, meta["metadata"])

    return steps.read_chosen(Path(run).absolute(), step, read)


def fingerprint(state: PyTree) -> str:
    """Return the SHA-256 over path, dtype, shape, key implementation and bytes of all leaves.

    Leaves are sorted by path. Every leaf must be addressable in this process.
    """
    leaves = leaves_by_path(state)
    return _digest(schema(state), lambda path: np.asarray(stored_array(leaves[path])))


def stored_fingerprint(run: Path, step: Choice = "newest") -> tuple[int, str]:
    """Return the step of a run's checkpoint and the `fingerprint` of its state.

    Reads by the checkpoint's own schema and moves nothing. Raises `CheckpointError` if there is no
    such step that is valid, or if it declares more than this machine's memory.
    """

    def read(path: Path) -> tuple[int, str]:
        stored = steps.read_meta(path)["schema"]
        arrays = read_arrays(path, stored, dict.fromkeys(stored))
        return int(path.name), _digest(stored, arrays.__getitem__)

    return steps.read_chosen(Path(run).absolute(), step, read)


def _digest(entries: Schema, array: Callable[[str], np.ndarray]) -> str:
    digest = hashlib.sha256()
    for path in sorted(entries):
        digest.update(encode_json([path, *entries[path]]))
        digest.update(np.ascontiguousarray(array(path)).reshape(-1).view(np.uint8).data)
    return digest.hexdigest()


def _read(path: Path, target: PyTree, excluded: tuple[str, ...] = ()) -> Restored:
    meta, leaves, expected = steps.read_meta(path), leaves_by_path(target), schema(target)
    stored = {name: x for name, x in meta["schema"].items() if not name.startswith(excluded)}
    shardings = {name: sharding_of(leaf) for name, leaf in leaves.items()}
    added = {
        name: jax.device_put(np.zeros(*expected[name][:2]), shardings.pop(name))
        for name in expected.keys() - stored.keys()
        if name.endswith(_ADDED)
    }
    if {**stored, **{name: expected[name] for name in added}} != expected:
        raise CheckpointError(f"{path} does not fit: {schema_difference(stored, expected)}")
    arrays = read_arrays(path, meta["schema"], shardings) | added
    placed = [place(leaf, arrays[name], expected[name][2]) for name, leaf in leaves.items()]
    state = jax.tree.unflatten(jax.tree.structure(target), placed)
    if schema(state) != expected:
        raise CheckpointError(
            f"{path} cannot be represented here: {schema_difference(expected, schema(state))}"
        )
    return Restored(int(path.name), state, meta["metadata"])


def _make_orbax() -> Any:
    import orbax.checkpoint as ocp

    silence_orbax()
    return ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())


def _failure_of_save(step: int, error: Exception, outcome: str) -> Exception:
    """Return the error of a save: of JAX if another process is lost, a `StorageError` otherwise."""
    # Orbax calls it a time-out, at whatever moment processes that wait for each other cannot.
    cause = error.__cause__ if isinstance(error, TimeoutError) else error
    if isinstance(cause, jax.errors.JaxRuntimeError):
        return jax.errors.JaxRuntimeError(str(cause))
    reason = (str(error) or type(error).__name__).splitlines()[0]
    return StorageError(f"the checkpoint of step {step} {outcome}: {reason}")
