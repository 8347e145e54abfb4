"""Short measurements of the parts on this machine, by the functions of `podracer bench`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import statistics
import time
from typing import Any

from jax.sharding import Mesh

from podracer.agent import Blueprint
from podracer.bench import sebulba as bench
from podracer.bench.anakin import Program, acting, prepare, training
from podracer.devices.mesh import find_devices
from podracer.drivers.anakin import AnakinConfig
from podracer.drivers.sebulba import SebulbaConfig
from podracer.environment import Environment, HostEnvironments
from podracer.plan.plan import Part
from podracer.types import PyTree

_LEAST_LAPS = 3
_HERE = "measured here"


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Speed of the whole on this machine, and the seconds of the parts of an update."""

    steps_per_second: float
    parts: list[Part]


def load() -> float:
    """Return the system's load of the last minute, 0 where it is unknown."""
    with contextlib.suppress(OSError):
        return os.getloadavg()[0]
    return 0.0


def measure_anakin(
    agent: Blueprint, env: Environment, config: AnakinConfig, mesh: Mesh, seconds: float
) -> Measurement:
    """Measure an update with all its parts, for about `seconds` after it was compiled."""
    share = seconds / 3
    one = dataclasses.replace(config, num_envs=config.num_envs // mesh.size)
    chunk = config.updates_per_chunk
    simulator = _lap_seconds(*acting(agent, env, one, act=False), share) / chunk
    both = _lap_seconds(*acting(agent, env, one, act=True), share) / chunk
    total = _lap_seconds(*training(agent, env, config, mesh), share) / chunk
    learning = "measured here: the rest of the update"
    if mesh.size > 1:
        learning += ", reductions included"
    parts = [
        Part("simulator", simulator, f"{_HERE}, alone on one device"),
        Part("acting", max(0.0, both - simulator), f"{_HERE}: what it adds to the simulator"),
        Part("learning", max(0.0, total - max(both, simulator)), learning),
    ]
    return Measurement(config.steps_per_update / total, parts)


def _lap_seconds(program: Program, state: PyTree, seconds: float) -> float:
    """Return the median seconds of warm calls of a program."""
    prepared = prepare(program, state)
    end, laps = time.perf_counter() + seconds, []
    while len(laps) < _LEAST_LAPS or time.perf_counter() < end:
        laps.append(prepared.lap().seconds)
    return statistics.median(laps)


def measure_sebulba(
    agent: Any, env: HostEnvironments, config: SebulbaConfig, devices: int, seconds: float
) -> Measurement:
    """Measure a whole run and its parts, each alone, for about `seconds` after compilation."""
    share = seconds / 4
    setup = bench.make_setup(agent, env, config, find_devices(devices))
    steps = config.steps_per_update
    simulator = steps / bench.measure_simulator(setup, share)
    actors = steps / bench.measure_acting(setup, share)
    parts = [
        Part("simulator", simulator, f"{_HERE}, alone"),
        Part("acting", max(0.0, actors - simulator), f"{_HERE}: what it adds to the simulator"),
        Part("learning", steps / bench.measure_learning(setup, share), f"{_HERE}, alone"),
    ]
    return Measurement(bench.measure_training(setup, share)[0], parts)
