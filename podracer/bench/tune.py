"""Measured search for the fastest devices, threads and batch size of Sebulba on this machine."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from typing import Any

from podracer.bench import sebulba as bench
from podracer.devices.machine import num_cores
from podracer.devices.mesh import Device
from podracer.drivers.sebulba.config import SebulbaConfig
from podracer.environment import HostEnvironments
from podracer.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Trial:
    """A setting and its measured throughput."""

    devices: int
    config: SebulbaConfig
    steps_per_second: float
    actor_idle: float
    learner_idle: float
    lag_mean: float

    def settings(self) -> dict[str, int]:
        """Return the settings of the driver and the devices that are no defaults, by name."""
        names = ("num_envs", "threads_per_actor", "env_threads", "actors", "learners")
        values = {"devices": self.devices} | {name: getattr(self.config, name) for name in names}
        return {name: value for name, value in values.items() if value}  # 0 is a default


def trials(
    agent: Any, env: HostEnvironments, config: SebulbaConfig, devices: list[Device], seconds: float
) -> Iterator[Trial]:
    """Measure settings on these devices for about `seconds`, and yield each.

    The first is `config` itself; the others change one thing in the fastest so far. Raises
    `ConfigError` if none can run.
    """
    best, measured = None, []
    changes = [{}, *_changes(config, len(devices))]
    end = time.monotonic() + seconds
    for index, change in enumerate(changes):
        setting = dataclasses.replace(best.config if best else config, **change)
        setup = _fits(agent, env, setting, devices)
        if setup is None or setup.config in measured or (best and time.monotonic() > end):
            continue
        share = (end - time.monotonic()) / (len(changes) - index)
        rate, metrics = bench.measure_training(setup, max(1.0, 0.5 * share))
        shares = (metrics[name] for name in ("actor_idle", "learner_idle", "lag_mean"))
        trial = Trial(len(devices), setup.config, rate, *shares)
        measured.append(setup.config)
        if best is None or rate > best.steps_per_second:
            best = trial
        yield trial
    if best is None:
        bench.make_setup(agent, env, config, devices)  # raises the reason


def _changes(config: SebulbaConfig, devices: int) -> Iterator[dict[str, int]]:
    """Yield changes of a setting: the split, the threads, and at last the size of batches."""
    actors = 1
    while actors < devices:
        yield {"actors": actors, "learners": devices - actors}
        actors *= 2
    for threads in (1, 2, 4):
        yield {"threads_per_actor": threads}
    for threads in (1, num_cores()):
        yield {"env_threads": threads}
    for factor in (2, 4):
        yield {"num_envs": factor * config.num_envs}


def _fits(
    agent: Any, env: HostEnvironments, config: SebulbaConfig, devices: list[Device]
) -> bench.Setup | None:
    """Return what runs this setting, its split written out, or None where devices do not fit."""
    try:
        setup = bench.make_setup(agent, env, config, devices)
    except ConfigError:
        return None
    split = {"actors": len(setup.split.actors), "learners": len(setup.split.learners)}
    return dataclasses.replace(setup, config=dataclasses.replace(setup.config, **split))
