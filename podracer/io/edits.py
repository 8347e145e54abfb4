"""What a run's files say of themselves: whether they are as the run wrote and sealed them.

Nothing here raises or imports JAX: pages draw a run that was changed, and say so.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from podracer.errors import CheckpointError
from podracer.io.reading import MALFORMED, parse_object, read_limited


class Sealed(NamedTuple):
    """What the seals of a run tell about it."""

    metadata: Mapping[str, Any] = {}
    """Metadata of the newest checkpoint, empty without one."""
    frames: int = 0
    """Frames at that checkpoint."""
    edited: tuple[str, ...] = ()
    """Names of files that are not as the run wrote them."""
    sizes: Mapping[str, int] = {}
    """Bytes by which files of records are longer than that checkpoint knows them."""


def read_sealed(run: Path) -> Sealed:
    """Compare `config.json` with its seal, and the records with the newest checkpoint's.

    A file of more than 64 MiB is not compared.
    """
    config = _read(run / "config.json")
    edited = [] if config is None or is_sealed(config) else ["config.json"]
    metadata = _newest_metadata(run / "checkpoints")
    sizes = {}
    records = metadata.get("records")
    for name, seal in records.items() if isinstance(records, dict) else ():
        content = _read(run / name) if name in ("metrics.jsonl", "pods.jsonl") else None
        if content is None or not isinstance(seal, dict) or type(seal.get("size")) is not int:
            continue
        sizes[name] = len(content) - seal["size"]
        if not holds_sealed(content, seal):
            edited.append(name)
    totals = metadata.get("totals")
    frames = totals.get("frames") if isinstance(totals, dict) else 0
    return Sealed(metadata, frames if type(frames) is int else 0, tuple(edited), sizes)


def _newest_metadata(checkpoints: Path) -> dict[str, Any]:
    for step in sorted(checkpoints.glob("[0-9]" * 12), reverse=True):
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


def is_sealed(raw: bytes) -> bool:
    """Return whether these bytes are exactly a sealed file."""
    try:
        body = json.loads(raw)
        del body["sha256"]
        return encode_sealed(body) == raw
    except MALFORMED:
        return False
