"""A pod's round: restore its parents, train for the budget, evaluate, report.

A round is a run like any other, in `DIR/pods/p3r12/`, in a process of its own:

    task.json  --train-->  checkpoints/  --score-->  report.json

A killed attempt is followed by another one in the same directory, which continues from the
last save. The engine starts `python -m podracer.tournament.process DIRECTORY`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from podracer import errors, recipes
from podracer.config.experiment import Experiment
from podracer.config.serialization import KINDS, from_json, to_json
from podracer.devices.startup import (
    choose_gpu_kernels,
    disable_async_dispatch,
    use_compilation_cache,
    use_cpu_devices,
)
from podracer.drivers.driver import Driver
from podracer.drivers.selection import mean_of_floats
from podracer.drivers.state import TrainState
from podracer.evaluate import MAX_STEPS
from podracer.io import checkpoint
from podracer.io.reading import read_limited
from podracer.io.run_directory import RunLock, own_directory, write_json
from podracer.io.seal import MANIFEST
from podracer.io.steps import CHECKPOINTS, read_meta, saved_updates, step_name
from podracer.io.text import explain_error
from podracer.rollout import Purpose, purpose_key
from podracer.run.errors import classify_error
from podracer.run.resume import Totals, check_metadata
from podracer.run.setup import make_driver, make_evaluator
from podracer.run.training import train
from podracer.tournament.config import experiment_of_round, restore_experiment
from podracer.tournament.report import REPORT
from podracer.types import PyTree

TASK = "task.json"


@dataclasses.dataclass(frozen=True)
class Reference:
    """An entry to start from."""

    name: str
    checkpoint: str  # relative to the tournament
    digest: str  # SHA-256 of its manifest


@dataclasses.dataclass(frozen=True)
class Task:
    """Instructions for one attempt at a round."""

    pod: int
    round: int
    token: int
    experiment: Experiment
    parents: tuple[Reference, ...]  # none: fresh; one: continued; several: fused
    frames: int  # to train for
    seconds: float | None  # or this time limit, if it is reached first
    evaluation_seed: int  # draws the held-out episodes, the same for all pods
    episodes: int


_KINDS = {**KINDS, "Task": Task, "Reference": Reference}


def write_task(directory: Path, task: Task) -> None:
    """Write the task for the pod's process before it starts. Raises `ConfigError` for a link."""
    for folder in (directory.parent, directory):
        own_directory(folder)
    write_json(directory / TASK, to_json(task))


def read_task(directory: Path, user_experiments: Sequence[Experiment] = ()) -> Task:
    """Read the task in a round's directory; `user_experiments` is as in `restore_experiment`.

    Raises `ConfigError` if there is none.
    """
    try:
        data = json.loads(read_limited(directory / TASK))
        experiment = restore_experiment(data["experiment"], user_experiments)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise errors.ConfigError(f"{directory} holds no pod's task: {error}.") from error
    return from_json({**data, "experiment": experiment}, _KINDS)


def run(directory: Path, user_experiments: Sequence[Experiment] = ()) -> int:
    """Run the round in a directory up to its report. Returns the exit code.

    `user_experiments` is as in `restore_experiment`. Raises `CheckpointError` if a parent differs
    from the one on the leaderboard.
    """
    task = read_task(directory, user_experiments)
    parents = [verified_checkpoint(directory.parents[1], parent) for parent in task.parents]
    earlier = _totals(parents[0]) if parents else Totals()
    frames = earlier.frames // max(1, len(task.experiment.pods))
    experiment = dataclasses.replace(
        experiment_of_round(task.experiment, task.frames, frames),
        max_seconds=None if task.seconds is None else earlier.seconds + task.seconds,
    )
    continues = bool(parents) and task.parents[0].name == f"p{task.pod}r{task.round - 1}"
    start = partial(begin, parents, None if continues else task.round, experiment.agent)
    result = train(
        experiment,
        run_dir=directory,
        resume=(directory / "config.json").exists(),
        begin=start if parents else None,
        progress=False,
    )
    if result.exit_code:
        return result.exit_code
    path = directory / CHECKPOINTS / step_name(saved_updates(directory))
    returns, unfinished = score(path, experiment, task.evaluation_seed, task.episodes)
    totals = _totals(path)
    mean, standard_error, episodes = statistics(returns)
    report = {
        "token": task.token,
        "score": mean,
        "standard_error": standard_error,
        "episodes": episodes,
        "frames": totals.frames,
        "seconds": totals.seconds,
        "checkpoint": path.relative_to(directory.parents[1]).as_posix(),
        "digest": digest(path),
        "unfinished": unfinished,
    }
    if read_task(directory, user_experiments).token != task.token:
        raise StillInUse(f"a later attempt has begun in {directory}: it reports.")
    write_json(directory / REPORT, report)
    return 0


def begin(
    parents: Sequence[Path], branch: int | None, agent: Any, driver: Driver, key: jax.Array
) -> tuple[TrainState, Totals, Mapping[str, Any]]:
    """Return the beginning of a round: its parent's state, or the fusion of several parents.

    Counters, numbers that had changed and what callbacks had saved come from the first; `agent` is
    the round's, see `kept_changes`. With `branch` None the pod keeps its parent's random numbers,
    so it continues to the bit. Else they are its own of the round `branch`: it does not repeat what
    the parent did next.
    """
    restored = [
        checkpoint.load(path.parents[1], driver.abstract_state, int(path.name)) for path in parents
    ]
    metadata = restored[0].metadata
    check_metadata(metadata)
    state = fuse([restored_parent.state for restored_parent in restored])
    if branch is not None:
        to_round = partial(round_key, branch)
        keys = jax.vmap(to_round)(key) if key.ndim else to_round(key)
        state = dataclasses.replace(state, key=jax.device_put(keys, state.key.sharding))
    changes = kept_changes(metadata, agent)
    return state, Totals(**metadata["totals"]), {**metadata, "changes": changes}


def kept_changes(metadata: Mapping[str, Any], agent: Any) -> dict[str, Any]:
    """Return what callbacks had changed, without fields of the agent that selection has changed."""
    changes = metadata.get("changes") or {}
    old, new = metadata["experiment"]["agent"], to_json(agent)
    fields = {k: v for k, v in changes.get("agent", {}).items() if old.get(k) == new.get(k)}
    return {k: v for k, v in {**changes, "agent": fields}.items() if v}


def round_key(round: int, run_key: jax.Array) -> jax.Array:
    """Return the key of a round that starts from another entry than the pod's newest."""
    return jax.random.fold_in(purpose_key(run_key, Purpose.START_ROUND), round)


def fuse(states: Sequence[TrainState]) -> TrainState:
    """Average learner states: parameters, optimizer moments, targets, statistics.

    Counters, environments, replays and keys are those of the first. See `mean_of_floats`.
    """

    def mean(*leaves: Any) -> Any:
        return jax.device_put(mean_of_floats(*leaves), leaves[0].sharding)

    shared: PyTree = jax.tree.map(mean, *(state.learner.shared for state in states))
    return states[0].with_shared(shared)


def score(path: Path, experiment: Experiment, seed: int, episodes: int) -> tuple[np.ndarray, int]:
    """Return the held-out episodes' returns of a checkpoint, and how many of them did not end.

    The returns are `[episodes]`, or `[P, episodes]` of the learners of a population that met no
    fault. An episode that does not end within `evaluate.MAX_STEPS`, the same limit for all pods,
    counts with its return until then. The same checkpoint, seed and kind of device give the same
    numbers. Raises `EnvironmentFault` where faults broke episodes and others did not end, as those
    returns are of fewer steps.
    """
    use_compilation_cache()
    pods = tuple(dataclasses.replace(pod, seed=seed) for pod in experiment.pods)
    experiment = dataclasses.replace(
        experiment, pods=pods, evaluation_episodes=episodes, fixed_evaluation=True
    )
    driver = make_driver(experiment)
    state = checkpoint.load(path.parents[1], driver.abstract_state, int(path.name)).state
    episodes_key = jnp.broadcast_to(jax.random.key(seed), state.key.shape)
    evaluate = make_evaluator(experiment, driver)
    evaluation = evaluate(dataclasses.replace(state, key=episodes_key))
    sound = np.asarray(state.fault)[:, 0] == 0 if experiment.pods else ...
    returns = evaluation.returns[sound]
    if unfinished := int(np.sum(np.asarray(evaluation.unfinished)[sound])):
        of_all = f"{unfinished} of {returns.size} held-out episodes"
        text = f"{of_all} did not end within {MAX_STEPS:,} steps"
        if evaluation.broken:
            reason = f"where faults broke {evaluation.broken}"
            raise errors.EnvironmentFault(f"{text}, {reason}: no score.")
        print(f"{text}: they count with their returns until then.")
    return returns, unfinished


def statistics(returns: np.ndarray) -> tuple[float, float, int]:
    """Return the mean of the returns of `score`, its standard error, and the number of episodes.

    The pods of a population play the same episodes, so that the means over them are the independent
    samples. One episode has no standard error; it is then 0.
    """
    means = returns.reshape(-1, returns.shape[-1]).mean(0)
    error = means.std(ddof=1) / math.sqrt(means.size) if means.size > 1 else 0.0
    return float(returns.mean()), float(error), means.size


def digest(path: Path) -> str:
    """Return the SHA-256 of a checkpoint's manifest, which contains each file's."""
    try:
        return hashlib.sha256(read_limited(path / MANIFEST)).hexdigest()
    except OSError as error:
        raise errors.CheckpointError(f"{path} is not a sealed checkpoint: {error}") from error


def verified_checkpoint(tournament: Path, entry: Reference) -> Path:
    """Return the checkpoint of an entry. Raises `CheckpointError` if it is not the recorded one."""
    path = tournament / entry.checkpoint
    if digest(path) != entry.digest:
        raise errors.CheckpointError(f"{path} is not the checkpoint on the leaderboard.")
    return path


def _totals(path: Path) -> Totals:
    return Totals(**read_meta(path)["metadata"]["totals"])


# --- in a process of its own ----------------------------------------------------------------------


def run_alone(directory: Path, names: Sequence[str] = ()) -> int:
    """Run the round as the only one of this process; `names` are recipes of the user's own.

    Returns the exit code also of what `run` raises, which is printed.
    """
    try:
        user_experiments = tuple(recipes.find(name) for name in names)
        choose_gpu_kernels()
        experiment = read_task(directory, user_experiments).experiment
        if experiment.arch == "sebulba" and experiment.devices <= 1:
            disable_async_dispatch()
        if experiment.devices:  # a pod is one process, whatever the launcher's variables say
            use_cpu_devices(experiment.devices)
        wait_for_lock(directory)
        return run(directory, user_experiments)
    except Exception as error:
        return explain_error(classify_error(error))


class StillInUse(errors.PodracerError):
    """Another attempt, perhaps on a machine that is cut off, has not ended or has begun."""

    exit_code = 77


def wait_for_lock(directory: Path) -> None:
    """Wait until an earlier attempt, whose orchestrator was killed, has saved and ended."""
    deadline = time.monotonic() + 60.0
    while True:
        try:
            with RunLock(directory):
                return
        except errors.ConfigError:
            if time.monotonic() > deadline:
                raise StillInUse(f"{directory} is still in use by an earlier attempt.") from None
        time.sleep(0.1)
