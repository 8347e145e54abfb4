"""The command that says what a run needs before a machine is rented: `podracer plan`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from podracer.cli.arguments import Arch, Limits
from podracer.cli.recipe_flags import find_experiment, parse_experiment
from podracer.devices.startup import Hosts, disable_async_dispatch, initialize_devices
from podracer.errors import ConfigError

if TYPE_CHECKING:
    from podracer.config.experiment import Experiment


Quantity = Annotated[float | None, Limits(0, 1e18)]


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """Flags of `podracer plan` that are no part of the experiment."""

    hosts: Annotated[int, Limits(high=65_536)] = 1
    """Number of hosts, at least 1. `--devices` is the number of devices of all of them; by default
    as many as such a host has."""
    device: str = "here"
    """Name of a device, such as h200, a100 or v3-8; `here` is this machine."""
    device_bytes: Quantity = None
    """Memory of each device that a program may use, in bytes, for one that `--device` does not
    know."""
    measure: Annotated[float, Limits(0, 3600)] = 5.0
    """Time for a measurement on this machine, in seconds after compilation; 0 measures nothing."""
    steps_per_second: Quantity = None
    """Speed of this run that was recorded on such a machine, in steps a second; it takes the place
    of measurements."""
    price: Quantity = None
    """Price of a host for an hour, in dollars."""
    arch: Arch = "anakin"
    """Architecture: anakin runs JAX environments on the device, sebulba host environments."""
    update_rule: Path | None = None
    """File of a learned update rule, as for `podracer train`."""
    json: bool = False
    """Print one JSON object."""


def plan(arguments: Sequence[str]) -> int:
    """Run `podracer plan`: memory of a run that has not begun; speed and cost where known."""
    recipe, experiment, flags = find_experiment(arguments)
    options, experiment, _ = parse_experiment(
        f"plan {recipe}",
        flags,
        experiment,
        PlanOptions(arch=experiment.arch),
        {},
        "Say what a run needs before a machine is rented: memory and whether it fits; speed and "
        "hours as measured here or recorded; the price, if that of an hour is given.",
    )
    return _plan(experiment, options)


def _plan(experiment: Experiment, options: PlanOptions) -> int:
    from podracer.plan.devices import device_of, find_device, machine_here, machine_of

    experiment.check()
    if experiment.pods:
        raise ConfigError("a plan is for one run, not for a population.")
    device = None if options.device == "here" else find_device(options.device)
    if options.device_bytes is not None:
        device = device_of(options.device_bytes)
    local = -(-experiment.devices // options.hosts) if device is None else 1
    if experiment.arch == "sebulba" and local <= 1:
        disable_async_dispatch()
    initialize_devices(Hosts(), local)
    from podracer.devices.startup import use_compilation_cache
    from podracer.plan.plan import make_plan, show

    use_compilation_cache()
    size = (options.hosts, experiment.devices)
    machine = machine_here(*size) if device is None else machine_of(device, *size)
    plan = make_plan(
        experiment,
        machine,
        seconds=options.measure,
        steps_per_second=options.steps_per_second,
        price=options.price,
    )
    print(json.dumps(plan.to_json()) if options.json else show(plan))
    return 0
