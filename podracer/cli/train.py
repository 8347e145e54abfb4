"""The commands that train one agent: `podracer train` and `podracer resume`."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from podracer.cli.arguments import (
    Arch,
    RunPath,
    Trackers,
    find_experiment,
    flag_names,
    options_of,
    own_recipe,
    parse,
    parse_experiment,
)
from podracer.cli.run_options import AtCheckpoint, RunOptions
from podracer.experiments.hosts import (
    Hosts,
    disable_async_dispatch,
    initialize_devices,
    warn_if_alone,
)
from podracer.io.directories import is_tournament
from podracer.io.text import redact_settings

if TYPE_CHECKING:
    from podracer.experiments.experiment import Experiment
    from podracer.experiments.result import Result
    from podracer.io.steps import Choice


@dataclasses.dataclass(frozen=True)
class TrainOptions:
    """Flags of `podracer train` that are no part of the experiment."""

    run_dir: Path | None = None
    """Directory that keeps the run. By default a new one is made in runs/."""
    arch: Arch = "anakin"
    """Architecture: anakin runs JAX environments on the device, sebulba host environments. The
    flags of an architecture are shown by `podracer train RECIPE --arch ARCH --help`."""
    update_rule: Path | None = None
    """File of a learned update rule, which replaces the recipe's agent and trains its network: one
    that `podracer rule` wrote, or DiscoRL's disco_103.npz."""
    weights: Path | None = None
    """Directory of a run whose learned parameters, optimizer and statistics this one begins with,
    such as to go on in another environment or with other hyperparameters."""
    checkpoint: AtCheckpoint = "newest"
    """Checkpoint of --weights to take: the newest, that of the best evaluation, or by its number
    of updates."""
    track: Trackers = ()


@dataclasses.dataclass(frozen=True)
class FreeSettings:
    """Settings that a resumed run may change, as they do not decide what an update computes.

    What is not given stays as it was.
    """

    frames: int | None = None
    """Number of environment steps to train for, those before the resume included."""
    evaluations: int | None = None
    """Number of evaluations, evenly spread over the whole run; 0 for none."""
    evaluation_episodes: int | None = None
    """Number of episodes in each evaluation, at least 1."""
    evaluation_policy: Literal["greedy", "sampled"] | None = None
    """Policy in evaluations: `greedy` for the agent's best actions, `sampled` to explore."""
    evaluation_epsilon: float | None = None
    """Probability epsilon, in [0, 1], of a random action in evaluations; discrete actions only."""
    fixed_evaluation: bool | None = None
    """Whether all evaluations play the same episodes; otherwise each plays new ones."""
    target_return: float | Literal["unchanged"] | None = "unchanged"
    """Mean return of an evaluation at which the run stops early; None for no such end."""
    max_seconds: float | Literal["unchanged"] | None = "unchanged"
    """Time limit in seconds, those before the resume included; None for no limit."""
    save_seconds: float | None = None
    """Longest time between two checkpoints, in seconds; 0 saves after every chunk."""
    keep_best: bool | None = None
    """Whether to keep the checkpoint of the best evaluation besides the newest ones."""
    stall_seconds: float | None = None
    """Time in seconds after which a chunk, an evaluation or a save that has not finished ends the
    run (exit code 76)."""
    devices: int | None = None
    """Number of devices to use, over all hosts. By default those that the run had, virtual ones
    included; with another number it goes on correctly, but not bit-exactly."""

    def changes(self) -> dict[str, Any]:
        """Return the settings that were given, by the name of the experiment's field."""
        return _changed(self)


def _changed(flags: FreeSettings | Hosts) -> dict[str, Any]:
    """Return the values that are not their fields' defaults, by name."""
    defaults = {field.name: field.default for field in dataclasses.fields(flags)}
    return {name: value for name, value in vars(flags).items() if value != defaults[name]}


@dataclasses.dataclass(frozen=True)
class ResumeOptions(RunOptions):
    """Flags of `podracer resume`."""

    run: RunPath
    """Directory of the run, sweep or tournament."""
    track: Trackers = ()
    settings: FreeSettings = dataclasses.field(default_factory=FreeSettings)
    hosts: Hosts = dataclasses.field(default_factory=Hosts)


def train(arguments: Sequence[str]) -> int:
    """Run `podracer train`: train an agent."""
    recipe, experiment, flags = find_experiment(arguments)
    about = "Train an agent. `podracer list recipes` names the recipes."
    if options_of_recipe := options_of(recipe):
        about += f" Flags of {recipe} itself: {', '.join(options_of_recipe)}."
    options, experiment, extra = parse_experiment(
        f"train {recipe}", flags, experiment, TrainOptions(arch=experiment.arch),
        {"hosts": Hosts()}, about,
    )  # fmt: skip
    return run(
        experiment, options.run_dir, extra["hosts"],
        resume=False, weights=options.weights, checkpoint=options.checkpoint,
        recipe=own_recipe(recipe, arguments), track=options.track,
    )  # fmt: skip


def resume(arguments: Sequence[str]) -> int:
    """Run `podracer resume`: continue a run, a sweep or a tournament."""
    about = (
        "Continue a run, a sweep or a tournament to its configured end. With other hyperparameters "
        "it would be another run: podracer train RECIPE --weights RUN."
    )
    _refuse_other_settings(arguments)
    options = parse(ResumeOptions, "resume", arguments, about=about)
    changes = options.settings.changes()
    if is_tournament(options.run):
        given = {"track": options.track, "environment": options.environment}
        given |= _changed(options.hosts)  # each of its pods is one process
        if names := [*changes, *(name for name, value in given.items() if value not in (None, ()))]:
            from podracer.types import ConfigError

            flags = ", ".join(f"--{name.replace('_', '-')}" for name in names)
            raise ConfigError(f"a tournament goes on as it began: leave out {flags}.")
        from podracer.cli import pods

        return pods.resume_tournament(options.run, options.recipe)
    experiment = dataclasses.replace(options.reopen(), **changes)
    return run(
        experiment, options.run, options.hosts,
        resume=True, recipe=options.recipe, track=options.track,
    )  # fmt: skip


def _refuse_other_settings(arguments: Sequence[str]) -> None:
    """Raise `ConfigError` for a flag of `resume` that would make another run."""
    from podracer.cli.foreign_flags import owners_of, unknown_flags
    from podracer.types import ConfigError

    for name in unknown_flags(set(flag_names(ResumeOptions)), arguments):
        if owners_of(name):
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"resume goes on as the run began: with another {flag} it would be another run, "
                f"podracer train RECIPE {flag} VALUE --weights RUN."
            )


def run(
    experiment: Experiment,
    run_dir: Path | None,
    hosts: Hosts,
    *,
    resume: bool,
    weights: Path | None = None,
    checkpoint: Choice = "newest",
    recipe: str | None = None,
    track: Trackers = (),
    num_devices: int = 0,
) -> int:
    """Train an experiment, shown on the terminal, and return the exit code.

    `recipe` names the user's own recipe, which commands on the run need. `num_devices` of a CPU are
    taken where the experiment leaves the number open.
    """
    experiment.check()
    devices = experiment.devices or num_devices
    if resume and run_dir is not None:
        from podracer.experiments.serialization import saved_devices

        saved = saved_devices(run_dir)
        processes = hosts.with_environment().num_processes or 1
        devices = devices or (saved if saved % processes == 0 else 0)  # 0: all, if they fit no more
    if experiment.arch == "sebulba" and devices <= 1:
        disable_async_dispatch()
    initialize_devices(hosts, devices)
    if not experiment.pods:  # a sweep is one process anyway
        warn_if_alone(hosts)
    import jax

    from podracer.experiments.training import train
    from podracer.reports.tracking import trackers

    result = train(
        experiment, run_dir=run_dir, resume=resume, weights=weights, checkpoint=checkpoint,
        sinks=trackers(track), progress=True,
    )  # fmt: skip
    if jax.process_index() == 0:
        if experiment.pods and result.exit_code == 0:
            from podracer.cli.pods import finish_sweep

            finish_sweep(result.run_dir, experiment, recipe)
        else:
            with contextlib.suppress(OSError):  # a reader of the output that has left
                _print_summary(experiment, result, recipe)
    return result.exit_code


def _reason(experiment: Experiment, result: Result) -> str:
    """Return in words why a run has ended before its frames, "" if it has not, or was stopped."""
    if result.reason == "target_return":
        return f"ended as an evaluation reached --target-return {experiment.target_return:g}"
    if result.reason == "max_seconds":
        return f"ended as --max-seconds {experiment.max_seconds:g} were over"
    return ""


def _print_summary(experiment: Experiment, result: Result, recipe: str | None) -> None:
    from podracer.envs.catalog import imported_module
    from podracer.experiments.run_setup import build
    from podracer.reports.console import summarize
    from podracer.reports.recording import is_drawable
    from podracer.types import PodracerError

    outcomes = {0: "Finished", 75: "Preempted, saved", 130: "Stopped, saved"}
    next_command = None
    with contextlib.suppress(PodracerError):  # such as for a file that is gone since
        next_command = "play" if is_drawable(build(experiment)[1]) else None
    if result.agent.rule is not None:
        next_command = "rule"
    if result.exit_code:
        next_command = "resume"
    environment = experiment.environment
    if not isinstance(environment, str) or not imported_module(environment):
        environment = None
    summarize(
        result.run_dir,
        outcomes[result.exit_code],
        reason=_reason(experiment, result),
        next_command=next_command,
        options={"recipe": recipe, "environment": redact_settings(environment)},
    )
