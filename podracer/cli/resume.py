"""The command `podracer resume`: a run, a sweep or a tournament goes on."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from podracer.cli.arguments import blank, read_parts
from podracer.cli.pods import finish_sweep, resume_tournament
from podracer.cli.run_options import RunOptions
from podracer.cli.settings import settings_of
from podracer.cli.train import Trackers, run
from podracer.cli.values import RunPath
from podracer.config.experiment import Experiment
from podracer.config.serialization import KINDS
from podracer.devices.startup import Hosts
from podracer.errors import ConfigError
from podracer.io.addresses import address_of, local_run
from podracer.io.directories import is_tournament
from podracer.io.run_directory import run_directory
from podracer.run.resume import FREE_ON_RESUME

_NOT_GIVEN = "unchanged"
_OTHER_TEXTS = {
    "devices": "Number of devices to use, over all hosts. By default those that the run had, "
    "virtual ones included; with another number it goes on correctly, but not bit-exactly."
}


@dataclasses.dataclass(frozen=True)
class ResumeOptions(RunOptions):
    """Continue a run, a sweep or a tournament to its configured end.

    With other hyperparameters it would be another run: podracer train RECIPE --weights RUN.
    """

    run: RunPath
    """Directory of the run, sweep or tournament, or its address in a store, from which it comes
    into --run-dir first."""
    recipe: str | None = None
    """Recipe that made the run, such as my_package.recipes:mine. It is needed if the run's agent,
    network or environment is your own; a tournament takes several, joined by commas."""
    run_dir: Path | None = None
    """Directory that gets the run of an address, and keeps it; it is made if there is none."""
    track: Trackers = ()


def free_settings() -> Any:
    """Return the settings that a resumed run may change, as they decide no update."""
    fields = [
        (x.path, Annotated[x.hint, _OTHER_TEXTS.get(x.path, x.text)], _NOT_GIVEN)
        for x in settings_of(blank(Experiment))
        if x.path in FREE_ON_RESUME
    ]
    return dataclasses.make_dataclass("Settings", fields, frozen=True)()


def resume(arguments: Sequence[str]) -> int:
    """Run `podracer resume`: continue a run, a sweep or a tournament."""
    parts = (blank(ResumeOptions), free_settings(), Hosts())
    description = inspect.cleandoc(ResumeOptions.__doc__ or "")
    parts = read_parts(parts, "resume", arguments, description, _refuse_other_settings)
    options, settings, hosts = parts
    address = address_of(options.run)
    if address is None and options.run_dir is not None:
        raise ConfigError("--run-dir is for a run at an address: leave it out for a directory.")
    if address is not None:
        if options.run_dir is None:
            raise ConfigError(f"{address} needs a directory to go on in: add --run-dir DIR.")
        directory = run_directory(options.run_dir.parent, options.run_dir.name)
        options = dataclasses.replace(options, run=local_run(address, directory=directory))
    changes = {name: x for name, x in vars(settings).items() if x != _NOT_GIVEN}
    if is_tournament(options.run):
        flags_of_runs = {"track": options.track, "environment": options.environment}
        flags_of_runs |= {name: x for name, x in vars(hosts).items() if x != getattr(Hosts, name)}
        if names := [*changes, *(name for name, x in flags_of_runs.items() if x not in (None, ()))]:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in names)
            raise ConfigError(f"a tournament goes on as it began: leave out {flags}.")
        return resume_tournament(options.run, options.recipe)
    experiment = dataclasses.replace(options.reopen(), **changes)
    return run(
        experiment,
        options.run,
        hosts,
        options.track,
        resume=True,
        recipe=options.recipe,
        finish=finish_sweep if experiment.pods else None,
    )


def _refuse_other_settings(name: str) -> str:
    """Return the sentence about a setting of `train` that would make another run, or ""."""
    last, flag = name.split(".")[-1].removeprefix("no_"), name.replace("_", "-")
    names = {field.name for kind in KINDS.values() for field in dataclasses.fields(kind)}
    if last not in names:
        return ""
    return (
        f"resume goes on as the run began: with another --{flag} it would be another run, "
        f"podracer train RECIPE --{flag} ... --weights RUN."
    )
