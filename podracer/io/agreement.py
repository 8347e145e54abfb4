"""What the processes of a run decide and verify together: its files are in one directory."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils  # no stable home yet

from podracer.errors import CheckpointError, PodracerError, StorageError
from podracer.io import seal, text
from podracer.io.reading import read_limited
from podracer.io.run_directory import write_bytes

_REQUEST = 10**12  # and a step, of which each process verifies a share; no step is so large
_BARRIER_MILLISECONDS = 600_000  # as long as Orbax waits for its processes
_SAVES = itertools.count()  # saves in this process; all processes have made as many


def _broadcast(number: int) -> int:
    """Return process 0's number on all processes."""
    # Two halves, because JAX without x64 would truncate a 64-bit step.
    halves = multihost_utils.broadcast_one_to_all(np.array([number], np.int64).view(np.int32))
    return int(np.array(halves).view(np.int64)[0])


def decide_on_first_process(
    decide: Callable[[], int], help_with: Callable[[int], object] = lambda step: None
) -> int:
    """Return the decision of process 0 on all processes; what it raises is raised on all.

    For each `_REQUEST` and step that it broadcasts meanwhile, the others call `help_with(step)`.
    """
    if jax.process_count() == 1:
        return decide()
    answer, failure = -1, None
    if jax.process_index() == 0:
        try:
            answer = decide()
        except PodracerError as error:
            answer, failure = -error.exit_code, error
    while (answer := _broadcast(answer)) >= _REQUEST:
        help_with(answer - _REQUEST)
    if answer < 0:
        kind = StorageError if answer == -StorageError.exit_code else CheckpointError
        raise failure or kind("process 0 found no checkpoint that can be used; see its message")
    return answer


def verify_with_others(path: Path) -> None:
    """Verify a step on process 0, and have every process verify a share of its bytes."""
    seal.check_files(path)
    _broadcast(_REQUEST + int(path.name))
    code, name = verify_share(path)
    if code == StorageError.exit_code:
        raise StorageError(f"{path / name} cannot be read by a process; see its message.")
    if code:
        raise CheckpointError(f"{path}: {name!r} has changed since it was sealed")


def verify_share(path: Path) -> tuple[int, str]:
    """Verify every n-th file of a step, by n processes.

    Return, in all, the exit code of the worst fault that any of them found, and its file.
    """
    names, number, code = [seal.MANIFEST], 0, 0
    try:
        entries = seal.read_sealed_json(path / seal.MANIFEST)["files"]
        names = sorted(entries, key=lambda name: (entries[name]["size"], name))
        for number in range(jax.process_index(), len(names), jax.process_count()):
            seal.check_digests(path, {names[number]: entries[names[number]]})
    except PodracerError as error:
        code = error.exit_code
        if code == StorageError.exit_code:  # process 0 names what has changed
            text.print_stderr(str(error))
    faults = multihost_utils.process_allgather(np.array([code, number], np.int32))
    code, number = max(faults.tolist())
    return code, names[number]


def digests_of_arrays(draft: Path) -> dict[str, Any]:
    """Hash the arrays that this process wrote; return those of all processes on process 0.

    Orbax gives each process a folder. Every process must call this, in the same order of saves.
    """
    index, count = jax.process_index(), jax.process_count()
    if count == 1:
        return {}
    from orbax.checkpoint.multihost import get_barrier_sync_fn

    files = [draft / f"digests.{number}" for number in range(count)]
    folder = draft / "state" / f"ocdbt.process_{index}"
    entries: dict[str, Any] = {}
    try:
        if folder.exists():
            prefix = folder.relative_to(draft).as_posix()
            entries = {
                f"{prefix}/{path}": entry for path, entry in seal.digest_files(folder).items()
            }
        if index > 0:
            write_bytes(files[index], seal.encode_json(entries))
    finally:  # or the others would wait until they are told of a loss
        name = f"podracer_digests_{next(_SAVES)}"
        get_barrier_sync_fn()(key=name, timeout_ms=_BARRIER_MILLISECONDS)
    for file in files[1:] if index == 0 else ():
        entries |= json.loads(read_limited(file))
        file.unlink()
    return entries
