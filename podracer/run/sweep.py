"""Sweeps: the pods of a grid or of random draws, and their ranking afterwards."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from podracer.config.experiment import Experiment
from podracer.config.serialization import read_config, to_json
from podracer.drivers.exchange import Averaging, Peers
from podracer.drivers.population import Exchange, Hyperparameter, Pod
from podracer.drivers.selection import PopulationBased, Range, Rule, Selection
from podracer.errors import CheckpointError, ConfigError, PodracerError
from podracer.io.checkpoint import Restored
from podracer.io.crash import CRASH
from podracer.io.jsonl import read_sealed
from podracer.io.reading import read_lines, read_object
from podracer.io.run_directory import write_json
from podracer.io.seal import CONFIG
from podracer.io.sinks import HYPERPARAMETER, PARENT, parse_record, read_metrics
from podracer.scores.runs import RunRecords, members_of
from podracer.scores.score import returns_of
from podracer.scores.seeds import Score, score_of_runs

RECORDS = "pods.jsonl"

MAX_PODS = 2**16


Space = Range | tuple[float, ...]
"""Values of a hyperparameter: an interval to draw from, or some to try."""


def make_pods(
    spaces: Mapping[str, Space], seeds: Sequence[int], draws: int = 0, draw_seed: int = 0
) -> tuple[Pod, ...]:
    """Return a pod for every configuration and seed.

    Without ranges the configurations are the grid of all values, with them `draws` random ones.
    Raises `ConfigError` for a range without draws, draws without a range, and too many pods.
    """
    ranges = [name for name, space in spaces.items() if isinstance(space, Range)]
    if ranges and draws < 1:
        raise ConfigError(f"{ranges[0]} has a range: give the number of `draws`.")
    if draws and not ranges:
        raise ConfigError("`draws` needs a range to draw from, such as learning_rate=1e-5:1e-2.")
    lengths = [len(space) for space in spaces.values() if not isinstance(space, Range)]
    if (pods := (draws if ranges else math.prod(lengths)) * len(seeds)) > MAX_PODS:
        raise ConfigError(
            f"a sweep has at most {MAX_PODS:,} pods, but these are {pods:,}: give fewer seeds, "
            "draws or values."
        )
    if ranges:
        rng = np.random.default_rng(draw_seed)
        rows = [
            [x.draw(rng) if isinstance(x, Range) else float(rng.choice(x)) for x in spaces.values()]
            for _ in range(draws)
        ]
    else:
        rows = [list(row) for row in itertools.product(*spaces.values())]  # type: ignore[arg-type]
    return tuple(
        Pod(seed, tuple(map(Hyperparameter, spaces, row))) for row in rows for seed in seeds
    )


def make_exchange(
    rule: Rule | None, peers: Peers | None, every: int, spaces: Mapping[str, Space]
) -> Exchange | None:
    """Return the selection by a rule or the averaging with peers, None if there is neither.

    A rule perturbs what has a range. Raises `ConfigError` for both, and for a period without
    either.
    """
    if rule is not None and peers is not None:
        raise ConfigError("pods either select or average, not both.")
    if peers is not None:
        return Averaging(peers, every)
    if rule is None:
        if every:
            raise ConfigError(
                "`exchange.every` is the period of an exchange: give the rule of a selection "
                "(`exchange.rule`), or the peers of an average (`exchange.peers`)."
            )
        return None
    if isinstance(rule, PopulationBased):
        bounds = tuple(space for space in spaces.values() if isinstance(space, Range))
        rule = dataclasses.replace(rule, bounds=bounds)
    return Selection(rule, every)


# --- the ranking ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Configuration:
    """Configuration of a sweep and the score of its pods: its seeds, but under a selection."""

    hyperparameters: tuple[Hyperparameter, ...]
    pods: tuple[int, ...]  # their numbers
    score: Score


def configurations(directory: Path, experiment: Experiment) -> list[Configuration]:
    """Return the configurations of a population's run, best first, those at the last evaluation.

    Those of which a pod has no score come after the others. Raises `ConfigError` if the run has no
    population, or no record of an evaluation of its pods.
    """
    records = read_pods(directory)
    evaluation = _last_evaluation(directory, records)
    config = {**read_object(directory / CONFIG), "experiment": to_json(experiment)}
    crash = read_object(directory / CRASH)
    run = RunRecords(directory.name, config, [*readable_records(directory)], crash, directory)
    last = [record for record in records[-1:] if record is not evaluation]
    members = members_of(run, [evaluation, *last])  # all that final scores depend on
    groups: dict[tuple[Hyperparameter, ...], list[int]] = {}
    for number, values in enumerate(_hyperparameters(experiment, records, evaluation["updates"])):
        groups.setdefault(values, []).append(number)
    runs = {values: [members[pod] for pod in pods] for values, pods in groups.items()}
    ranking = [
        Configuration(values, tuple(pods), score_of_runs(runs[values], runs.values()))
        for values, pods in groups.items()
    ]
    return sorted(ranking, key=lambda configuration: configuration.score.rank)


def best_pod(directory: Path, restored: Restored) -> int:
    """Return the number of the pod that was best in the last evaluation before a checkpoint.

    Where a selection came between them, pods have the returns of those that they descend from.
    Raises `CheckpointError` if the records have changed since it was saved, and `ConfigError` if no
    pod has a return.
    """
    path, sealed = directory / RECORDS, restored.metadata["records"][RECORDS]
    if read_sealed(path, sealed) is None:
        raise CheckpointError(
            f"{path} is not as it was when the checkpoint was saved, so the best pod is unknown: "
            "bring it back, or name a pod."
        )
    records = read_pods(directory)
    evaluation = _last_evaluation(directory, records, restored.step)
    evaluated = evaluation["updates"]
    since = [r for r in selections(records) if evaluated < r["updates"] <= restored.step]
    returns = returns_of(evaluation, "evaluation_return")
    origins = np.array(ancestors(since)) if since else np.arange(len(returns))
    returns = returns[origins]
    if np.isnan(returns).all():
        raise ConfigError(
            f"{directory} has no best pod: in the last evaluation each of them met a fault or had "
            "episodes that did not end. Name a pod."
        )
    best = int(np.nanargmax(returns))
    origin = int(origins[best])
    return origin if origins[origin] == origin else best  # itself rather than its copies


def write_best(directory: Path, experiment: Experiment, winner: Configuration) -> Path:
    """Write the best configuration to a file that `podracer train` takes as a recipe.

    Raises `ConfigError` if a pod of each configuration has no score.
    """
    if not winner.score.is_whole:
        raise ConfigError(
            f"{directory} has no best configuration: in the last evaluation a pod of each met a "
            "fault or had episodes that did not end."
        )
    pod = dataclasses.replace(
        experiment.pods[winner.pods[0]], hyperparameters=winner.hyperparameters
    )
    best = dataclasses.replace(experiment.of_pod(pod), recipe=f"{experiment.recipe}_best")
    path = directory / "best.json"
    write_json(path, {"experiment": to_json(best)})
    return path


def selections(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the pods' records of the chunks that began with a selection, oldest first.

    Besides the metrics they have the `parent` of each pod, by number.
    """
    return [record for record in records if PARENT in record]


def ancestors(records: Sequence[dict[str, Any]]) -> list[int]:
    """Return the pod of the first chunk from which each pod descends, given all `selections`."""
    numbers = list(range(len(records[0][PARENT])))
    for record in records:
        numbers = [numbers[parent] for parent in record[PARENT]]
    return numbers


def read_pods(directory: Path) -> list[dict[str, Any]]:
    """Return the records of a population's pods, oldest first."""
    path = directory / RECORDS
    if not path.exists():
        raise ConfigError(f"{directory} holds no population: there is no {RECORDS} in it.")
    return read_metrics(path)


def _last_evaluation(
    directory: Path, records: Sequence[dict[str, Any]], updates: float = math.inf
) -> dict[str, Any]:
    """Return the pods' record of the run's last evaluation up to an update."""
    evaluation = _last_evaluated(records, updates)
    whole_run = _last_evaluated(readable_records(directory), updates)
    if whole_run and (evaluation is None or evaluation["updates"] < whole_run["updates"]):
        raise ConfigError(
            f"{directory / RECORDS} lacks the evaluation at update {whole_run['updates']}, by "
            "which the pods are ranked: it could not be written."
        )
    if evaluation is None:
        raise ConfigError(
            f"{directory} has no evaluation yet, by which its pods are ranked: resume it"
            f"{_needed_for_evaluation(directory)}."
        )
    return evaluation


def _needed_for_evaluation(directory: Path) -> str:
    """Return what a run without an evaluation needs to make one, as it is resumed."""
    experiment = read_config(directory / CONFIG)["experiment"]
    last = [{}, *deque(readable_records(directory), maxlen=1)][-1]
    has_frames = last.get("frames", 0) >= experiment["frames"] * len(experiment["pods"])
    limit = experiment.get("max_seconds")
    needed = [] if experiment.get("evaluations") else ["`evaluations=1` or more"]
    needed += ["more `frames`"] if has_frames else []
    needed += ["more `max_seconds`"] if limit and last.get("seconds", 0) >= limit else []
    return f" with {' and '.join(needed)}" if needed else ""


def readable_records(directory: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of the run as a whole that can be read, in however large a file."""
    with contextlib.suppress(OSError, PodracerError):
        yield from filter(None, map(parse_record, read_lines(directory / "metrics.jsonl")))


def _last_evaluated(records: Iterable[dict[str, Any]], updates: float) -> dict[str, Any] | None:
    evaluations = (r for r in records if "evaluation_return" in r and r["updates"] <= updates)
    return [None, *deque(evaluations, maxlen=1)][-1]


def _hyperparameters(
    experiment: Experiment, records: Sequence[dict[str, Any]], updates: int
) -> list[tuple[Hyperparameter, ...]]:
    """Return the hyperparameters that each pod had at an update."""
    selected = [record for record in selections(records) if record["updates"] <= updates]
    if not selected:
        return [pod.hyperparameters for pod in experiment.pods]
    values = {
        name.removeprefix(HYPERPARAMETER): column
        for name, column in selected[-1].items()
        if name.startswith(HYPERPARAMETER)
    }
    return [
        tuple(Hyperparameter(name, column[number]) for name, column in values.items())
        for number in range(len(experiment.pods))
    ]
