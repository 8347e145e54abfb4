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
from podracer.devices.mesh import Device, in_turn
from podracer.drivers.progress import Orders
from podracer.drivers.sebulba.actor_pool import native_threads
from podracer.drivers.sebulba.config import SebulbaConfig
from podracer.drivers.sebulba.driver import Sebulba
from podracer.environment import Environment, HostEnvironments
from podracer.errors import ConfigError

_WARM_UP = 3  # chunks that are not measured
_UPDATES_PER_CHUNK = 2
_SETTINGS = (
    "num_envs", "threads_per_actor", "env_threads", "actors", "learners", "update_pieces"
)  # fmt: skip


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
    best, best_rate, actor_threads = config, 0.0, config.num_threads
    measured, refused = list[SebulbaConfig](), list[ConfigError]()
    changes = [{}, *_changes(config, devices)]
    end = time.monotonic() + seconds
    for index, change in enumerate(changes):
        if (threads := change.pop("all_env_threads", None)) is not None:
            change["env_threads"] = max(1, threads // actor_threads)
        try:
            driver = Sebulba(blueprint, env, dataclasses.replace(best, **change), devices)
        except ConfigError as error:
            refused.append(error)
            continue
        split = driver.split
        numbers = {"actors": len(split.actors), "learners": len(split.learners)}
        setting = dataclasses.replace(driver.config, **numbers)
        resolved = dataclasses.replace(setting, env_threads=native_threads(setting, split))
        if resolved in measured or (measured and time.monotonic() > end):
            continue
        measured.append(resolved)
        share = (end - time.monotonic()) / (len(changes) - index)
        rate, metrics = measure(driver, max(1.0, 0.5 * share))
        if rate > best_rate:
            best, best_rate, actor_threads = setting, rate, split.threads
        settings = {name: n for name in _SETTINGS if (n := getattr(setting, name))}  # 0: default
        shares = (metrics[name] for name in ("actor_idle", "learner_idle", "lag_mean"))
        yield Trial({"devices": len(devices), **settings}, rate, *shares)
    if not measured:
        raise refused[0]


def _changes(config: SebulbaConfig, devices: Sequence[Device]) -> Iterator[dict[str, int]]:
    """Yield changes of a setting: the split, the threads, and at last the size of batches."""
    for actors in (2**i for i in range(10) if 2**i < len(devices)):
        yield {"actors": actors, "learners": len(devices) - actors}
    if len(devices) == 1 and in_turn(devices[0]):
        yield {"update_pieces": 16}
    for threads in (1, 2, 4):
        yield {"threads_per_actor": threads}
    for times in (0, 1, 1.5, 2):  # native threads of all actors for each core, at least one each
        yield {"all_env_threads": int(times * num_cores())}
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
