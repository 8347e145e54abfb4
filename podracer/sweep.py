"""Sweeps: the pods of a grid or of random draws, and what came out, from `pods.jsonl`."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from podracer.experiment import read_experiment, to_json
from podracer.io.rundir import write_json
from podracer.io.sinks import read_metrics
from podracer.population import Hyperparameter, Pod
from podracer.types import ConfigError


def make_pods(
    vary: Sequence[str], seeds: Sequence[int], draws: int = 0, draw_seed: int = 0
) -> tuple[Pod, ...]:
    """Every configuration with every seed.

    `vary` holds `name=a,b,c` or, to draw from, `name=low:high` (evenly on a logarithmic scale where
    both are positive). Without ranges the configurations are the grid of all values, with them
    `draws` random ones. Raises `ConfigError` for what cannot be read.
    """
    spaces = dict(map(_space, vary))
    if len(spaces) < len(vary):
        raise ConfigError("--vary names a hyperparameter twice: give each one its values once.")
    ranges = [name for name, space in spaces.items() if isinstance(space, _Range)]
    if ranges and draws < 1:
        raise ConfigError(f"{ranges[0]} has a range to draw from: say how often with --draws N.")
    if draws and not ranges:
        raise ConfigError("--draws needs a range to draw from, such as learning_rate=1e-5:1e-2.")
    if ranges:
        generator = np.random.default_rng(draw_seed)
        rows = [[_draw(space, generator) for space in spaces.values()] for _ in range(draws)]
    else:
        rows = [list(row) for row in itertools.product(*spaces.values())]  # type: ignore[arg-type]
    return tuple(
        Pod(seed, tuple(map(Hyperparameter, spaces, row))) for row in rows for seed in seeds
    )


@dataclasses.dataclass(frozen=True)
class _Range:
    low: float
    high: float


def _space(text: str) -> tuple[str, tuple[float, ...] | _Range]:
    name, equals, values = text.partition("=")
    try:
        if not equals:
            raise ValueError
        low, colon, high = values.partition(":")
        if colon:
            space = _Range(float(low), float(high))
            if not (math.isfinite(space.low) and space.low < space.high < math.inf):
                raise ValueError
            return name, space
        return name, tuple(float(value) for value in values.split(","))
    except ValueError:
        raise ConfigError(
            f"--vary {text!r} cannot be read: write name=1e-4,3e-4 or name=1e-5:1e-2."
        ) from None


def _draw(space: tuple[float, ...] | _Range, generator: np.random.Generator) -> float:
    if not isinstance(space, _Range):
        return float(generator.choice(space))
    if space.low > 0:
        return float(np.exp(generator.uniform(np.log(space.low), np.log(space.high))))
    return float(generator.uniform(space.low, space.high))


# --- what came out -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Standing:
    """One configuration of a sweep, over its seeds."""

    hyperparameters: tuple[Hyperparameter, ...]
    pods: tuple[int, ...]  # their numbers
    returns: np.ndarray  # [seeds], of the last evaluation; NaN where a pod met a fault

    @property
    def score(self) -> float:
        """Mean over the seeds; a pod that failed counts as the worst."""
        return float(self.returns.mean()) if np.isfinite(self.returns).all() else -math.inf


def standings(directory: Path) -> list[Standing]:
    """The configurations of a population's run, best first. Raises `ConfigError` if it has none."""
    experiment = read_experiment(directory)
    returns = _last_evaluation(directory)
    groups: dict[tuple[Hyperparameter, ...], list[int]] = {}
    for number, pod in enumerate(experiment.pods):
        groups.setdefault(pod.hyperparameters, []).append(number)
    found = [Standing(values, tuple(at), returns[at]) for values, at in groups.items()]
    return sorted(found, key=lambda standing: -standing.score)


def best_pod(directory: Path) -> int:
    """The number of the pod that was best in the last evaluation."""
    returns = _last_evaluation(directory)
    return int(np.argmax(np.where(np.isnan(returns), -np.inf, returns)))


def write_best(directory: Path) -> Path:
    """The best configuration as a file that `podracer train` takes for a recipe."""
    experiment = read_experiment(directory)
    winner = standings(directory)[0]
    best = experiment.of_pod(experiment.pods[winner.pods[0]])
    best = dataclasses.replace(best, recipe=f"{experiment.recipe}_best")
    path = directory / "best.json"
    write_json(path, {"experiment": to_json(best)})
    return path


def pod_records(directory: Path) -> list[dict[str, Any]]:
    """What each pod recorded, `[updates]` of metric to `[P]`."""
    path = directory / "pods.jsonl"
    if not path.exists():
        raise ConfigError(f"{directory} holds no population: there is no pods.jsonl in it.")
    return read_metrics(path)


def _last_evaluation(directory: Path) -> np.ndarray:
    """The last evaluation's return of each pod, f64 `[P]`; NaN where it met a fault."""
    for record in reversed(pod_records(directory)):
        if "evaluation_return" in record:
            failed = [x is None for x in record["episodes"]]
            returns = np.asarray(json_floats(record["evaluation_return"]))
            return np.where(failed, np.nan, returns)
    raise ConfigError(f"{directory} was never evaluated: train it with --evaluations 1 or more.")


def json_floats(values: Sequence[float | None]) -> list[float]:
    """Numbers as they were before JSON made null of what is not finite."""
    return [math.nan if value is None else value for value in values]
