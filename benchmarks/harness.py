"""Shared parts of the benchmarks: contenders that take turns, a table of them, and JSON lines.

A contender is anything that can run one warm repetition again and again. Contenders take turns,
A B A B, so that a machine that slows down slows them all, and ratios are taken turn by turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from anakin_parts import Program, Timing, prepare, training
from machine import machine

from podracer.devices.mesh import find_devices
from podracer.drivers.anakin import Anakin, AnakinConfig
from podracer.networks import convolutions as networks
from podracer.types import PyTree


@dataclass(frozen=True)
class Contender:
    """`lap` runs one repetition of `steps` environment steps (or whatever a benchmark counts)."""

    name: str
    steps: int
    compile_seconds: float
    lap: Callable[[], Timing]
    about: dict[str, Any] = field(default_factory=dict)  # more for its JSON line


def here(
    name: str, program: Program, state: PyTree, steps: int, *, calls: int = 1, **about: Any
) -> Contender:
    """A jitted `state -> state` in this process; a repetition is `calls` calls."""
    prepared = prepare(program, state, calls)
    about = {**prepared.memory, **about}
    return Contender(name, steps * calls, prepared.compile_seconds, prepared.lap, about)


def anakin(name: str, agent: Any, env: Any, config: AnakinConfig, devices: int = 1) -> Contender:
    """A whole run on some of the devices; a repetition is one chunk.

    `agent` is settings, or a blueprint of them.
    """
    program, state = training(Anakin(agent, env, config, find_devices(devices)))
    steps = config.steps_per_update * config.updates_per_chunk
    return here(name, program, state, steps, devices=devices)


class Process:
    """A program of another Python, which answers each line that it reads with a JSON object.

    `hello` is the object that it prints first.
    """

    def __init__(self, name: str, command: Sequence[str]):
        self._name, self._command = name, command
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.hello = self._read()

    def ask(self, line: str = "") -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise SystemExit(f"{self._name} ended with code {code}: {' '.join(self._command)}")
        return json.loads(line)


def elsewhere(name: str, command: Sequence[str]) -> Contender:
    """A process of its own. It first prints one JSON object with `steps`, `compile_seconds` and
    versions, then for each line that it reads runs a repetition and prints a `Timing` as JSON."""
    process = Process(name, command)
    about = dict(process.hello)
    steps, compile_seconds = about.pop("steps"), about.pop("compile_seconds")
    return Contender(name, steps, compile_seconds, lambda: Timing(**process.ask()), about)


@dataclass(frozen=True)
class Result:
    """The repetitions of one contender."""

    contender: Contender
    laps: list[Timing]

    def rates(self) -> list[float]:
        return [self.contender.steps / lap.seconds for lap in self.laps]

    def rate(self) -> float:
        """Steps per second, median."""
        return statistics.median(self.rates())

    def cpu_rate(self) -> float:
        """Steps per second of processor time, median."""
        return self.contender.steps / statistics.median(lap.cpu_seconds for lap in self.laps)

    def ratio(self, other: Result) -> float:
        """How many times as fast as another, median over the turns."""
        return statistics.median(
            mine / its for mine, its in zip(self.rates(), other.rates(), strict=True)
        )


def alternate(contenders: Sequence[Contender], repetitions: int) -> list[Result]:
    """Let contenders take turns."""
    turns = [[contender.lap() for contender in contenders] for _ in range(repetitions)]
    return [
        Result(contender, [turn[i] for turn in turns]) for i, contender in enumerate(contenders)
    ]


def compare(
    title: str,
    settings: dict[str, Any],
    contenders: Sequence[Contender],
    options: argparse.Namespace,
    *,
    unit: str = "steps",
) -> list[Result]:
    """Let contenders take turns, print the table, append their JSON lines. The first of them is
    what the others are compared with."""
    results = alternate(contenders, options.repetitions)
    first = results[0]
    width = max(len(result.contender.name) for result in results)
    about = ", ".join(f"{name} {value}" for name, value in settings.items())
    print(f"\n{title} ({about})\n")
    columns = (f"{unit}/s", "per CPU s", "worst", "best", "compile s", "first is")
    print(" " * width + "".join(f"{column:>12}" for column in columns))
    for result in results:
        contender, rates, ratio = result.contender, result.rates(), first.ratio(result)
        print(
            f"{contender.name:{width}}{result.rate():>12,.0f}{result.cpu_rate():>12,.0f}"
            f"{min(rates):>12,.0f}{max(rates):>12,.0f}{contender.compile_seconds:>12.1f}"
            f"{ratio:>11.2f}x",
            flush=True,
        )
        record = {
            "benchmark": title,
            "contender": contender.name,
            **settings,
            **contender.about,
            f"{unit}_per_second": result.rate(),
            f"{unit}_per_cpu_second": result.cpu_rate(),
            "compile_seconds": contender.compile_seconds,
            "seconds": [lap.seconds for lap in result.laps],
            "cpu_seconds": [lap.cpu_seconds for lap in result.laps],
            "first": first.contender.name,
            "first_is_times_as_fast": ratio,
        }
        append(options.out, record)
    return results


def append(out: Path | None, record: dict[str, Any]) -> None:
    """Add one measurement to a file of JSON lines."""
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a") as file:
            file.write(json.dumps({**record, **machine()}) + "\n")


class Quick(argparse.Action):
    """`--quick`, the last flag: other ones get the small values of `const`."""

    def __init__(self, *names: Any, **about: Any) -> None:
        about |= {"nargs": 0, "default": False}
        super().__init__(*names, **about, help="tiny sizes, only to see that it works")

    def __call__(self, parser: Any, options: argparse.Namespace, *_: Any) -> None:
        vars(options).update(self.const, quick=True)


def parser(about: str | None, *, devices: int = 1, **quick: Any) -> argparse.ArgumentParser:
    """The flags of all benchmarks; `--quick` also sets one repetition and one device."""
    made = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument(
        "--devices", type=int, default=devices, help="CPU devices (default %(default)s)"
    )
    made.add_argument("--repetitions", type=int, default=7, help="warm repetitions (default 7)")
    made.add_argument("--quick", action=Quick, const={"repetitions": 1, "devices": 1, **quick})
    made.add_argument("--out", type=Path, help="append one JSON line for each measurement to this")
    return made


def parse(made: argparse.ArgumentParser) -> argparse.Namespace:
    """The flags, with JAX set up for them. Nothing may have run on a device before."""
    options = made.parse_args()
    jax.config.update("jax_num_cpu_devices", options.devices)
    return options


def plain_convolution(x: jax.Array, w: jax.Array, stride: int, padding: int = 0) -> jax.Array:
    """A convolution with the gradients that JAX writes."""
    pads = ((padding, padding), (padding, padding))
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, w, (stride, stride), pads, dimension_numbers=layout)


@contextmanager
def convolutions(form: Callable[..., jax.Array] = plain_convolution) -> Iterator[None]:
    """While this lasts, programs are built with another convolution than the library's."""
    ours = networks.convolution
    networks.convolution = form
    try:
        yield
    finally:
        networks.convolution = ours
