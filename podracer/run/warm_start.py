"""The beginning of a run with what another run has learned."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from podracer.config.serialization import read_config
from podracer.drivers.driver import Driver
from podracer.drivers.state import TrainState
from podracer.errors import CheckpointError, ConfigError
from podracer.io.checkpoint import load_part
from podracer.io.paths import user_path
from podracer.io.seal import CONFIG
from podracer.io.steps import Choice, identity_of
from podracer.run.resume import Totals
from podracer.run.sweep import best_pod
from podracer.types import leaves_by_path

FirstState = Callable[
    [Driver, jax.Array], tuple[TrainState, Totals] | tuple[TrainState, Totals, Mapping[str, Any]]
]
"""Function of a driver and of the run's key that returns the first state of a new run, in place of
`Driver.init`, its counters, and, to go on from a checkpoint, the metadata of that."""


@dataclasses.dataclass(frozen=True)
class Weights:
    """Beginning of a run with what another run has learned.

    It has the other's parameters, targets, optimizer and statistics. Environments, lifetimes,
    replay and random numbers begin anew, and so do the fields of the learner's state that are
    declared by `types.reset_on_warm_start`: the frames that schedules count, and an update rule
    that is not learned, which is that of the new run's file. Counters are at 0.
    """

    run: str | Path
    """Directory of the other run; of a sweep its best pod is taken. Its arrays alone are read, so
    its recipe, agent and environment may be any."""
    checkpoint: Choice = "newest"
    """Choice of `podracer.load`."""


@dataclasses.dataclass(frozen=True)
class Begin:
    """Beginning of a run in place of `Driver.init`."""

    first_state: FirstState
    entries: dict[str, Any]
    """Entries of `config.json` by which a run that ended before its first save begins again."""


def begin_of(begin: Weights | FirstState, driver: Driver) -> Begin:
    """Return the beginning that `podracer.train` is given, checked. Raises as `begin_with` does."""
    if isinstance(begin, Weights):
        return begin_with(begin, driver)
    inner = begin.func if isinstance(begin, partial) else begin
    return Begin(begin, {"begin": getattr(inner, "__qualname__", type(inner).__name__)})


def begin_with(weights: Weights, driver: Driver) -> Begin:
    """Return the beginning with a learner from another run's checkpoint.

    Raises `ConfigError` if there is no run or the learners differ in structure, and what
    `load_part` raises.
    """
    directory = user_path(weights.run)
    experiment = read_config(directory / CONFIG)["experiment"]
    restored = load_part(directory, ".learner.shared", weights.checkpoint)
    leaves: dict[str, Any] = restored.state
    if experiment.get("pods"):
        pod = best_pod(directory, restored)
        leaves = {name: array[pod] for name, array in leaves.items()}
    shared = driver.abstract_state.learner.shared
    reset = tuple(reset_paths(shared))

    def without_reset(leaves: dict[str, Any]) -> dict[str, Any]:
        inner = tuple(path + end for path in reset for end in ".[")
        return {k: x for k, x in leaves.items() if k not in reset and not k.startswith(inner)}

    old = without_reset(leaves)
    _check_same(directory, old, without_reset(leaves_by_path(shared)), driver.num_pods)

    def first_state(driver: Driver, key: jax.Array) -> tuple[TrainState, Totals]:
        state = driver.init(key)

        def put(path: Any, new: jax.Array) -> jax.Array:
            leaf = old.get(jax.tree_util.keystr(path))
            if leaf is None:
                return new
            return jax.device_put(jnp.broadcast_to(leaf, new.shape), new.sharding)

        shared = jax.tree_util.tree_map_with_path(put, state.learner.shared)
        return state.with_shared(shared), Totals()

    run_id = (identity_of(directory) or {}).get("id", "")
    entry = {"run": str(directory.absolute()), "id": run_id, "updates": restored.step}
    return Begin(first_state, {"weights": entry})


def recorded_begin(run: Path, driver: Driver) -> Begin | None:
    """Return how a run that ended before its first save began, so that it begins again like that.

    Raises `ConfigError` if that is not known, or if the run whose weights it took, or their
    checkpoint, is gone.
    """
    if not (run / CONFIG).is_file():
        return None
    config = read_config(run / CONFIG)
    if name := config.get("begin"):
        raise ConfigError(
            f"{run} ended before its first save, and began with a state of {name!r}: resume it "
            "from Python with begin=..., or begin a new run."
        )
    if (record := config.get("weights")) is None:
        return None
    try:
        begin = begin_with(Weights(record["run"], record["updates"]), driver)
    except (ConfigError, CheckpointError) as error:
        raise ConfigError(
            f"{run} ended before its first save, and began with the weights of {record['run']}, "
            f"which cannot be read: {error}"
        ) from error
    if begin.entries["weights"] != record:
        raise ConfigError(
            f"{run} ended before its first save, and began with {record['run']}, where another run "
            "is now: begin a new run."
        )
    return begin


def reset_paths(tree: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of the fields that `types.reset_on_warm_start` declared, within a state."""
    declared = {
        field.name
        for field in (dataclasses.fields(tree) if dataclasses.is_dataclass(tree) else ())
        if field.metadata.get("reset_on_warm_start")
    }
    children = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: x is not tree)
    for keys, child in children:
        name = path + jax.tree_util.keystr(keys)
        if keys and getattr(keys[0], "name", None) in declared:
            yield name
        elif keys:
            yield from reset_paths(child, name)


def _check_same(run: Path, old: dict[str, Any], new: dict[str, Any], num_pods: int) -> None:
    """Raise `ConfigError` unless one learner has the shapes of the others, `[P, ...]` of pods."""
    old_shapes, new_shapes = _shapes(old), _shapes(new)
    lead = (num_pods,) if num_pods else ()
    for name in dict.fromkeys((*new_shapes, *old_shapes)):
        old_leaf, new_leaf = old_shapes.get(name), new_shapes.get(name)
        if not old_leaf or not new_leaf or (lead + old_leaf[0], old_leaf[1]) != new_leaf:
            old_text, new_text = _spell(name, old_leaf, 0), _spell(name, new_leaf, len(lead))
            raise ConfigError(
                f"{run} learned with another agent or network, or in another environment: its "
                f"learner has {old_text}, this one's {new_text}."
            )


def _shapes(leaves: dict[str, Any]) -> dict[str, tuple[tuple[int, ...], str]]:
    return {name: (x.shape, str(x.dtype)) for name, x in leaves.items()}


def _spell(name: str, leaf: tuple[tuple[int, ...], str] | None, skip: int) -> str:
    name = name or "shared"  # where that is one array
    return f"no {name}" if leaf is None else f"{leaf[1]}{list(leaf[0][skip:])} at {name}"
