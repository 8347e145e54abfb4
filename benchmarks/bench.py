"""The speed of each architecture's parts: environments alone, with acting, with learning.

    python benchmarks/bench.py anakin                                 the recipe `catch`
    python benchmarks/bench.py recipe lpg_paper --sizes 4096 16384    a recipe under Anakin
    python benchmarks/bench.py sebulba --environment atari:pong       IMPALA in a host environment

`recipe` takes the flags of `podracer train RECIPE` too. `--json` prints JSON lines, which the
figures of `reproduce/` are read from.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence

import anakin_parts
import sebulba_parts
from harness import Quick

from podracer.cli.recipe_flags import find_recipe, parse_experiment
from podracer.devices.startup import Hosts, initialize_devices
from podracer.drivers.sebulba import SebulbaConfig
from podracer.io.text import explain_error
from podracer.run.errors import classify_error


@dataclasses.dataclass(frozen=True)
class NoOptions:
    """A command without flags of its own."""


def anakin(options: argparse.Namespace, flags: Sequence[str]) -> None:
    initialize_devices(Hosts(), options.devices)
    figures = anakin_parts.bench_anakin(
        options.devices, options.envs_per_device, options.repetitions
    )
    print(json.dumps(figures) if options.json else anakin_parts.show(figures))


def recipe(options: argparse.Namespace, flags: Sequence[str]) -> None:
    experiment, flags = find_recipe(options.recipe, flags)
    command = f"recipe {options.recipe}"
    experiment = parse_experiment(command, flags, experiment.with_arch("anakin"), NoOptions())[1]
    experiment.check()
    initialize_devices(Hosts(), experiment.devices)
    sizes = options.sizes or [experiment.driver.num_envs]
    for figures in anakin_parts.bench_recipe(experiment, sizes, options.repetitions):
        shown = json.dumps(figures) if options.json else anakin_parts.show_size(figures)
        print(shown, flush=True)


def sebulba(options: argparse.Namespace, flags: Sequence[str]) -> None:
    initialize_devices(Hosts(), options.devices, "sebulba")
    driver = SebulbaConfig(
        options.num_envs, options.rollout_length, threads_per_actor=options.threads_per_actor
    )
    figures = sebulba_parts.bench_sebulba(
        options.environment,
        driver,
        hidden=tuple(options.hidden),
        devices=options.devices,
        seconds=options.seconds,
        repetitions=options.repetitions,
        parts=options.parts,
    )
    shown = sebulba_parts.show(options.environment, figures)
    print(json.dumps(figures) if options.json else shown)


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = made.add_subparsers(required=True)

    def command(function: object, repetitions: int, **quick: object) -> argparse.ArgumentParser:
        added = commands.add_parser(function.__name__)  # type: ignore[attr-defined]
        added.set_defaults(run=function)
        added.add_argument("--repetitions", type=int, default=repetitions, help="the median counts")
        added.add_argument("--json", action="store_true", help="print JSON lines")
        added.add_argument("--quick", action=Quick, const={"repetitions": 1, **quick})
        return added

    own = command(anakin, 5, envs_per_device=8)
    own.add_argument("--devices", type=int, default=0, help="0 for all")
    own.add_argument("--envs-per-device", type=int, default=128)
    own = command(recipe, 5)
    own.add_argument("recipe")
    own.add_argument("--sizes", type=int, nargs="+", help="numbers of environments, until memory "
                     "is out; default: the recipe's")  # fmt: skip
    own = command(sebulba, 3, seconds=0.2)
    own.add_argument("--devices", type=int, default=0, help="0 for all")
    own.add_argument("--environment", default="gymnasium:CartPole-v1")
    own.add_argument("--hidden", type=int, nargs="*", default=[32], help="widths of dense layers")
    own.add_argument("--num-envs", type=int, default=SebulbaConfig().num_envs)
    own.add_argument("--rollout-length", type=int, default=SebulbaConfig().rollout_length)
    own.add_argument("--threads-per-actor", type=int, default=0, help="0 for the default")
    own.add_argument("--seconds", type=float, default=3.0, help="of each measurement")
    own.add_argument("--parts", nargs="+", default=[*sebulba_parts.MEASURES],
                     choices=[*sebulba_parts.MEASURES])  # fmt: skip
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    made = parser()
    options, flags = made.parse_known_args(arguments)
    if flags and options.run is not recipe:
        made.error(f"unrecognized arguments: {' '.join(flags)}")
    try:
        options.run(options, flags)
    except Exception as error:
        sys.exit(explain_error(classify_error(error)))


if __name__ == "__main__":
    main()
