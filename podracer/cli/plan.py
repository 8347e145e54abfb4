"""The command that says what a run needs before a machine is rented: `podracer plan`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from podracer.cli.arguments import Arch, require_in_range
from podracer.cli.recipe_flags import find_experiment, parse_experiment
from podracer.experiments.hosts import Hosts, disable_async_dispatch, initialize_devices

if TYPE_CHECKING:
    from podracer.experiments.experiment import Experiment


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """Flags of `podracer plan` that are no part of the experiment."""

    hosts: int = 1
    """Number of hosts, at least 1. `--devices` is the number of devices of all of them; by default
    as many as such a host has."""
    device: str = "here"
    """Name of a device of the catalog, such as h200, a100 or v3-8; `here` is this machine."""
    prices: Path | None = None
    """JSON file with devices, prices and simulators, in the form of podracer/plan/devices.json; its
    entries replace those of the same name."""
    measure: float = 5.0
    """Time for measurements on this machine, in seconds besides compilation; 0 measures nothing."""
    arch: Arch = "anakin"
    """Architecture: anakin runs JAX environments on the device, sebulba host environments."""
    update_rule: Path | None = None
    """File of a learned update rule, as for `podracer train`."""
    json: bool = False
    """Print one JSON object."""
    check: bool = False
    """Print the model's predictions beside published points and our measurements, and plan nothing.
    """


def plan(arguments: Sequence[str]) -> int:
    """Run `podracer plan`: memory, speed, hours and price of a run that has not begun."""
    recipe, experiment, flags = find_experiment(arguments)
    options, experiment, _ = parse_experiment(
        f"plan {recipe}", flags, experiment, PlanOptions(arch=experiment.arch), {},
        "Say what a run needs and costs, before a machine is rented: memory and whether it fits, "
        "speed, hours, price, each with its source.",
    )  # fmt: skip
    require_in_range("--hosts", options.hosts, most=65_536)
    require_in_range("--measure", options.measure, least=0, most=3600)
    if options.check:
        from podracer.plan.check import all_rows, table

        rows = all_rows()
        text = json.dumps([dataclasses.asdict(row) for row in rows])
        print(text if options.json else table(rows))
        return 0
    return _plan(experiment, options)


def _plan(experiment: Experiment, options: PlanOptions) -> int:
    from podracer.plan.devices import read_catalog
    from podracer.plan.plan import show
    from podracer.types import ConfigError

    experiment.check()
    if experiment.pods:
        raise ConfigError("a plan is for one run, not for a population.")
    catalog = read_catalog(options.prices)
    is_here = options.device == "here"
    device = None if is_here else catalog.device(options.device)
    local = -(-experiment.devices // options.hosts) if is_here else 1
    if experiment.arch == "sebulba" and local <= 1:
        disable_async_dispatch()
    initialize_devices(Hosts(), local)
    from podracer.experiments.hosts import use_compilation_cache
    from podracer.plan.machine import machine_here, machine_of
    from podracer.plan.make import make_plan

    use_compilation_cache()
    size = (options.hosts, experiment.devices)
    machine = machine_here(*size) if device is None else machine_of(device, *size)
    plan = make_plan(experiment, machine, catalog, options.measure)
    print(json.dumps(plan.to_json()) if options.json else show(plan))
    return 0
