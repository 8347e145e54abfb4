"""The beginning of a run with what another run has learned."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from podracer.drivers.common import TrainState
from podracer.experiments.experiment import Experiment
from podracer.experiments.loading import load_run
from podracer.experiments.records import Totals
from podracer.experiments.run_setup import RunSetup
from podracer.experiments.serialization import read_config, recipe_name
from podracer.io.seal import CONFIG
from podracer.io.steps import identity_of
from podracer.types import CheckpointError, ConfigError, PyTree

Begin = Callable[[RunSetup], tuple[TrainState, Totals]]
"""Function that returns the first state of a new run, in place of `RunSetup.init`."""


class Weights:
    """First state of a run, whose learner is that of another run's newest checkpoint.

    It has the other's parameters, targets, optimizer and statistics. The frames that schedules
    count, environments, replay and random numbers begin anew.

    Args:
        run: directory of the other run; of a sweep its best pod is taken.
        setup, experiment: of the new run. One of the same recipe lends the other its own classes.

    Raises `ConfigError` where the learners differ in structure, and what `load_run` raises.
    """

    def __init__(self, run: str | Path, setup: RunSetup, experiment: Experiment) -> None:
        is_same_recipe = recipe_name(Path(run)) == experiment.recipe
        recipe = experiment if is_same_recipe else None
        state = load_run(run, recipe=recipe, opponents="none").state
        self._shared = state.learner.shared
        identity = identity_of(Path(run)) or {}
        self.about = {
            "run": str(Path(run).absolute()),
            "id": identity.get("id", ""),
            "updates": int(state.update),
        }
        num_pods = len(experiment.pods)
        _check_same(Path(run), self._shared, setup.abstract_state.learner.shared, num_pods)

    def __call__(self, setup: RunSetup) -> tuple[TrainState, Totals]:
        """Return the first state, and counters at 0."""
        state = setup.init()

        def put(new: jax.Array, old: Any) -> jax.Array:
            return jax.device_put(jnp.broadcast_to(old, new.shape), new.sharding)

        shared = jax.tree.map(put, state.learner.shared, self._shared)
        if hasattr(shared, "frames"):  # as those of all built-in agents
            shared = dataclasses.replace(shared, frames=state.learner.shared.frames)
        learner = dataclasses.replace(state.learner, shared=shared)
        return dataclasses.replace(state, learner=learner), Totals()


def describe_begin(begin: Begin | None) -> dict[str, Any]:
    """Return what `config.json` says of how a run began."""
    if begin is None:
        return {}
    if isinstance(begin, Weights):
        return {"weights": begin.about}
    function = begin.func if isinstance(begin, partial) else begin
    return {"begin": getattr(function, "__qualname__", type(function).__name__)}


def recorded_begin(run: Path, setup: RunSetup, experiment: Experiment) -> Begin | None:
    """Return how a run that ended before its first save began, so that it begins again like that.

    Raises `ConfigError` if that is not known, or if the run whose weights it took is gone or has
    learned since.
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
        weights = Weights(record["run"], setup, experiment)
    except (ConfigError, CheckpointError) as error:
        raise ConfigError(
            f"{run} ended before its first save, and began with the weights of {record['run']}, "
            f"which cannot be read: {error}"
        ) from error
    if weights.about != record:
        raise ConfigError(
            f"{run} ended before its first save, and began with {record['run']} at update "
            f"{record['updates']}, which has learned since or is another run: begin a new run."
        )
    return weights


def _check_same(run: Path, old: PyTree, new: PyTree, num_pods: int) -> None:
    """Raise `ConfigError` unless one learner has the shapes of the others, `[P, ...]` of pods."""
    old_shapes, new_shapes = (_shapes(tree) for tree in (old, new))
    lead = (num_pods,) if num_pods else ()
    for name in dict.fromkeys((*old_shapes, *new_shapes)):
        there, here = old_shapes.get(name), new_shapes.get(name)
        if there is None or here is None or (lead + there[0], there[1]) != here:
            raise ConfigError(
                f"{run} learned with another agent or network, or in another environment: its "
                f"learner has {_spell(name, there, 0)}, this one's {_spell(name, here, len(lead))}."
            )


def _shapes(tree: PyTree) -> dict[str, tuple[tuple[int, ...], str]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): (x.shape, str(x.dtype)) for path, x in leaves}


def _spell(name: str, leaf: tuple[tuple[int, ...], str] | None, skip: int) -> str:
    return f"no {name}" if leaf is None else f"{leaf[1]}{list(leaf[0][skip:])} at {name}"
