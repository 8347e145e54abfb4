"""The command `podracer tune`."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

from podracer.cli.arguments import leading_name, parse, take_values
from podracer.cli.values import Limits
from podracer.devices.startup import Hosts, initialize_devices
from podracer.errors import ConfigError
from podracer.io.text import print_json
from podracer_plan.child import child_process, printed_objects

if TYPE_CHECKING:
    from podracer.agent import Blueprint
    from podracer.drivers.sebulba import SebulbaConfig
    from podracer.environment import Environment, HostEnvironments
    from podracer_plan.trials import Trial

LEAST_SECONDS = 0.1


@dataclasses.dataclass(frozen=True)
class TuneOptions:
    """Flags of `podracer tune`."""

    seconds: Annotated[float, Limits(LEAST_SECONDS, 86_400)] = 90.0
    """Approximate length of all measurements together, in seconds."""
    json: bool = False
    """Print one JSON object for each setting."""


def tune(arguments: Sequence[str]) -> int:
    """Measure the fastest setting of a recipe under Sebulba."""
    from podracer.agent import check_policy
    from podracer.cli.recipe_flags import find_recipe, parse_experiment
    from podracer.drivers.sebulba import SebulbaConfig
    from podracer.run.setup import build

    description = (
        "Measure settings of Sebulba on this machine and print the fastest. Without --devices a "
        "CPU is measured as one device, and as one for acting beside one for each core to learn."
    )
    recipe, flags = leading_name(arguments, "")
    if not recipe:
        parse(TuneOptions, "tune RECIPE", flags, description=description)
        raise ConfigError("tune needs a recipe: podracer tune RECIPE.")
    experiment, flags_of_settings = find_recipe(recipe, flags)
    options, experiment = parse_experiment(
        f"tune {recipe}",
        flags_of_settings,
        experiment.with_arch("sebulba"),
        TuneOptions(),
        description=description,
    )
    experiment.check()
    config = experiment.driver
    if not isinstance(config, SebulbaConfig):
        raise ConfigError("tune measures settings of Sebulba: leave `driver` out.")
    initialize_devices(Hosts(), experiment.devices, "sebulba")
    blueprint, env = build(experiment)  # refused here once, not by each process that measures
    check_policy(blueprint.build(), "tune measures Sebulba, and it trains under Anakin alone")
    codes: list[int] = []
    if not experiment.devices and has_one_cpu_device():
        remaining = [x for x in _without(flags, "devices", "seconds") if x != "--json"]
        measured = _measured_by_processes([recipe, *remaining], options.seconds, codes)
    else:
        measured = _measured(blueprint, env, config, experiment.devices, options.seconds)
    if not options.json:
        print(f"{'steps/s':>10}{'actors idle':>13}{'learner idle':>14}{'lag':>6}", flush=True)
    trials = []
    for trial in measured:
        trials.append(trial)
        idle = f"{trial.actor_idle:>13.0%}{trial.learner_idle:>14.0%}"
        row = f"{trial.steps_per_second:>10,.0f}{idle}{trial.lag_mean:>6.1f}   {_flags(trial)}"
        if options.json:
            print_json(dataclasses.asdict(trial))
        else:
            print(row, flush=True)
    if not options.json and trials:
        best = max(trials, key=lambda trial: trial.steps_per_second)
        names = [*best.settings, *(f"driver.{name}" for name in best.settings)]
        remaining = _without(flags, "seconds", "arch", "driver", *names)
        other_arguments = shlex.join([recipe, *remaining])
        print(f"\nFastest: podracer train {other_arguments} --arch sebulba {_flags(best)}")
        print("More environments make larger batches: the learning rate may have to follow.")
    return next(filter(None, codes), 0)  # a process that failed said why


def _without(arguments: Sequence[str], *names: str) -> list[str]:
    """Return arguments without the flags of these names."""
    return take_values(arguments, dict.fromkeys(names, str))[1]


def has_one_cpu_device() -> bool:
    """Return whether this process has a single device, a CPU."""
    import jax

    return jax.default_backend() == "cpu" and jax.device_count() == 1


def _measured(
    blueprint: Blueprint,
    env: Environment | HostEnvironments,
    config: SebulbaConfig,
    num_devices: int,
    seconds: float,
) -> Iterator[Trial]:
    """Yield the trials of an agent in an environment on the devices of this process."""
    from podracer.devices.mesh import find_devices
    from podracer.devices.startup import use_compilation_cache
    from podracer_plan.trials import trials

    use_compilation_cache()
    return trials(blueprint, env, config, find_devices(num_devices), seconds)


def _measured_by_processes(
    arguments: Sequence[str], seconds: float, codes: list[int]
) -> Iterator[Trial]:
    """Yield the trials of a recipe with its flags, on one CPU device and on one more than cores.

    A process has one number of devices for its life; `codes` gets their exit codes.
    """
    from podracer.devices.machine import num_cores
    from podracer_plan.trials import Trial

    seconds = max(seconds / 2, LEAST_SECONDS)
    for devices in (1, 1 + num_cores()):
        limits = ["--devices", str(devices), "--seconds", str(seconds), "--json"]
        with child_process(["tune", *arguments, *limits]) as process:
            assert process.stdout is not None
            for values in printed_objects(process.stdout):
                yield Trial(**values)
            process.wait()
        codes.append(process.returncode)


def _flags(trial: Trial) -> str:
    return " ".join(f"--{name.replace('_', '-')} {n}" for name, n in trial.settings.items())
