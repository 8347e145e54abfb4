"""Measured search for the fastest devices, threads and batch size of Sebulba on this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from podracer.agent import Blueprint
from podracer.devices.machine import num_cores
from podracer.devices.mesh import Device
from podracer.drivers.progress import Orders
from podracer.drivers.sebulba.config import SebulbaConfig
from podracer.drivers.sebulba.driver import Sebulba
from podracer.environment import Environment, HostEnvironments
from podracer.errors import ConfigError

_WARM_UP = 3  # chunks that are not measured
_UPDATES_PER_CHUNK = 2


_SETTINGS = ("num_envs", "threads_per_actor", "env_threads", "actors", "learners")


@dataclasses.dataclass(frozen=True)
class Trial:
    """A setting and its measured throughput."""

    settings: dict[str, int]
    """Number of devices, and the driver's settings that are no defaults, by name."""
    steps_per_second: float
    actor_idle: float
    learner_idle: float
    lag_mean: float


def trials(
    blueprint: Blueprint,
    env: Environment | HostEnvironments,
    config: SebulbaConfig,
    devices: Sequence[Device],
    seconds: float,
) -> Iterator[Trial]:
    """Measure settings on these devices for about `seconds`, and yield each.

    The first is `config` itself; the others change one thing in the fastest so far. Raises
    `ConfigError` if none can run.
    """
    config = dataclasses.replace(config, updates_per_chunk=_UPDATES_PER_CHUNK)
    best, best_rate, measured = config, 0.0, list[SebulbaConfig]()
    changes = [{}, *_changes(config, len(devices))]
    end = time.monotonic() + seconds
    refused: ConfigError | None = None
    for index, change in enumerate(changes):
        try:
            driver = Sebulba(blueprint, env, dataclasses.replace(best, **change), devices)
        except ConfigError as error:
            refused = refused or error
            continue
        split = driver.split
        numbers = {"actors": len(split.actors), "learners": len(split.learners)}
        setting = dataclasses.replace(driver.config, **numbers)
        if setting in measured or (measured and time.monotonic() > end):
            continue
        measured.append(setting)
        share = (end - time.monotonic()) / (len(changes) - index)
        rate, metrics = measure(driver, max(1.0, 0.5 * share))
        if rate > best_rate:
            best, best_rate = setting, rate
        numbers = {name: getattr(setting, name) for name in _SETTINGS}
        settings = {name: n for name, n in numbers.items() if n}  # 0 is a default
        shares = (metrics[name] for name in ("actor_idle", "learner_idle", "lag_mean"))
        yield Trial({"devices": len(devices), **settings}, rate, *shares)
    if not measured and refused is not None:
        raise refused


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


def measure(driver: Sebulba, seconds: float) -> tuple[float, dict[str, Any]]:
    """Train for some seconds after a warm-up; return steps a second and the newest metrics.

    Steps are those of single environments.
    """
    config, state = driver.config, driver.init(jax.random.key(0))
    with contextlib.closing(driver.run(state, Orders(2**31))) as training:
        metrics = [next(training).metrics for _ in range(_WARM_UP)][-1]
        start, chunks = time.perf_counter(), 0
        while time.perf_counter() - start < seconds:
            metrics, chunks = next(training).metrics, chunks + 1
        steps = chunks * config.updates_per_chunk * config.steps_per_update
        return steps / (time.perf_counter() - start), metrics
