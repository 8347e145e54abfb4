"""The commands that measure speed: `podracer bench` and `podracer tune`."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Literal, cast, get_args

import tyro

from podracer.cli.arguments import Count, Limits, leading_name, parse, take_flags
from podracer.devices.startup import Hosts, initialize_devices
from podracer.errors import ConfigError
from podracer.io.jsonl import printed_objects
from podracer.io.signals import child_process

if TYPE_CHECKING:
    from podracer.bench.tune import Trial
    from podracer.config.experiment import Experiment

Repetitions = Annotated[int, Limits(high=10_000)]


@dataclasses.dataclass(frozen=True)
class BenchOptions:
    """Measure acting and training of the recipe `catch`, compile time apart."""

    name: Annotated[Literal["anakin", "recipe", "sebulba"], tyro.conf.Positional] = "anakin"
    """What to measure. `podracer bench NAME --help` shows its flags."""
    devices: int = 0
    """Number of devices to use; 0 for all."""
    envs_per_device: Count = 128
    """Number of environments on each device, at least 1."""
    repetitions: Repetitions = 5
    """Number of repetitions after compilation, at least 1; the median is printed."""
    json: bool = False
    """Print one JSON object."""


Part = Literal[
    "simulator", "acting", "learning", "training", "plain_loop_acting", "plain_loop_training"
]


@dataclasses.dataclass(frozen=True)
class SebulbaOptions:
    """Flags of `podracer bench sebulba` that are no part of the driver."""

    environment: str = "gymnasium:CartPole-v1"
    """Name of a host environment, see `podracer list environments`."""
    hidden: tuple[int, ...] = (32,)
    """Widths of the dense layers of the IMPALA agent, after convolutions for images."""
    devices: int = 0
    """Number of devices to use; 0 for all."""
    seconds: Annotated[float, Limits(0.01, 3600)] = 3.0
    """Length of each measurement, in seconds."""
    repetitions: Repetitions = 3
    """Number of rounds of all measurements, at least 1; the median is printed."""
    parts: tuple[Part, ...] = get_args(Part)
    """What to measure; by default everything."""
    json: bool = False
    """Print one JSON object."""


@dataclasses.dataclass(frozen=True)
class RecipeOptions:
    """Flags of `podracer bench recipe RECIPE` that are no part of the experiment."""

    sizes: Annotated[tuple[int, ...], Limits()] = ()
    """Numbers of environments to measure one after another, until memory is out. By default only
    the recipe's own."""
    repetitions: Repetitions = 5
    """Number of repetitions after compilation, at least 1; the median is printed."""
    json: bool = False
    """Print one JSON object for each number of environments."""


@dataclasses.dataclass(frozen=True)
class TuneOptions:
    """Flags of `podracer tune`."""

    seconds: Annotated[float, Limits(0.1, 86_400)] = 90.0
    """Approximate length of all measurements together, in seconds."""
    json: bool = False
    """Print one JSON object for each setting."""


def bench(arguments: Sequence[str]) -> int:
    """Run `podracer bench`: measure the throughput of each part of an architecture."""
    name, flags = leading_name(arguments, "anakin")
    if name == "sebulba":
        return _bench_sebulba(flags)
    if name == "recipe":
        return _bench_recipe(flags)
    options = parse(BenchOptions, "bench", arguments)
    if options.name != "anakin":
        raise ConfigError(f"write the name first: podracer bench {options.name}.")
    initialize_devices(Hosts(), options.devices)
    from podracer.bench.anakin import bench_anakin, show

    figures = bench_anakin(options.devices, options.envs_per_device, options.repetitions)
    print(json.dumps(figures) if options.json else show(figures))
    return 0


def _bench_sebulba(arguments: Sequence[str]) -> int:
    from podracer.cli.flags import group_of, parse_parts
    from podracer.drivers.sebulba import SebulbaConfig

    parts = {"bench": group_of(SebulbaOptions()), "sebulba": group_of(SebulbaConfig())}
    description = "Measure simulation, inference and training of IMPALA on a host environment."
    values = parse_parts(parts, "bench sebulba", arguments, description)
    options, driver = SebulbaOptions(**values["bench"]), SebulbaConfig(**values["sebulba"])
    if not options.parts:
        raise ConfigError(f"--parts needs one or more of {', '.join(get_args(Part))}.")
    initialize_devices(Hosts(), options.devices, "sebulba")
    from podracer.bench.sebulba import bench_sebulba, show

    figures = bench_sebulba(
        options.environment,
        driver,
        hidden=options.hidden,
        devices=options.devices,
        seconds=options.seconds,
        repetitions=options.repetitions,
        parts=options.parts,
    )
    print(json.dumps(figures) if options.json else show(options.environment, figures))
    return 0


def _bench_recipe(arguments: Sequence[str]) -> int:
    from podracer.cli.recipe_flags import find_recipe, parse_experiment

    recipe, flags = leading_name(arguments, "catch")
    experiment, flags = find_recipe(recipe, flags)
    description = "Measure the speed and the memory of a recipe under Anakin."
    options, experiment, _ = parse_experiment(
        f"bench recipe {recipe}",
        flags,
        experiment.with_arch("anakin"),
        RecipeOptions(),
        description=description,
    )
    experiment.check()
    initialize_devices(Hosts(), experiment.devices)
    from podracer.bench.anakin import bench_recipe, show_size

    sizes = options.sizes or (experiment.driver.num_envs,)
    for figures in bench_recipe(experiment, sizes, options.repetitions):
        print(json.dumps(figures) if options.json else show_size(figures), flush=True)
    return 0


def tune(arguments: Sequence[str]) -> int:
    """Run `podracer tune`: measure the fastest setting of a recipe under Sebulba."""
    from podracer.cli.recipe_flags import find_recipe, parse_experiment

    description = (
        "Measure settings of Sebulba on this machine and print the fastest. Without --devices a "
        "CPU is measured as one device, and as one for acting beside one for each core to learn."
    )
    recipe, flags = leading_name(arguments, "")
    if not recipe:
        parse(TuneOptions, "tune RECIPE", flags, description=description)
        raise ConfigError("tune needs a recipe: podracer tune RECIPE.")
    experiment, flags_of_settings = find_recipe(recipe, flags)
    options, experiment, _ = parse_experiment(
        f"tune {recipe}",
        flags_of_settings,
        experiment.with_arch("sebulba"),
        TuneOptions(),
        description=description,
    )
    experiment.check()
    initialize_devices(Hosts(), experiment.devices, "sebulba")
    codes: list[int] = []
    if not experiment.devices and has_one_cpu_device():
        measured = _measured_by_processes([recipe, *flags], options.seconds, codes)
    else:
        measured = _measured(experiment, options.seconds)
    if not options.json:
        print(f"{'steps/s':>10}{'actors idle':>13}{'learner idle':>14}{'lag':>6}", flush=True)
    trials = []
    for trial in measured:
        trials.append(trial)
        print(json.dumps(dataclasses.asdict(trial)) if options.json else _row(trial), flush=True)
    if not options.json and trials:
        best = max(trials, key=lambda trial: trial.steps_per_second)
        settings = best.settings()
        measured_names = {"devices", *(f"driver.{name}" for name in settings)}
        remaining = take_flags(flags, "seconds", *settings)[1]
        remaining = [x for x in remaining if x.partition("=")[0] not in measured_names]
        other_arguments = shlex.join([recipe, *remaining])
        print(f"\nFastest: podracer train {other_arguments} --arch sebulba {_flags(best)}")
        print("More environments make larger batches: the learning rate may have to follow.")
    return next(filter(None, codes), 0)  # a process that failed said why


def has_one_cpu_device() -> bool:
    """Return whether this process has a single device, a CPU."""
    import jax

    return jax.default_backend() == "cpu" and jax.device_count() == 1


def _measured(experiment: Experiment, seconds: float) -> Iterator[Trial]:
    """Yield the trials of an experiment under Sebulba on the devices of this process."""
    from podracer.bench.tune import trials
    from podracer.devices.mesh import find_devices
    from podracer.devices.startup import use_compilation_cache
    from podracer.drivers.sebulba import SebulbaConfig
    from podracer.run.setup import build, to_host_environments

    use_compilation_cache()
    agent, env = build(experiment)
    driver, devices = cast(SebulbaConfig, experiment.driver), find_devices(experiment.devices)
    return trials(agent, to_host_environments(env), driver, devices, seconds)


def _measured_by_processes(
    arguments: Sequence[str], seconds: float, codes: list[int]
) -> Iterator[Trial]:
    """Yield the trials of a recipe with its flags, on one CPU device and on one more than cores.

    A process has one number of devices for its life; `codes` gets their exit codes.
    """
    from podracer.bench.tune import Trial
    from podracer.devices.machine import num_cores
    from podracer.drivers.sebulba import SebulbaConfig

    for devices in (1, 1 + num_cores()):
        limits = ["--devices", str(devices), "--seconds", str(seconds / 2), "--json"]
        with child_process(["tune", *arguments, *limits]) as process:
            assert process.stdout is not None
            for values in printed_objects(process.stdout):
                values["config"] = SebulbaConfig(**values["config"])
                yield Trial(**values)
            process.wait()
        codes.append(process.returncode)


def _row(trial: Trial) -> str:
    idle = f"{trial.actor_idle:>13.0%}{trial.learner_idle:>14.0%}"
    return f"{trial.steps_per_second:>10,.0f}{idle}{trial.lag_mean:>6.1f}   {_flags(trial)}"


def _flags(trial: Trial) -> str:
    return " ".join(f"--{name.replace('_', '-')} {n}" for name, n in trial.settings().items())
