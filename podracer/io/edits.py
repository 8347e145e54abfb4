"""Sealed JSON, and what a run's files tell without JAX and without raising."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from podracer.errors import CheckpointError
from podracer.io.reading import parse_object, read_limited


def newest_metadata(run: Path) -> dict[str, Any]:
    """Return the metadata of a run's newest checkpoint, empty without one."""
    for step in sorted((run / "checkpoints").glob("[0-9]" * 12), reverse=True):
        metadata = read_object(step / "meta.json").get("metadata")
        if isinstance(metadata, dict):
            return metadata
    return {}


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file, an empty one if there is none."""
    return parse_object(_read(path))


def _read(path: Path) -> bytes | None:
    try:
        return None if path.is_symlink() else read_limited(path)
    except (OSError, CheckpointError):
        return None


def holds_sealed(data: bytes, sealed: Mapping[str, Any]) -> bool:
    """Return whether the content of a file of records begins with those that were sealed."""
    size = int(sealed["size"])
    return size <= len(data) and hashlib.sha256(data[:size]).hexdigest() == sealed["sha256"]


def encode_json(obj: Any) -> bytes:
    """Encode `obj` canonically, so that equal content means equal bytes."""
    return json.dumps(obj, sort_keys=True, indent=1).encode()


def encode_sealed(body: dict[str, Any]) -> bytes:
    """Encode `body` as the content of a sealed file, which holds its own SHA-256."""
    return encode_json({**body, "sha256": hashlib.sha256(encode_json(body)).hexdigest()})
