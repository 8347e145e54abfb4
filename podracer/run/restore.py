"""The agent, the environment and the state of a run at a checkpoint."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from podracer import recipes
from podracer.agent import Agent, Blueprint
from podracer.config.experiment import Experiment
from podracer.config.serialization import read_config, read_experiment, recipe_name
from podracer.devices.mesh import make_mesh
from podracer.drivers import population
from podracer.drivers.common import TrainState, abstract_state
from podracer.drivers.selection import SelectionState
from podracer.environment import Environment, HostEnvironments
from podracer.errors import ConfigError
from podracer.io import checkpoint as checkpoints
from podracer.io.checkpoint import Choice, Restored
from podracer.io.entry_points import installed
from podracer.io.seal import CONFIG
from podracer.run import sweep
from podracer.run.blueprint import build
from podracer.scores.runs import environment_text
from podracer.types import LearnerState


@dataclasses.dataclass(frozen=True)
class LoadedRun:
    """A run at a checkpoint."""

    blueprint: Blueprint
    env: Environment | HostEnvironments
    state: TrainState  # `actor` is (), and `learner.local` where it was not asked for
    pod: int | None  # the member of a population whose agent and state these are
    metadata: Mapping[str, Any]  # the checkpoint's

    @functools.cached_property
    def agent(self) -> Agent:
        """Agent, built."""
        return self.blueprint.build()


def restore_run(
    directory: Path,
    experiment: Experiment,
    *,
    pod: int | None,
    checkpoint: Choice,
    local: bool = False,
) -> LoadedRun:
    """Return the run of `experiment` in `directory` at a checkpoint.

    The `local` part of the learner's state is read only if asked for. Raises `ConfigError` where
    the environment has other observations or actions than the run's own.
    """
    agent, env = build(experiment)
    config, spec = read_config(directory / CONFIG), agent.spec
    if (learned := config.get("spaces", spec.spaces)) != spec.spaces:
        name = environment_text(config["experiment"].get("environment"))
        raise ConfigError(
            f"{directory} learned in {name} with {learned}, but {spec.name} has {spec.spaces}: "
            "another environment needs the same observations and actions."
        )
    device = jax.local_devices()[:1]
    if not experiment.pods:
        if pod is not None:
            raise ConfigError(f"{directory} has no pods, as it is no sweep: leave out pod {pod}.")
        abstract = abstract_state(agent, None, make_mesh(device), experiment.run_driver)
        restored = _restore(directory, abstract, checkpoint, local)
        return LoadedRun(agent, env, restored.state, None, restored.metadata)
    mesh = population.population_mesh(device, len(experiment.pods))
    abstract = population.abstract_states(
        agent, experiment.pods, None, mesh, experiment.run_driver, experiment.exchange
    )
    restored = _restore(directory, abstract, checkpoint, local)
    pod = sweep.best_pod(directory, restored) if pod is None else pod
    if type(pod) is not int or not 0 <= pod < len(experiment.pods):
        raise ConfigError(f"{directory} has pods 0 to {len(experiment.pods) - 1}, not {pod}.")
    agent, env = build(experiment.of_pod(experiment.pods[pod]))
    state = jax.tree.map(lambda x: x[pod], restored.state)
    if isinstance(state, SelectionState):
        values = {name: float(value) for name, value in state.hyperparameters.items()}
        agent = population.with_hyperparameters(agent, values)
    return LoadedRun(agent, env, state, pod, restored.metadata)


def _restore(directory: Path, abstract: TrainState, checkpoint: Choice, local: bool) -> Restored:
    excluded = (".actor",) if local else (".actor", ".learner.local")
    if not local:
        abstract = dataclasses.replace(abstract, learner=LearnerState(abstract.learner.shared))
    return checkpoints.load(directory, abstract, checkpoint, excluded=excluded)


def reopen(
    directory: Path,
    recipe: Experiment | str | None = None,
    environment: str | Environment | HostEnvironments | None = None,
) -> Experiment:
    """Return the experiment of a run; `recipe` and `environment` are as in `load`.

    Without `recipe` an installed package's is taken, if it has the name of the run's.
    """
    if recipe is None:
        name = recipe_name(directory)
        recipe = name if name in installed("recipes") else None
    if isinstance(recipe, str):
        recipe = recipes.find(recipe)
    return read_experiment(directory, recipe, environment)
