"""A directory of models: its record, which model is current, and whether one is what was promoted.

    MODELS/record.jsonl   the source of truth: one line for each decision, append-only
    MODELS/000002/        a promoted run: config.json and one checkpoint, with digests in the record

`podracer promote` writes it. Whoever reads a checkpoint of a model compares it with the
record (`check_promoted`), so a directory that was exchanged is never played.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path

from podracer.errors import CheckpointError, ConfigError
from podracer.io.paths import user_path
from podracer.io.reading import MALFORMED, read_limited
from podracer.io.seal import CHECKPOINTS, CONFIG, MANIFEST, file_digest, is_there, verify_seal

RECORD = "record.jsonl"
RUN_FILES = (CONFIG, "pods.jsonl")  # what `load_run` reads besides checkpoints
_MODEL = re.compile(r"[0-9]{6,}")


@dataclasses.dataclass(frozen=True)
class Decision:
    """A line of the record."""

    action: str  # promote, refuse or rollback
    model: str  # the current model after the decision
    files: dict[str, str]  # SHA-256 of the files of that model, see `digests`
    run: str = ""  # name of the run that was compared
    updates: int = 0  # updates of its checkpoint
    window: tuple[str, ...] = ()  # first and last bar of the validation period
    score: float | None = None  # return of the run's policy in it
    previous_score: float | None = None  # return of the model that was current, on the same bars
    time: str = ""  # ISO 8601, UTC


def current_model(models: str | Path) -> Path:
    """Return the directory of the current model: a run directory for every command.

    Raises `ConfigError` if there is none, `CheckpointError` if it is not what was promoted.
    """
    models = user_path(models)
    decision = current_promotion(models)
    verify(models, decision)
    return models / decision.model


def current_promotion(models: Path) -> Decision:
    """Return the decision that made the current model. Raises `ConfigError` if there is none."""
    promotions = active_promotions(read_record(models))
    if not promotions:
        raise ConfigError(f"{models} has no model yet: promote a run to it.")
    return promotions[-1]


def check_promoted(run: Path) -> None:
    """Raise `CheckpointError` if a run is a model of a directory and not what was promoted."""
    run = run.resolve()
    if _MODEL.fullmatch(run.name) and is_there(run.parent / RECORD):
        for decision in read_record(run.parent):
            if decision.model == run.name:
                verify(run.parent, decision)
                return


def verify(models: Path, decision: Decision) -> None:
    """Raise `CheckpointError` if a model is not what was promoted; other files are ignored."""
    model = models / decision.model
    verify_seal(model / CHECKPOINTS)
    if digests(model) != decision.files:
        raise CheckpointError(f"{model} is not the model that {models / RECORD} describes")


def digests(model: Path) -> dict[str, str]:
    """Return SHA-256 digests of the configuration and of the manifest of all checkpoint files."""
    names = (*RUN_FILES, f"{CHECKPOINTS}/{MANIFEST}")
    return {name: file_digest(model / name) for name in names if (model / name).is_file()}


def read_record(models: Path) -> list[Decision]:
    """Return all decisions, oldest first. Raises `CheckpointError` for what is no record."""
    path = models / RECORD
    if not path.exists():
        return []
    try:
        lines = [json.loads(line) for line in read_limited(path).splitlines()]
        decisions = [Decision(**{**line, "window": tuple(line["window"])}) for line in lines]
        if not all(_MODEL.fullmatch(decision.model) for decision in decisions):
            raise ValueError("a model has six digits")
        active_promotions(decisions)
    except MALFORMED as error:
        raise CheckpointError(f"{path} is not a record of models: {error}") from error
    return decisions


def active_promotions(decisions: Sequence[Decision]) -> list[Decision]:
    """Return the promotions that were not rolled back; the last one is current.

    Raises `CheckpointError` where a rollback leaves none.
    """
    promotions: list[Decision] = []
    for decision in decisions:
        if decision.action == "promote":
            promotions.append(decision)
        elif decision.action == "rollback":
            if len(promotions) < 2:
                raise CheckpointError(f"{RECORD} has a rollback without a model to go back to.")
            promotions.pop()
    return promotions
