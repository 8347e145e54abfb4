"""What two machines must have in common to train the same."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path

from podracer.io.code import PACKAGES, digest_of_code, installed_versions


def code_and_versions(recipes: Sequence[str] = ()) -> dict[str, str]:
    """Return by name what two machines must have in common to train the same.

    `recipes` are named `MODULE:FUNCTION`; the file of each module counts, which is not imported.
    """
    values = {"code of podracer": digest_of_code()[:16], **dict.fromkeys(PACKAGES, "missing")}
    values |= installed_versions()
    for name in sorted({recipe.partition(":")[0] for recipe in recipes}):
        spec = importlib.util.find_spec(name)
        path = Path(spec.origin) if spec and spec.origin else None
        content = path.read_bytes() if path and path.is_file() else b""
        values[f"code of {name}"] = hashlib.sha256(content).hexdigest()[:16]
    return values
