"""What the processes of a run decide and seal together: its files are in one directory."""

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
from podracer.io import seal
from podracer.io.reading import read_limited
from podracer.io.run_directory import write_bytes

_BARRIER_MILLISECONDS = 600_000  # as long as Orbax waits for its processes
_SAVES = itertools.count()  # saves in this process; all processes have made as many


def decide_on_first_process(decide: Callable[[], int]) -> int:
    """Return the decision of process 0 on all processes; what it raises is raised on all."""
    if jax.process_count() == 1:
        return decide()
    answer, failure = -1, None
    if jax.process_index() == 0:
        try:
            answer = decide()
        except PodracerError as error:
            answer, failure = -error.exit_code, error
    # Two halves, because JAX without x64 would truncate a 64-bit step.
    halves = multihost_utils.broadcast_one_to_all(np.array([answer], np.int64).view(np.int32))
    if (answer := int(np.array(halves).view(np.int64)[0])) < 0:
        kind = StorageError if answer == -StorageError.exit_code else CheckpointError
        raise failure or kind("process 0 found no checkpoint that can be used; see its message")
    return answer


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
