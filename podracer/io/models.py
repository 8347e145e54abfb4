"""Promoted models: a run in a directory with a record is read only as the record describes it.

    MODELS/record.jsonl   a line for each decision: name of a `model`, SHA-256 of its `files`
    MODELS/000002/        a promoted run: config.json and one checkpoint

A package such as podracer-trading writes it. As whoever reads a checkpoint of a model compares it
with the record, a directory that was exchanged is never played.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from podracer.errors import CheckpointError
from podracer.io.reading import MALFORMED, read_limited
from podracer.io.seal import CHECKPOINTS, CONFIG, MANIFEST, file_digest, is_there, verify_seal

RECORD = "record.jsonl"
RUN_FILES = (CONFIG, "pods.jsonl")  # what `load_run` reads besides checkpoints
MODEL = re.compile(r"[0-9]{6,}")  # name of a model


def check_promoted(run: Path) -> None:
    """Raise `CheckpointError` if a run is a model of a directory and not what was promoted.

    Files that the record does not name are ignored.
    """
    run = run.resolve()
    record = run.parent / RECORD
    if not MODEL.fullmatch(run.name) or not is_there(record):
        return
    try:
        decisions = [json.loads(line) for line in read_limited(record).splitlines()]
        promoted = [decision["files"] for decision in decisions if decision["model"] == run.name]
    except MALFORMED as error:
        raise CheckpointError(f"{record} is not a record of models: {error}") from error
    if promoted:
        verify_seal(run / CHECKPOINTS)
        if digests(run) != promoted[0]:
            raise CheckpointError(f"{run} is not the model that {record} describes")


def digests(model: Path) -> dict[str, str]:
    """Return SHA-256 digests of the configuration and of the manifest of all checkpoint files."""
    names = (*RUN_FILES, f"{CHECKPOINTS}/{MANIFEST}")
    return {name: file_digest(model / name) for name in names if (model / name).is_file()}
