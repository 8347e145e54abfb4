"""The record of a directory of models: its decisions, and which model is current."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from podracer.errors import CheckpointError, ConfigError
from podracer.io.models import MODEL, RECORD, check_promoted
from podracer.io.paths import user_path
from podracer.io.reading import MALFORMED, read_limited


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
    model = models / current_promotion(models).model
    check_promoted(model)
    return model


def current_promotion(models: Path) -> Decision:
    """Return the decision that made the current model. Raises `ConfigError` if there is none."""
    promotions = active_promotions(read_record(models))
    if not promotions:
        raise ConfigError(f"{models} has no model yet: promote a run to it.")
    return promotions[-1]


def read_record(models: Path) -> list[Decision]:
    """Return all decisions, oldest first. Raises `CheckpointError` for what is no record."""
    path = models / RECORD
    if not path.exists():
        return []
    try:
        lines = [json.loads(line) for line in read_limited(path).splitlines()]
        decisions = [Decision(**{**line, "window": tuple(line["window"])}) for line in lines]
        if not all(MODEL.fullmatch(decision.model) for decision in decisions):
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
