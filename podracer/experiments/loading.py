"""Loading of runs: the agent, the environment and the state at a checkpoint."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Literal

import jax

from podracer.agent import Agent, Blueprint
from podracer.drivers import population
from podracer.drivers.common import TrainState, abstract_state
from podracer.drivers.selection import SelectionState
from podracer.environment import Environment, HostEnvironments
from podracer.experiments import recipes, sweep
from podracer.experiments.experiment import Experiment
from podracer.experiments.opponents import without_runs
from podracer.experiments.run_setup import build
from podracer.experiments.serialization import read_experiment, recipe_name
from podracer.io import checkpoint as checkpoints
from podracer.io.checkpoint import Choice, Restored
from podracer.io.entry_points import installed
from podracer.io.paths import user_path
from podracer.mesh import make_mesh
from podracer.policy import Policy
from podracer.types import ConfigError, LearnerState

Opponents = Literal["all", "evaluation", "planned", "none"]


@dataclasses.dataclass(frozen=True)
class LoadedRun:
    """A run at a checkpoint."""

    blueprint: Blueprint
    env: Environment | HostEnvironments
    state: TrainState  # `actor` is (), and `learner.local` where it was not asked for
    pod: int | None  # of a population, whose agent and state these are

    @functools.cached_property
    def agent(self) -> Agent:
        """Agent, built."""
        return self.blueprint.build()


def load(
    run_dir: str | Path,
    *,
    recipe: Experiment | str | None = None,
    environment: str | Environment | HostEnvironments | None = None,
    pod: int | None = None,
    checkpoint: Choice = "newest",
) -> tuple[Agent, LearnerState]:
    """Return the agent of a run and its state at a checkpoint, on one device.

    `checkpoint` is `"newest"`, the newest valid one, or `"best"`, that of the evaluation with the
    highest mean return, or a number of updates. The best of many evaluations is biased upward:
    evaluate its checkpoint in other episodes before you report a number.

    A run with an agent, a network or an environment of your own needs the `recipe` that makes them,
    as an `Experiment` or by name. `environment` replaces the run's own. For a
    population the agent is that of one pod: `pod`, or the best one in the last evaluation before
    the checkpoint, and the best checkpoint is that of the best evaluation of any pod.

    Raises `ConfigError` if there is no run, `CheckpointError` if there is no such
    checkpoint that is valid.
    """
    run = load_run(
        run_dir,
        recipe=recipe,
        environment=environment,
        pod=pod,
        checkpoint=checkpoint,
        opponents="planned",
        local=True,
    )
    return run.agent, run.state.learner


def load_policy(
    run_dir: str | Path,
    *,
    sampled: bool = False,
    seed: int = 0,
    recipe: Experiment | str | None = None,
    environment: str | Environment | HostEnvironments | None = None,
    pod: int | None = None,
    checkpoint: Choice = "newest",
) -> Policy:
    """Return the policy of a run at a checkpoint: `action = policy(observation)`.

    It takes the best actions, or with `sampled` those that the agent explores with, drawn with
    `seed`. The other arguments and what is raised are those of `load`.
    """
    run = load_run(
        run_dir,
        recipe=recipe,
        environment=environment,
        pod=pod,
        checkpoint=checkpoint,
        opponents="planned",
    )
    return Policy(run.agent, run.state.learner, sampled=sampled, seed=seed)


def load_run(
    run_dir: str | Path,
    *,
    recipe: Experiment | str | None = None,
    environment: str | Environment | HostEnvironments | None = None,
    pod: int | None = None,
    checkpoint: Choice = "newest",
    opponents: Opponents = "all",
    local: bool = False,
) -> LoadedRun:
    """Return the agent, the environment and the state of a run, see `load`.

    `opponents` are the other runs that the environment has as opponents: all of them, those of
    `evaluation` and of a game that the agent plans in, the latter alone (`planned`), or none.
    Random ones are in the places of the others, which may be gone since. The state of environments
    is not read, and the `local` part of the learner's, such as a replay, only if asked for: no
    policy depends on either.
    """
    directory = user_path(run_dir)
    experiment = reopen(directory, recipe, environment)
    if opponents != "all":
        stand_in = without_runs(
            experiment.environment,
            keep_planned=opponents != "none",
            keep_evaluation=opponents == "evaluation",
        )
        experiment = dataclasses.replace(experiment, environment=stand_in)
    agent, env = build(experiment)
    device = jax.local_devices()[:1]
    if not experiment.pods:
        if pod is not None:
            raise ConfigError(f"{directory} has no pods, as it is no sweep: leave out pod {pod}.")
        like = abstract_state(agent, None, make_mesh(device), experiment.run_driver)
        return LoadedRun(agent, env, _restore(directory, like, checkpoint, local).state, None)
    mesh = population.population_mesh(device, len(experiment.pods))
    like = population.abstract_states(
        agent, experiment.pods, None, mesh, experiment.run_driver, experiment.exchange
    )
    restored = _restore(directory, like, checkpoint, local)
    pod = sweep.best_pod(directory, restored) if pod is None else pod
    if type(pod) is not int or not 0 <= pod < len(experiment.pods):
        raise ConfigError(f"{directory} has pods 0 to {len(experiment.pods) - 1}, not {pod}.")
    agent, env = build(experiment.of_pod(experiment.pods[pod]))
    state = jax.tree.map(lambda x: x[pod], restored.state)
    if isinstance(state, SelectionState):
        values = {name: float(value) for name, value in state.hyperparameters.items()}
        agent = population.with_hyperparameters(agent, values)
    return LoadedRun(agent, env, state, pod)


def _restore(directory: Path, like: TrainState, checkpoint: Choice, local: bool) -> Restored:
    without = (".actor",) if local else (".actor", ".learner.local")
    if not local:
        like = dataclasses.replace(like, learner=LearnerState(like.learner.shared))
    return checkpoints.load(directory, like, checkpoint, without=without)


def reopen(
    directory: Path,
    recipe: Experiment | str | None = None,
    environment: str | Environment | HostEnvironments | None = None,
) -> Experiment:
    """Return the experiment of a run; `recipe` and `environment` are those of `load`.

    Without `recipe` it is that of an installed package under the name that the run has.
    """
    if recipe is None:
        name = recipe_name(directory)
        recipe = name if name in installed("recipes") else None
    if isinstance(recipe, str):
        recipe = recipes.find(recipe)
    return read_experiment(directory, recipe, environment)
