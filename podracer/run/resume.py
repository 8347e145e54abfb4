"""Rules of resuming: what a checkpoint holds, and what may have changed since the run began."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from podracer.config.experiment import Experiment
from podracer.config.serialization import KINDS, kinds_of, of_this_version, read_config, to_json
from podracer.errors import CheckpointError, ConfigError
from podracer.io.code import installed_versions
from podracer.io.differences import differences
from podracer.io.json_schema import anything, conforms, count, finite, number, text, unsound_fields
from podracer.io.seal import CONFIG, encode_json, seal_json
from podracer.io.text import redact
from podracer.run.sweep import readable_records

# Packages that compute, by which results may be rounded otherwise.
_COMPUTING = ("podracer", "jax", "jaxlib", "numpy", "equinox", "optax")
_LOG = logging.getLogger("podracer")

# These decide when and where things happen, not what is computed, so a resumed run may change them.
FREE_ON_RESUME = {
    "frames", "devices", "evaluations", "evaluation_episodes", "evaluation_policy",
    "evaluation_epsilon", "fixed_evaluation", "target_return", "max_seconds", "save_seconds",
    "keep_best", "stall_seconds",
}  # fmt: skip


@dataclasses.dataclass
class Totals:
    """Counters of the whole run, over all processes; part of every checkpoint."""

    updates: int = 0
    frames: int = 0
    seconds: float = 0.0
    evaluation_return: float | None = None  # the last one, None where it is no `whole_return`
    collected: int = 0  # steps that actors finished, learned from or not
    dropped: int = 0  # collected steps that were lost when the run stopped


@dataclasses.dataclass(frozen=True)
class Best:
    """Evaluation with the highest mean return, the newest of equal ones; part of every checkpoint.

    In a population it is the best pod's.
    """

    updates: int
    mean_return: float


_VERSIONS = {...: text}
_METADATA = {
    "experiment": {...: anything},
    "totals": {
        "updates": count,
        "frames": count,
        "seconds": lambda value: finite(value) and value >= 0,
        "evaluation_return": (None, number),
        "collected": count,
        "dropped": count,
    },
    "records": {...: {"size": count, "sha256": str, ...: anything}},
    "topologies": [text, ...],
    "versions": (None, [_VERSIONS, ...]),
    "best": (None, {"updates": count, "mean_return": finite}),
    "changes": (None, {...: anything}),
    ...: anything,
}


def check_metadata(metadata: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` if the metadata of a checkpoint is not what a run writes.

    A seal tells that it was not changed since, but not who wrote it.
    """
    if unsound := unsound_fields({**dict.fromkeys(_METADATA), **metadata}, _METADATA):
        raise CheckpointError(f"the checkpoint's {', '.join(unsound)} cannot be those of a run.")


def experiment_digest(experiment: Experiment) -> str:
    """Return the SHA-256 of what an experiment computes, which a resumed run cannot change."""
    settings = to_json(experiment)
    return hashlib.sha256(
        encode_json({k: v for k, v in settings.items() if k not in FREE_ON_RESUME})
    ).hexdigest()


def check_same_experiment(saved: Mapping[str, Any], experiment: Experiment) -> None:
    """Raise `ConfigError` with the differences if a checkpoint is of another computation.

    `saved` is the experiment that the checkpoint holds, in JSON. Secrets are no part of it.
    """
    saved = of_this_version(saved, {**KINDS, **kinds_of(experiment)})
    old_and_new = (redact(x, stable=True) for x in (saved, to_json(experiment)))
    changed = [
        f"{name} was {old} and is {new}"
        for name, (old, new) in differences(*old_and_new).items()
        if name not in FREE_ON_RESUME
    ]
    if changed:
        raise ConfigError(
            f"the run was saved with another configuration: {'; '.join(changed)}. A new run can go "
            "on from what it has learned: train with `begin=podracer.Weights(RUN)`."
        )


def check_same_environment(directory: Path, env: Any) -> None:
    """Raise `ConfigError` if `env` is not the environment that the run in `directory` started with.

    Its data may come from a file that has changed since.
    """
    config = read_config(directory / CONFIG)
    saved = of_this_version(config.get("environment"), kinds_of(env))
    if changed := differences(saved if isinstance(saved, dict) else {}, to_json(env)):
        raise ConfigError(
            f"{directory} began in another environment, and {', '.join(changed)} changed since: "
            "bring back the file or the version that it was made from, or begin a new run."
        )


def check_may_begin_again(directory: Path, experiment: Experiment) -> None:
    """Raise unless a run without a checkpoint ended before its first save, of this experiment.

    Raises `CheckpointError` where its records show that it has sealed one, and `ConfigError` for
    another experiment.
    """
    if shows_saves(directory):
        raise CheckpointError(
            f"{directory} has no checkpoint, but its records show that one was "
            "saved: bring it back, or begin a new run."
        )
    check_same_experiment(read_config(directory / CONFIG)["experiment"], experiment)


def shows_saves(directory: Path) -> bool:
    """Return whether the records of a run show that it has sealed a checkpoint.

    The second save waited for the first one's seal.
    """
    times = (record.get("time_save") for record in readable_records(directory))
    saves = [seconds for seconds in times if isinstance(seconds, float) and seconds > 0]
    return len(saves) > 1


def update_config(directory: Path, settings: Mapping[str, Any]) -> None:
    """Write the settings with which a run goes on into its `config.json`."""
    config = read_config(directory / CONFIG)
    if config["experiment"] != settings:
        seal_json(directory / CONFIG, {**config, "experiment": settings})


# --- what it was computed with --------------------------------------------------------------------


@dataclasses.dataclass
class History:
    """Topologies and versions that a run has had, one after the other; part of every checkpoint."""

    topologies: list[str]
    versions: list[dict[str, str]] = dataclasses.field(
        default_factory=lambda: [_computing(installed_versions())]
    )

    def restore(self, metadata: Mapping[str, Any], directory: Path) -> None:
        """Put what a checkpoint names before the present ones; the run is in `directory`."""
        versions = metadata.get("versions")
        if versions is None:  # an older version of podracer saved none
            first: Any = read_config(directory / CONFIG).get("versions")
            versions = [_computing(first)] if conforms(first, _VERSIONS) else []
        self.topologies = _joined(metadata["topologies"], self.topologies)
        self.versions = _joined(versions, self.versions)

    def warn(self) -> None:
        """Warn of several topologies or versions, at every resume."""
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
            if len(texts) > 1:
                changes.append(f"{name} {', then '.join(texts)}")
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
