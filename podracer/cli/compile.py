"""The command that compiles a run for devices that are not here: `podracer compile`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from podracer.cli.arguments import Arch, take_flags
from podracer.devices.startup import prepare_compilers


@dataclasses.dataclass(frozen=True)
class CompileOptions:
    """Flags of `podracer compile` that are no part of the experiment."""

    target: str = "here"
    """Devices to compile for, such as h100, h100:8, tpu-v3:2x2 or tpu-v5e:16x16; `here` is this
    machine. Unless `--num-envs` is given each device has the recipe's number of environments."""
    arch: Arch = "anakin"
    """Architecture: anakin runs JAX environments on the device, sebulba host environments."""
    update_rule: Path | None = None
    """File of a learned update rule, as for `podracer train`."""
    json: bool = False
    """Print one JSON object."""


def compile_command(arguments: Sequence[str]) -> int:
    """Run `podracer compile`: memory, kernels, collectives and work of a run's programs."""
    prepare_compilers()
    from podracer.cli.recipe_flags import find_experiment, parse_experiment
    from podracer.plan.compiled import compile_run, scaled, show
    from podracer.plan.targets import find_target

    recipe, experiment, flags = find_experiment(arguments)
    options, experiment, _ = parse_experiment(
        f"compile {recipe}",
        flags,
        experiment,
        CompileOptions(arch=experiment.arch),
        {},
        "Compile the programs of a run for accelerators that need not be here, and report the "
        "memory of each device, and kernels, collectives and work of an update.",
    )
    experiment.check()
    target = find_target(options.target, experiment.devices)
    if options.target != "here" and "num_envs" not in take_flags(flags, "num_envs")[0]:
        experiment = scaled(experiment, len(target.devices))
    run = compile_run(experiment, target)
    print(json.dumps(run.to_json()) if options.json else show(run))
    return 0
