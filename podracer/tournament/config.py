"""A tournament as a value: everything that is chosen before it begins."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Annotated, Literal

import tyro

from podracer.agent import MetaLearner
from podracer.drivers.population import with_hyperparameters
from podracer.experiments.experiment import KINDS, Experiment, from_json, to_json
from podracer.experiments.ranges import Range
from podracer.tournament.events import Header
from podracer.tournament.leaderboard import read_events
from podracer.tournament.selection import SELECTION_RULES, PopulationBased, SelectionRule
from podracer.types import ConfigError


@dataclasses.dataclass(frozen=True)
class Tournament:
    """Everything that decides what a tournament computes, but the order in which pods end."""

    experiments: Annotated[tuple[Experiment, ...], tyro.conf.Suppress]
    """Pod i begins with experiment i, counted round."""
    selection: SelectionRule = dataclasses.field(default_factory=PopulationBased)
    """How a pod starts its next round."""
    pods: int = 4
    """How many train at the beginning."""
    rounds: int = 5
    """Of each pod."""
    round_frames: int = 100_000
    """Frames of a round."""
    round_seconds: float | None = None
    """A round ends after so long, if that comes first."""
    size: int = 16
    """Entries on the leaderboard."""
    episodes: int = 100
    """Held-out episodes of each evaluation."""
    evaluation_seed: int = 1_000_003
    """Of these episodes, the same for all pods."""
    seed: int = 0
    """Of the pods' seeds and of all selection."""
    engine: Literal["local", "ray"] = "local"
    """Processes of this machine, or of a Ray cluster that shares the directory."""
    pod_cpus: float = 1.0
    """What a pod reserves of a Ray cluster."""
    pod_gpus: float = 0.0
    """The same of GPUs; it sees no others. Below 1 pods share one."""
    retries: int = 3
    """Attempts without progress after which a pod is quarantined."""
    stall_seconds: float = 600.0
    """A pod that records nothing for so long is killed."""
    straggler_seconds: float = 600.0
    """How long a generation waits for a pod once another one has ended it."""

    def check(self) -> None:
        """Raise `ConfigError` for what cannot be meant."""
        if not self.experiments:
            raise ConfigError("a tournament needs a recipe.")
        for name in ("pods", "rounds", "round_frames", "size", "episodes", "retries"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, but it is {getattr(self, name)}.")
        for name in ("stall_seconds", "straggler_seconds", "round_seconds"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} must be positive, but it is {value}.")
        if self.pod_cpus < 0 or self.pod_gpus < 0 or (self.pod_gpus > 1 and self.pod_gpus % 1):
            raise ConfigError(
                "pod_cpus and pod_gpus must not be negative, nor pod_gpus a broken number above 1."
            )
        for experiment in self.experiments:
            experiment.check()
            if isinstance(experiment.agent, MetaLearner):
                name = type(experiment.agent).__name__
                raise ConfigError(f"pods compete by their policies' returns: {name} has no policy.")
            if isinstance(self.selection, PopulationBased):
                values = {bound.name: bound.low for bound in self.selection.bounds}
                with_hyperparameters(experiment.agent, values)

    @property
    def evaluation(self) -> str:
        """Digest of what scores must have in common to be compared."""
        environments = sorted({experiment.environment for experiment in self.experiments})
        text = json.dumps([environments, self.evaluation_seed])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def experiment_of(self, pod: int) -> Experiment:
        """What a pod begins with; its seed, and those of a population's pods, are its own."""
        return seeded(self.experiments[pod % len(self.experiments)], self.seed, pod)

    def header(self) -> Header:
        """The first line of the log."""
        configuration = to_json(self)
        return Header(
            configuration, self.seed, self.pods, self.size, self.evaluation, self.episodes
        )


def seeded(experiment: Experiment, seed: int, pod: int) -> Experiment:
    """The experiment with the seeds of a pod, for a tournament with a seed."""
    own = (seed + 1) * 10_000 + pod
    pods = tuple(
        dataclasses.replace(pod_, seed=own + 100_000_000 * index)
        for index, pod_ in enumerate(experiment.pods, 1)
    )
    return dataclasses.replace(experiment, seed=own, pods=pods)


_KINDS = {**KINDS, **SELECTION_RULES, "Tournament": Tournament, "Range": Range}


def read_tournament(directory: Path) -> Tournament:
    """The tournament of a directory. Raises `ConfigError` if there is none."""
    header = read_events(directory)[0]
    assert isinstance(header, Header)
    return from_json(header.tournament, _KINDS)
