"""The commands that measure: `podracer bench` and `podracer tune`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import tyro

from podracer.cli.arguments import parse, recipe_of
from podracer.experiments.hosts import Hosts, act_at_once, join


def bench(arguments: Sequence[str]) -> int:
    """`podracer bench`: throughput of an architecture, part by part."""
    name = arguments[0] if arguments and not arguments[0].startswith("-") else "anakin"
    if name == "sebulba":
        return _bench_sebulba(arguments[1:])
    if name == "lpg":
        return _bench_lpg(arguments[1:])

    @dataclasses.dataclass(frozen=True)
    class Bench:
        name: Annotated[Literal["anakin", "lpg", "sebulba"], tyro.conf.Positional] = "anakin"
        devices: int = 0
        """How many devices; 0 for every one."""
        envs_per_device: int = 128
        """Environments on each device."""
        repetitions: int = 5
        """Warm repetitions, of which the median counts."""
        json: bool = False
        """Print one JSON object."""

    parsed = parse(Bench, "bench", arguments)
    join(Hosts(), parsed.devices)
    from podracer.bench.anakin import bench_anakin, show

    figures = bench_anakin(parsed.devices, parsed.envs_per_device, parsed.repetitions)
    print(json.dumps(figures) if parsed.json else show(figures))
    return 0


def _bench_sebulba(arguments: Sequence[str]) -> int:
    from podracer.drivers.sebulba import SebulbaConfig

    @dataclasses.dataclass(frozen=True)
    class BenchSebulba:
        environment: str = "gymnasium:CartPole-v1"
        """A host environment, see `podracer list environments`."""
        hidden: tuple[int, ...] = (32,)
        """Layers of the IMPALA agent's network; behind convolutions where it sees pictures."""
        devices: int = 0
        """How many devices; 0 for every one."""
        seconds: float = 3.0
        """Length of each measurement."""
        repetitions: int = 3
        """Rounds of all measurements, of which the median counts."""
        json: bool = False
        """Print one JSON object."""

    fields = [("bench", BenchSebulba), ("driver", SebulbaConfig)]
    command = dataclasses.make_dataclass("BenchCommand", fields, frozen=True)
    parsed = parse(command, "bench sebulba", arguments, command(BenchSebulba(), SebulbaConfig()))
    if parsed.bench.devices <= 1:
        act_at_once()
    join(Hosts(), parsed.bench.devices)
    from podracer.bench.anakin import bench_sebulba
    from podracer.bench.sebulba import show

    figures = bench_sebulba(
        parsed.bench.environment, parsed.driver, hidden=parsed.bench.hidden,
        devices=parsed.bench.devices, seconds=parsed.bench.seconds,
        repetitions=parsed.bench.repetitions,
    )  # fmt: skip
    shown = show(parsed.bench.environment, figures)
    print(json.dumps(figures) if parsed.bench.json else shown)
    return 0


def _bench_lpg(arguments: Sequence[str]) -> int:
    @dataclasses.dataclass(frozen=True)
    class BenchLpg:
        lifetimes: tuple[int, ...] = (16, 32, 64)
        """Numbers of lifetimes to measure, one after another until memory is out. The paper's
        size is 960."""
        envs_per_lifetime: int = 64
        """Environments that share a lifetime."""
        units: int = 256
        """Of the rule's memory."""
        lifetime_groups: int = 4
        """Differentiate so many groups of lifetimes one after another, as `lpg_paper` does."""
        devices: int = 0
        """How many devices; 0 for every one."""
        repetitions: int = 5
        """Warm repetitions, of which the median counts."""
        json: bool = False
        """Print one JSON object a line."""

    parsed = parse(BenchLpg, "bench lpg", arguments)
    join(Hosts(), parsed.devices)
    from podracer.bench.anakin import bench_lpg, show_lpg

    for figures in bench_lpg(
        parsed.lifetimes,
        parsed.envs_per_lifetime,
        parsed.units,
        parsed.lifetime_groups,
        parsed.devices,
        parsed.repetitions,
    ):
        print(json.dumps(figures) if parsed.json else show_lpg(figures), flush=True)
    return 0


def tune(arguments: Sequence[str]) -> int:
    """`podracer tune`: the fastest setting of a recipe under Sebulba, measured here."""
    from podracer.types import ConfigError

    @dataclasses.dataclass(frozen=True)
    class Tune:
        seconds: float = 90.0
        """About how long to measure, in all."""
        devices: int = 0
        """How many devices; 0 for every one."""
        json: bool = False
        """Print one JSON object a line."""

    if "--help" in arguments[:1]:
        parse(Tune, "tune RECIPE", ["--help"])
    if not arguments or arguments[0].startswith("-"):
        raise ConfigError("tune needs to know what: podracer tune RECIPE.")
    recipe, flags = arguments[0], arguments[1:]
    experiment, rest = recipe_of(recipe, flags)
    parsed = parse(Tune, f"tune {recipe}", rest)
    if parsed.devices <= 1:
        act_at_once()
    join(Hosts(), parsed.devices)
    from podracer.bench.tune import trials
    from podracer.experiments.plan import build, hosted
    from podracer.experiments.training import use_compilation_cache

    use_compilation_cache()
    experiment = experiment.under("sebulba")
    agent, env = build(experiment)
    from podracer.mesh import find_devices

    def say(trial: Any) -> None:
        if parsed.json:
            print(json.dumps(dataclasses.asdict(trial)), flush=True)
        else:
            idle = f"{trial.actor_idle:>6.0%}{trial.learner_idle:>9.0%}"
            speed = f"{trial.steps_per_second:>10,.0f}"
            print(f"{speed}{idle}{trial.lag_mean:>6.1f}   {trial.flags()}", flush=True)

    if not parsed.json:
        print(f"{'steps/s':>10}{'idle: actors, learner':>22}{'lag':>4}", flush=True)
    devices = find_devices(parsed.devices)
    best, *_ = trials(agent, hosted(env), experiment.driver, devices, parsed.seconds, say)
    if not parsed.json:
        named = " ".join([recipe, *(flag for flag in flags if flag not in rest)])
        print(f"\nFastest: podracer train {named} --arch sebulba {best.flags()}")
        print("More environments make larger batches: the learning rate may have to follow.")
    return 0
