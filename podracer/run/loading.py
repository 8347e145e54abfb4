"""Loading of runs: the agent, the environment and the state at a checkpoint."""

from __future__ import annotations

from pathlib import Path

from podracer.agent import Agent
from podracer.arguments import typed
from podracer.config.experiment import Experiment
from podracer.environment import Environment, HostEnvironments
from podracer.io.addresses import local_run
from podracer.io.checkpoint import Choice
from podracer.policy import Policy
from podracer.run.restore import LoadedRun, reopen, restore_run
from podracer.types import LearnerState


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
    run = load_run(
        run_dir,
        recipe=recipe,
        environment=environment,
        pod=pod,
        checkpoint=checkpoint,
        local=True,
    )
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
) -> Policy:
    """Return the policy of a run at a checkpoint: `action = policy(observation)`.

    It takes the best actions, or with `sampled` those that the agent explores with, drawn with
    `seed`. The other arguments and what is raised are as in `load`.
    """
    run = load_run(
        run_dir,
        recipe=recipe,
        environment=environment,
        pod=pod,
        checkpoint=checkpoint,
    )
    return Policy(run.agent, run.state.learner, sampled=sampled, seed=seed)


def load_run(
    run_dir: str | Path,
    *,
    recipe: Experiment | str | None = None,
    environment: str | Environment | HostEnvironments | None = None,
    pod: int | None = None,
    checkpoint: Choice = "newest",
    local: bool = False,
) -> LoadedRun:
    """Return the agent, the environment and the state of a run, see `load`.

    The state of environments is not read, and the `local` part of the learner's, such as a replay,
    only if asked for: no policy depends on either.
    """
    directory = local_run(run_dir, checkpoint)
    experiment = reopen(directory, recipe, environment)
    return restore_run(directory, experiment, pod=pod, checkpoint=checkpoint, local=local)
