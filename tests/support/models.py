"""A directory of models as packages write it; nothing judges what is promoted."""

import json
import shutil
from pathlib import Path

from podracer.io.models import RECORD, digests
from podracer.io.seal import CHECKPOINTS, CONFIG, seal


def promote(models: Path, run: Path) -> Path:
    """Make a copy of a run the current model; return its directory."""
    model = models / f"{1 + len(list(models.glob('0*'))):06d}"
    shutil.copytree(run / CHECKPOINTS, model / CHECKPOINTS)
    seal(model / CHECKPOINTS)
    shutil.copy(run / CONFIG, model / CONFIG)
    record(models, model.name, digests(model))
    return model


def rollback(models: Path) -> Path:
    """Make the model before the current one current again; return its directory."""
    number = int((models / "current").read_text()) - 1
    record(models, f"{number:06d}", digests(models / f"{number:06d}"))
    return models / f"{number:06d}"


def record(models: Path, model: str, files: dict[str, str]) -> None:
    """Append a decision to the record, and make its model the current one."""
    with (models / RECORD).open("a") as file:
        file.write(json.dumps({"model": model, "files": files}) + "\n")
    (models / "current").write_text(f"{model}\n")
