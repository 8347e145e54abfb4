"""What a run was computed with, one attempt after the other: its bits depend on it."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from podracer.config.serialization import read_config
from podracer.io.code import installed_versions
from podracer.io.seal import CONFIG
from podracer.run.resume import is_of_versions

# Packages that compute, by which results may be rounded otherwise.
_COMPUTING = ("podracer", "jax", "jaxlib", "numpy", "equinox", "optax")
_LOG = logging.getLogger("podracer")


@dataclasses.dataclass
class History:
    """Topologies and versions that a run has had, one after the other; part of every checkpoint."""

    topologies: list[str]
    versions: list[dict[str, str]] = dataclasses.field(
        default_factory=lambda: [_computing(installed_versions())]
    )

    def restore(self, metadata: Mapping[str, Any], directory: Path) -> None:
        """Put those of a checkpoint of the run in `directory` before the present ones."""
        versions = metadata.get("versions")
        if versions is None:  # an older version of podracer saved none
            first: Any = read_config(directory / CONFIG).get("versions")
            versions = [_computing(first)] if is_of_versions(first) else []
        self.topologies = _joined(metadata["topologies"], self.topologies)
        self.versions = _joined(versions, self.versions)

    def warn(self) -> None:
        """Say where a run had several, at every resume."""
        if len(self.topologies) > 1:
            _LOG.warning(
                "The run was computed on %s: correct, but not bit-exact. "
                "`devices` and `num_processes` choose.",
                ", then on ".join(self.topologies),
            )
        changes = []
        for name in _COMPUTING:
            versions = (attempt[name] for attempt in self.versions if name in attempt)
            texts = [version for version, _ in itertools.groupby(versions)]
            changes += [f"{name} {', then '.join(texts)}"] if len(texts) > 1 else []
        if changes:
            _LOG.warning(
                "The run was computed with %s: correct, but perhaps not bit-exact.",
                "; ".join(changes),
            )


def _computing(versions: Mapping[str, Any]) -> dict[str, str]:
    return {name: versions[name] for name in _COMPUTING if name in versions}


def _joined(earlier: list[Any], present: list[Any]) -> list[Any]:
    """Return both, without the present one where the last one is the same."""
    return earlier if earlier[-1:] == present else [*earlier, *present]
