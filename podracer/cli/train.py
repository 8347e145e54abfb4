"""The command `podracer train`: one agent."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from podracer.cli.recipe_flags import find_experiment, own_recipe, parse_experiment, with_size_for
from podracer.cli.run_options import AtCheckpoint
from podracer.cli.running import NewRunOptions, callbacks_of, run
from podracer.config.experiment import Experiment
from podracer.devices.startup import Hosts
from podracer.errors import ConfigError
from podracer.recipes import options_of


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
    recipe, options, experiment = _parse(arguments)

    def for_platform(platform: str) -> Experiment:
        sized = with_size_for(platform, arguments, experiment)
        return experiment if sized is arguments else _parse(sized)[2]

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
        callbacks_of(options.track, options.attach),
        begin=begin,
        recipe=own_recipe(recipe, arguments),
        for_platform=for_platform,
    )


def _parse(arguments: Sequence[str]) -> tuple[str, TrainOptions, Experiment]:
    """Return the recipe's name, and the options and the experiment of the flags."""
    recipe, experiment, flags = find_experiment(arguments)
    description = "Train an agent. `podracer list recipes` names the recipes."
    if names := [f"--{name.replace('_', '-')}" for name in options_of(recipe)]:
        description += f" Flags of {recipe} itself: {', '.join(names)}."
    title = f"train {recipe}"
    return recipe, *parse_experiment(title, flags, experiment, TrainOptions(), description)
