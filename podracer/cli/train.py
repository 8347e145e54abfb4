"""Training from the command line: `podracer train`, and what the other commands have of it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from podracer.cli.recipe_flags import find_experiment, own_recipe, parse_experiment
from podracer.cli.run_options import AtCheckpoint
from podracer.config.experiment import Experiment
from podracer.devices.startup import Hosts, check_not_alone, initialize_devices
from podracer.errors import ConfigError, PodracerError
from podracer.io.text import while_read
from podracer.recipes import options_of

if TYPE_CHECKING:
    from podracer.run.result import Result
    from podracer.run.warm_start import Weights

Attachments = Annotated[
    tuple[str, ...],
    "Parts of packages that follow what is saved, as NAME:ARGUMENT: `mirror:s3://bucket/run` of "
    "podracer-cloud copies it in the background.",
]
Trackers = Annotated[
    tuple[Literal["wandb", "trackio", "mlflow"], ...],
    "Experiment trackers that get every record too. Their own environment variables say where they "
    "keep runs, such as WANDB_PROJECT and MLFLOW_TRACKING_URI.",
]


@dataclasses.dataclass(frozen=True)
class NewRunOptions:
    """Flags of the commands that begin a run."""

    run_dir: Path | None = None
    """Directory that keeps the run or the sweep. By default a new one is made in runs/."""
    attach: Attachments = ()
    track: Trackers = ()


@dataclasses.dataclass(frozen=True)
class TrainOptions(NewRunOptions):
    """Flags of `podracer train` that are no part of the experiment."""

    update_rule: Path | None = None
    """File of a learned update rule, which replaces the recipe's agent and trains its network: one
    that `podracer rule` wrote, or DiscoRL's disco_103.npz."""
    weights: Path | None = None
    """Directory of a run whose learned parameters, optimizer and statistics this one begins with,
    such as to go on in another environment or with other hyperparameters."""
    checkpoint: AtCheckpoint = "newest"
    """Checkpoint of --weights to take: the newest, that of the best evaluation, or by its number
    of updates."""
    hosts: Hosts = dataclasses.field(default_factory=Hosts)
    """Processes that share the run."""


def train(arguments: Sequence[str]) -> int:
    """Run `podracer train`: train an agent."""
    recipe, experiment, flags = find_experiment(arguments)
    description = "Train an agent. `podracer list recipes` names the recipes."
    if names := [f"--{name.replace('_', '-')}" for name in options_of(recipe)]:
        description += f" Flags of {recipe} itself: {', '.join(names)}."
    options, experiment = parse_experiment(
        f"train {recipe}", flags, experiment, TrainOptions(), description
    )
    if options.weights is None and options.checkpoint != "newest":
        raise ConfigError("a checkpoint is that of another run: name the run by --weights.")
    begin = None
    if options.weights is not None:
        from podracer.run.warm_start import Weights

        begin = Weights(options.weights, options.checkpoint)
    return run(
        experiment,
        options.run_dir,
        options.hosts,
        [*options.attach, *options.track],
        begin=begin,
        recipe=own_recipe(recipe, arguments),
    )


# --- what commands that train have in common ------------------------------------------------------


def run(
    experiment: Experiment,
    run_dir: Path | None,
    hosts: Hosts,
    callbacks: Sequence[Any],
    *,
    resume: bool = False,
    begin: Weights | None = None,
    recipe: str | None = None,
    num_devices: int = 0,
    finish: Callable[[Path, Experiment, str | None], None] | None = None,
) -> int:
    """Train an experiment, shown on the terminal, and return the exit code.

    `recipe` names the user's own recipe, which commands on the run need. `num_devices` of a CPU are
    taken where the experiment leaves the number open. `finish` prints the outcome of a run that has
    reached its end, in place of a summary. `podracer.train` takes the other arguments.
    """
    experiment.check()
    if experiment.pods and hosts == Hosts():
        hosts = Hosts(num_processes=1)  # a population is one process
    check_not_alone(hosts)
    devices = experiment.devices or num_devices
    if resume and run_dir is not None:
        from podracer.config.serialization import saved_devices

        saved = saved_devices(run_dir)
        processes = hosts.with_environment().num_processes or 1
        devices = devices or (saved if saved % processes == 0 else 0)  # 0: all, if they fit no more
    initialize_devices(hosts, devices, experiment.arch)
    import jax

    from podracer.run.training import train

    result = train(
        experiment, run_dir=run_dir, resume=resume, begin=begin, callbacks=callbacks, progress=True
    )
    if jax.process_index() == 0:
        if finish is not None and result.exit_code == 0:
            finish(result.run_dir, experiment, recipe)
        else:
            with while_read():
                _print_summary(experiment, result, recipe)
    return result.exit_code


def _print_summary(experiment: Experiment, result: Result, recipe: str | None) -> None:
    from podracer.envs.catalog import imported_module
    from podracer.reports.recording import is_drawable
    from podracer.run.console import summarize
    from podracer.run.setup import build

    outcomes = {0: "Finished", 75: "Preempted, saved", 130: "Stopped, saved"}
    next_command = None
    if result.exit_code:
        next_command = "resume"
    elif result.agent.rule is not None:
        next_command = "rule"
    else:
        with contextlib.suppress(PodracerError):  # such as for a file that is gone since
            next_command = "play" if is_drawable(build(experiment)[1]) else None
    environment = experiment.environment
    if not isinstance(environment, str) or not imported_module(environment):
        environment = None
    # Why it has ended before its frames; a run that was stopped has not ended.
    ends = {"target_return": "when an evaluation reached", "max_seconds": "after"}
    flag = f"--{result.reason.replace('_', '-')}"
    reason = ""
    if result.reason in ends:
        reason = f"ended {ends[result.reason]} {flag} {getattr(experiment, result.reason):g}"
    summarize(
        result.run_dir,
        outcomes[result.exit_code],
        reason=reason,
        next_command=next_command,
        options={"recipe": recipe, "environment": environment},
    )
