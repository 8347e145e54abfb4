"""The commands on a run that has not begun: `podracer plan` and `podracer compile`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

from podracer.cli.recipe_flags import find_experiment, parse_experiment
from podracer.cli.settings import split_flags
from podracer.cli.values import Limits
from podracer.devices.startup import Hosts, initialize_devices
from podracer.io.text import print_json

if TYPE_CHECKING:
    from podracer.config.experiment import Experiment
    from podracer_plan.targets import Target

Quantity = Annotated[float | None, Limits(0, 1e18)]


@dataclasses.dataclass(frozen=True)
class CompileOptions:
    """Flags of `podracer compile` that are no part of the experiment."""

    target: str = "here"
    """Devices to compile for, such as h100, h100:8, tpu-v3:2x2 or tpu-v5e:16x16; `here` is this
    machine. Unless `--num-envs` is given, each device has the recipe's number of environments,
    timesteps of replay and frames; `--frames` counts for the run."""
    update_rule: Path | None = None
    """File of a learned update rule, as for `podracer train`."""
    json: bool = False
    """Print one JSON object."""


@dataclasses.dataclass(frozen=True)
class PlanOptions(CompileOptions):
    """Flags of `podracer plan` that are no part of the experiment."""

    device_bytes: Quantity = None
    """Memory of each device that a program may use, in bytes, where it is not the target's."""
    measure: Annotated[float, Limits(0, 3600)] = 5.0
    """Time for a measurement on this machine, in seconds after compilation; 0 measures nothing."""
    steps_per_second: Annotated[float | None, Limits(0.001, 1e18)] = None
    """Speed of this run that was recorded on such a machine, in steps a second; it takes the place
    of measurements."""
    price: Quantity = None
    """Price of a host for an hour, in dollars."""


Options = TypeVar("Options", bound=CompileOptions)


def compile_programs(arguments: Sequence[str]) -> int:
    """Compile a run's programs for other devices: memory, kernels, collectives and work."""
    experiment, target, options = _parse(
        "compile",
        arguments,
        CompileOptions(),
        "Compile the programs of a run for devices that need not be here, and report the memory "
        "of each device, and the kernels, collectives and work of an update.",
    )
    from podracer_plan.compiled import compile_run, show

    run = compile_run(experiment, target)
    if options.json:
        print_json(run.to_json())
    else:
        print(show(run))
    return 0


def plan(arguments: Sequence[str]) -> int:
    """Say what a run needs before a machine is rented: memory, hours and price."""
    experiment, target, options = _parse(
        "plan",
        arguments,
        PlanOptions(),
        "Say what a run needs before a machine is rented: its programs as they are compiled for "
        "it, whether they fit, hours by a speed that is measured here or recorded, and a price.",
    )
    from podracer_plan.compiled import show
    from podracer_plan.plan import cost_lines, make_plan

    if options.device_bytes is not None:
        target = dataclasses.replace(target, usable_bytes=int(options.device_bytes))
    result = make_plan(
        experiment,
        target,
        seconds=options.measure,
        steps_per_second=options.steps_per_second,
        price=options.price,
    )
    if options.json:
        print_json(result.to_json())
    else:
        print("\n".join([show(result.run), *cost_lines(result)]))
    return 0


def _parse(
    command: str, arguments: Sequence[str], defaults: Options, summary: str
) -> tuple[Experiment, Target, Options]:
    """Return the experiment, its target and the command's options; start JAX for the target."""
    recipe, experiment, flags = find_experiment(arguments)
    options, experiment = parse_experiment(
        f"{command} {recipe}", flags, experiment, defaults, description=summary
    )
    experiment.check()
    from podracer_plan.compiled import scaled
    from podracer_plan.compilers import prepare_compilers
    from podracer_plan.targets import find_target, kind_named

    if options.target != "here":
        kind_named(options.target)  # refuses it before the process is set up for it
        prepare_compilers()
    else:
        initialize_devices(Hosts(), experiment.devices, experiment.arch)
    target = find_target(options.target, experiment.devices)
    names = {flag.name for flag in split_flags(flags)[1]}
    if options.target != "here" and not names & {"num_envs", "driver.num_envs"}:
        frames = {"frames": experiment.frames} if "frames" in names else {}
        experiment = dataclasses.replace(scaled(experiment, len(target.devices)), **frames)
    return experiment, target, options
