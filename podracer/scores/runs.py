"""Read a run's files, and each member of a population as a run of its own."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from podracer.errors import ConfigError
from podracer.io import reading
from podracer.io.crash import CRASH
from podracer.io.differences import leaves
from podracer.io.json_schema import anything, conforms
from podracer.io.seal import check_is_run
from podracer.io.sinks import PARENT, group, read_metrics
from podracer.io.text import redact
from podracer.scores.score import NOT_EVALUATED, final_score, has_fault, whole_return
from podracer.scores.statistics import final_mean

_STAGES = ("time_step", "time_compile", "time_evaluate", "time_save")
_HYPERPARAMETER = {"name": anything, "value": anything, ...: anything}
_POD = {"seed": anything, "hyperparameters": [_HYPERPARAMETER, ...], ...: anything}


@dataclasses.dataclass(frozen=True)
class RunRecords:
    """Contents of a run directory, see `read_run`; missing files are empty here."""

    name: str
    config: dict[str, Any]
    records: list[dict[str, Any]]
    crash: dict[str, Any]
    path: Path | None = None
    whole: RunRecords | None = None  # the run that a pod is a member of
    pod: int = 0

    @property
    def top(self) -> RunRecords:
        """The run with a directory of its own: the whole of a pod, or the run itself."""
        return self.whole or self

    def series(self, key: str, axis: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the finite values of a metric and their positions, both f64 `[records]`.

        Evaluations are of whole episodes, see `whole_return`.
        """
        read = whole_return if key == "evaluation_return" else lambda record: _number(record, key)
        pairs = np.array([(_number(r, axis), read(r)) for r in self.records], float)
        pairs = pairs.reshape(-1, 2)
        x, y = pairs[np.isfinite(pairs).all(axis=1)].T
        return x, y

    def last(self, key: str) -> Any:
        values = [r[key] for r in self.records if _number(r, key) is not None]
        return values[-1] if values else None

    @property
    def progress(self) -> float:
        """Share of the run's frames that are done."""
        frames = (self.top.last("frames") or 0) / max(1, len(pods_in(self.top.config)))
        return min(frames / (self._limit("frames") or math.nan), 1.0)

    def _limit(self, setting: str) -> float:
        """Return a number of the experiment, NaN where there is none."""
        try:
            return float(self.top.settings[setting])
        except (KeyError, ValueError):
            return math.nan

    @property
    def early_end(self) -> str:
        """Field of the experiment by which the run ended before its frames, "" if it has not."""
        if self.progress == 1:
            return ""
        evaluations = [r for r in self.top.records if r.get("evaluation_return") is not None]
        reached = whole_return(evaluations[-1]) if evaluations else None
        if reached is not None and reached >= self._limit("target_return"):
            return "target_return"
        is_over = (self.top.last("seconds") or 0) >= self._limit("max_seconds")
        return "max_seconds" if is_over else ""

    @property
    def has_diverged(self) -> bool:
        """Whether the learner met a fault, so that it has no score."""
        last = self.records[-1] if self.records else {}
        return has_fault(last) or self.top.crash.get("exception") == "NonFiniteError"

    @property
    def is_unfinished(self) -> bool:
        """Whether the run has not come to an end of its own."""
        return self.progress < 1 and not self.early_end and not self.has_diverged

    @property
    def stage_seconds(self) -> dict[str, float]:
        """Wall time in seconds by stage, such as `evaluate` and `save`; `other` is all else."""
        logged = dict.fromkeys((*_STAGES, *(key for record in self.records for key in record)))
        times = {key: self.series(key, "updates")[1] for key in logged if group(key) == "time"}
        seconds = {
            key.removeprefix("time_").replace("_", " "): float(values.sum())
            for key, values in times.items()
            if values.any()
        }
        return {**seconds, "other": max(0.0, (self.last("seconds") or 0.0) - sum(seconds.values()))}

    @property
    def is_evaluated(self) -> bool:
        """Whether a record has an evaluation."""
        return any("evaluation_return" in record for record in self.records)

    @property
    def final(self) -> tuple[float, str]:
        """Final score, and why there is none, see `final_score`.

        Returns of a data set, which the run replayed, are no score.
        """
        if self.is_replayed and not self.is_evaluated and not self.has_diverged:
            return math.nan, NOT_EVALUATED
        return final_score(self.records, has_diverged=self.has_diverged)

    @property
    def is_replayed(self) -> bool:
        """Whether the run learned from a data set, whose returns are those of its records."""
        environment = self.config.get("environment")
        return isinstance(environment, dict) and environment.get("kind") == "DataEnvironment"

    @property
    def final_return(self) -> float:
        """Mean return of training episodes at the end.

        NaN for a learner that met a fault, and for one of a data set, which plays none.
        """
        mean = final_mean(self.series("episode_return", "updates")[1])
        return math.nan if mean is None or self.has_diverged or self.is_replayed else mean

    @property
    def marks(self) -> list[str]:
        """What a reader must know before he takes the run's numbers, in words."""
        marks = [reason] if (reason := self.final[1]) else []
        if failed := self.last("pods_failed"):
            marks.append(f"{failed:g} pods diverged")
        if self.is_unfinished:
            marks.append(f"at {math.floor(100 * self.progress)} % of its frames")
        mixed = [(name, texts) for name, texts in self.versions.items() if len(texts) > 1]
        marks += [f"{name} {', then '.join(texts)}" for name, texts in mixed]
        return marks

    @property
    def versions(self) -> dict[str, list[str]]:
        """Versions of podracer and JAX that the run has had, one after the other."""
        steps = self.top.path.glob(f"checkpoints/{'[0-9]' * 12}") if self.top.path else ()
        metas = (reading.read_object(step / "meta.json") for step in sorted(steps, reverse=True))
        metadata = next((x for meta in metas if isinstance(x := meta.get("metadata"), dict)), {})
        attempts = metadata.get("versions")
        attempts = attempts if isinstance(attempts, list) else [self.config.get("versions")]
        attempts = [attempt for attempt in attempts if isinstance(attempt, dict)]
        return {
            name: list(dict.fromkeys(str(x[name]) for x in attempts if name in x))
            for name in ("podracer", "jax")
        }

    @property
    def identity(self) -> tuple[str, int] | None:
        """Id of the run and number of the pod, which its copies share; None if unknown."""
        run = self.config.get("run")
        run_id = run.get("id") if isinstance(run, dict) else None
        return (run_id, self.pod) if isinstance(run_id, str) else None

    @property
    def seed(self) -> str:
        """What tells the run from others of its configuration: its seed, if it has one.

        Pods under a selection have no configuration of their own: it is their place in the sweep.
        """
        seed = self.settings.get("seed", self.name)
        if self.whole is None or not has_selection(self.config["experiment"]):
            return seed
        return f"{seed} {self.pod} {self.whole.config['experiment']['pods'][self.pod]}"

    @property
    def label(self) -> str:
        """Name among the runs of a configuration, short."""
        if self.whole is not None and has_selection(self.config["experiment"]):
            return f"pod {self.pod}"
        return f"seed {self.seed}" if "seed" in self.settings else self.name

    @functools.cached_property
    def settings(self) -> dict[str, str]:
        """Settings of the experiment by dotted name, as JSON."""
        return as_text(self.config.get("experiment", {}))

    @property
    def configuration(self) -> dict[str, str]:
        """Settings that runs have in common which differ only in the seed."""
        return {k: v for k, v in self.settings.items() if (k, v) != ("pods", "[]") and k != "seed"}

    @property
    def environment(self) -> str:
        """Name of the environment, with the settings that an object has; "" if it is unknown."""
        return environment_text(self.config.get("experiment", {}).get("environment"))[:80]

    @property
    def recipe(self) -> str:
        return str(self.config.get("recipe", "-"))

    @property
    def acting(self) -> str:
        """How the run's evaluations act, "" where its configuration does not say it."""
        policy, epsilon = (self.settings.get(f"evaluation_{x}") for x in ("policy", "epsilon"))
        return acting_text(policy, float(epsilon or 0)) if policy else ""


def read_run(path: Path, name: str = "") -> RunRecords:
    """Return the run of a directory, by default under its name.

    Raises `ConfigError` and `StorageError` for files that are not a run's.
    """
    config, crash = read_object(path / "config.json"), read_object(path / CRASH)
    return RunRecords(name or path.name, config, read_metrics(path / "metrics.jsonl"), crash, path)


def read_members(path: Path, name: str = "") -> list[RunRecords]:
    """Return the run of a directory; for a population, one run for each member.

    Metrics of several numbers are apart, see `with_parts`. Raises as `read_run` does, and
    `ConfigError` where there is no run.
    """
    if (path / "config.json").exists() or not (path / "metrics.jsonl").exists():
        check_is_run(path)
    # The pods come first: of a run that goes on, its own records then reach as far.
    series = read_metrics(path / "pods.jsonl")
    run = read_run(path, name)
    has_pods = (path / "pods.jsonl").exists() and pods_in(run.config)
    runs = members_of(run, series) if has_pods else [run]
    return [dataclasses.replace(x, records=[*map(with_parts, x.records)]) for x in runs]


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object of a file of a run, without secrets; empty where there is no file."""
    try:
        content = json.loads(reading.read_limited(path)) if path.is_file() else {}
        is_sound = isinstance(content.get("experiment", {}), dict)
    except (ValueError, RecursionError, AttributeError):
        content, is_sound = {}, False
    if not is_sound:
        raise ConfigError(f"{path} is not a JSON object of a run.")
    return redact(content, stable=True)


def members_of(run: RunRecords, series: Sequence[dict[str, Any]]) -> list[RunRecords]:
    """Return each pod of a population as a run with its seed and hyperparameters.

    `series` are the records of all pods.
    """
    pods, series = pods_in(run.config), pod_records(run.config, series)
    experiment = {k: v for k, v in run.config.get("experiment", {}).items() if k != "pods"}
    of_run = {record.get("updates"): record for record in run.records}
    shared = {k for r in run.records for k in r if k == "seconds" or group(k) == "time"}
    earlier_frames = 0  # each pod's before the first record, in earlier rounds of a tournament
    if series and "frames" in series[0]:
        whole = of_run.get(series[0]["updates"], {}).get("frames") or 0
        frames = sum(x or 0 for x in series[0]["frames"])
        earlier_frames = max(0, whole - frames) // len(pods)
    members = []
    for index, pod in enumerate(pods):
        values = {item["name"]: item["value"] for item in pod["hyperparameters"]}
        if has_selection(experiment):  # changes them: all pods are of one configuration
            values = dict.fromkeys(values, "chosen by the selection")
        starts = {f"{name}.start" for name in values}  # a schedule's value is its start
        settings = dict(leaves(experiment.get("agent", {})))
        agent = {k: x for k, x in settings.items() if k not in starts} | values
        config = {**run.config, "experiment": {**experiment, "agent": agent, "seed": pod["seed"]}}
        frames, records = earlier_frames, []
        for record in series:
            values_of_pod = {k: v[index] for k, v in record.items() if k not in ("updates", PARENT)}
            frames += values_of_pod.get("frames") or 0
            of_all = of_run.get(record["updates"], {})
            of_member = {key: of_all[key] for key in shared & of_all.keys()}
            pace = (of_all.get("frames_per_second") or math.nan) / len(pods)
            counts = {"updates": record["updates"], "frames": frames}
            records.append({**of_member, "frames_per_second": pace, **values_of_pod, **counts})
        crash = {} if index else run.crash  # it ended all pods, and is told once
        name = f"{run.name} pod {index}"
        members.append(RunRecords(name, config, records, crash, whole=run, pod=index))
    return members


MOST_PARTS = 16  # components of a metric of several numbers that are shown apart
_QUANTILES = {
    "lowest": 0,
    "5 %": 5,
    "25 %": 25,
    "median": 50,
    "75 %": 75,
    "95 %": 95,
    "highest": 100,
}


def with_parts(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record with numbers in place of each metric `[n]`: its components, or quantiles.

    They are named `METRIC[PART]`.
    """
    if not any(isinstance(value, list) for value in record.values()):
        return record  # most have none, and a copy of a long run is dear
    numbers: dict[str, Any] = {}
    for name, value in record.items():
        if not isinstance(value, list):
            numbers[name] = value
        elif len(value) <= MOST_PARTS:
            numbers |= {f"{name}[{index}]": x for index, x in enumerate(value)}
        elif finite := [x for x in value if isinstance(x, int | float)]:
            levels = np.percentile(finite, [*_QUANTILES.values()]).tolist()
            numbers |= {f"{name}[{k}]": x for k, x in zip(_QUANTILES, levels, strict=True)}
    return numbers


def pods_in(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the pods of a configuration, none where it has none or what cannot be pods."""
    pods = config.get("experiment", {}).get("pods")
    return pods if conforms(pods, [_POD, ...]) else []


def pod_records(
    config: Mapping[str, Any], series: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Return the records that have a number for each pod, or a list of numbers by the agent."""
    count = len(pods_in(config))

    def is_row(name: str, values: Any) -> bool:
        if not isinstance(values, list) or len(values) != count:
            return False
        if group(name) == "learn":  # a metric may have several numbers
            values = [x for value in values for x in (value if isinstance(value, list) else [])]
        return not any(isinstance(value, list) for value in values)

    return [
        record
        for record in series
        if "updates" in record and all(is_row(k, v) for k, v in record.items() if k != "updates")
    ]


def has_selection(experiment: Mapping[str, Any]) -> bool:
    """Return whether pods of an experiment, given as JSON, start from others while they train."""
    return (experiment.get("exchange") or {}).get("kind") == "Selection"


def acting_text(policy: str, epsilon: float) -> str:
    """Describe how an evaluation acts: `greedy`, `sampled`, `greedy with epsilon 0.01`."""
    return f"{policy} with epsilon {epsilon:g}" if epsilon else policy


def environment_text(environment: Any) -> str:
    """Return the name of an environment in JSON, or its class with the settings; "" for neither."""
    if not isinstance(environment, dict):
        return environment if isinstance(environment, str) else ""
    settings = [f"{k} {v}" for k, v in as_text(environment).items() if k != "kind"]
    return ", ".join([str(environment.get("kind", "")), *settings])


def as_text(tree: Mapping[str, Any]) -> dict[str, str]:
    """Return the leaves of nested JSON by dotted name, as JSON except for strings."""
    return {name: x if isinstance(x, str) else json.dumps(x) for name, x in leaves(tree)}


def _number(record: Mapping[str, Any], key: str) -> float | None:
    value = record.get(key)
    return value if isinstance(value, int | float) else None
