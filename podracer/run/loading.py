"""Loading of runs: the agent, the environment and the state at a checkpoint."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from podracer import recipes
from podracer.agent import Agent, Blueprint
from podracer.arguments import typed
from podracer.config.experiment import Experiment
from podracer.config.serialization import read_config, read_experiment, recipe_name
from podracer.devices.mesh import make_mesh
from podracer.drivers import population
from podracer.drivers.selection import SelectionState
from podracer.drivers.state import TrainState, abstract_state
from podracer.environment import Environment, HostEnvironments
from podracer.errors import ConfigError
from podracer.io import checkpoint as checkpoints
from podracer.io.addresses import local_run
from podracer.io.checkpoint import Choice, Restored
from podracer.io.seal import CONFIG
from podracer.policy import Policy
from podracer.run import sweep
from podracer.run.setup import build
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


@typed
def load(
    run_dir: str | Path,
    *,
    recipe: Experiment | str | None = None,
    environment: str | Environment | HostEnvironments | None = None,
    pod: int | None = None,
    checkpoint: Choice = "newest",
) -> tuple[Agent, LearnerState]:
    """Return the agent of a run and its state at a checkpoint, on one device.

    `checkpoint` is `"newest"`, the newest valid one, or `"best"`, saved at the evaluation with the
    highest mean return, or a number of updates. The best of many evaluations is biased upward:
    evaluate its checkpoint in other episodes before you report a number.

    A run with an agent, a network or an environment of your own needs the `recipe` that makes them,
    as an `Experiment` or by name. `environment` replaces the run's own: the same with other
    options, or another with equal observations and actions. For a population the agent is one
    pod's: `pod`, or the best one in the last evaluation before the checkpoint, and the best
    checkpoint is from the best evaluation of any pod.

    Raises `ConfigError` if there is no run or the environment has other spaces, `CheckpointError`
    if there is no such checkpoint that is valid.
    """
    run = load_run(run_dir, recipe, environment, pod, checkpoint, local=True)
    return run.agent, run.state.learner


@typed
def load_policy(
    run_dir: str | Path,
    *,
    sampled: bool = False,
    seed: int = 0,
    recipe: Experiment | str | None = None,
    environment: str | Environment | HostEnvironments | None = None,
    pod: int | None = None,
    checkpoint: Choice = "newest",
    agent: str | None = None,
) -> Policy:
    """Return the policy of a run at a checkpoint: `action = policy(observation)`.

    It takes the best actions, or with `sampled` those that the agent explores with, drawn with
    `seed`. `agent` is the name of one agent of several. The other arguments and what is raised are
    as in `load`.
    """
    run = load_run(run_dir, recipe, environment, pod, checkpoint)
    acting, state = run.agent, run.state.learner
    if agent is not None:
        if agent not in acting.agents:
            raise ConfigError(f"{acting.name} has no agent {agent!r}: it has {[*acting.agents]}.")
        acting, state = acting.agents[agent], LearnerState(state.shared[agent])
    return Policy(acting, state, sampled=sampled, seed=seed)


def load_run(
    run_dir: str | Path,
    recipe: Experiment | str | None = None,
    environment: str | Environment | HostEnvironments | None = None,
    pod: int | None = None,
    checkpoint: Choice = "newest",
    *,
    local: bool = False,
) -> LoadedRun:
    """Return the agent, the environment and the state of a run, see `load`.

    The state of environments is not read, and the `local` part of the learner's, such as a replay,
    only if asked for: no policy depends on either. Raises `ConfigError` where the environment has
    other observations or actions than the run's own.
    """
    directory = local_run(run_dir, checkpoint)
    experiment = reopen(directory, recipe, environment)
    blueprint, env = build(experiment)
    config, spec = read_config(directory / CONFIG), blueprint.spec
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
        abstract = abstract_state(blueprint, None, make_mesh(device), experiment.run_driver)
        restored = _restore(directory, abstract, checkpoint, local)
        return LoadedRun(blueprint, env, restored.state, None, restored.metadata)
    mesh = population.population_mesh(device, len(experiment.pods))
    abstract = population.abstract_states(
        blueprint, experiment.pods, None, mesh, experiment.run_driver, experiment.exchange
    )
    restored = _restore(directory, abstract, checkpoint, local)
    pod = sweep.best_pod(directory, restored) if pod is None else pod
    if type(pod) is not int or not 0 <= pod < len(experiment.pods):
        raise ConfigError(f"{directory} has pods 0 to {len(experiment.pods) - 1}, not {pod}.")
    blueprint, env = build(experiment.of_pod(experiment.pods[pod]))
    state = jax.tree.map(lambda x: x[pod], restored.state)
    if isinstance(state, SelectionState):
        values = {name: float(value) for name, value in state.hyperparameters.items()}
        settings = population.with_hyperparameters(blueprint.settings, values)
        blueprint = dataclasses.replace(blueprint, settings=settings)
    return LoadedRun(blueprint, env, state, pod, restored.metadata)


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
    lender = recipes.lender(recipe, recipe_name(directory))
    return read_experiment(directory / CONFIG, lender, environment)
