"""A directory of models as `podracer.io.models` reads it; nothing judges what is promoted."""

import dataclasses
import json
import shutil
from pathlib import Path

from podracer.io.models import RECORD, Decision, active_promotions, digests, read_record
from podracer.io.seal import CHECKPOINTS, CONFIG, seal


def promote(models: Path, run: Path) -> Path:
    """Make a copy of a run the current model; return its directory."""
    number = 1 + sum(decision.action == "promote" for decision in read_record(models))
    model = models / f"{number:06d}"
    shutil.copytree(run / CHECKPOINTS, model / CHECKPOINTS)
    seal(model / CHECKPOINTS)
    shutil.copy(run / CONFIG, model / CONFIG)
    record(models, Decision("promote", model.name, digests(model)))
    return model


def rollback(models: Path) -> Path:
    """Make the previous model current again; return its directory."""
    previous = active_promotions(read_record(models))[-2]
    record(models, Decision("rollback", previous.model, previous.files))
    return models / previous.model


def record(models: Path, decision: Decision) -> None:
    """Append a decision to the record."""
    with (models / RECORD).open("a") as file:
        file.write(json.dumps(dataclasses.asdict(decision)) + "\n")
