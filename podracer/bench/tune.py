"""Measured search for the fastest split of devices, threads and batch size on this machine."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

from podracer.bench import sebulba as bench
from podracer.drivers.sebulba.config import SebulbaConfig
from podracer.environment import HostEnvironments
from podracer.mesh import Device
from podracer.types import ConfigError


@dataclasses.dataclass(frozen=True)
class Trial:
    """A setting and its measured throughput."""

    config: SebulbaConfig
    steps_per_second: float
    actor_idle: float
    learner_idle: float
    lag_mean: float

    def flags(self) -> str:
        """Return the flags for `podracer train`."""
        names = ("num_envs", "threads_per_actor", "actors", "learners")
        return " ".join(
            f"--{name.replace('_', '-')} {getattr(self.config, name)}" for name in names
        )


def trials(
    agent: Any,
    env: HostEnvironments,
    config: SebulbaConfig,
    devices: list[Device],
    seconds: float,
    say: Callable[[Trial], None],
) -> list[Trial]:
    """Measure settings around `config` for about `seconds`, and return the fastest first.

    The first one measured is `config` itself. Raises `ConfigError` if none can run.
    """
    settings = [s for c in candidates(config, len(devices)) if (s := _fits(agent, env, c, devices))]
    if not settings:
        bench.make_setup(agent, env, config, devices)  # raises the reason
    end, done = time.monotonic() + seconds, []
    for index, setting in enumerate(settings):
        share = (end - time.monotonic()) / (len(settings) - index)
        rate, metrics = bench.measure_training(setting, max(1.0, 0.5 * share))
        trial = Trial(
            dataclasses.replace(
                setting.config,
                actors=len(setting.split.actors),
                learners=len(setting.split.learners),
            ),
            rate,
            metrics["actor_idle"],
            metrics["learner_idle"],
            metrics["lag_mean"],
        )
        say(trial)
        done.append(trial)
        if time.monotonic() > end:
            break
    return sorted(done, key=lambda trial: -trial.steps_per_second)


def candidates(config: SebulbaConfig, devices: int) -> Iterator[SebulbaConfig]:
    """Yield the setting itself, other numbers of threads and environments, and other splits."""
    yield config
    for threads in (1, 2, 4):
        for factor in (1, 2, 4):
            change = {"threads_per_actor": threads, "num_envs": config.num_envs * factor}
            if change != {
                "threads_per_actor": config.threads_per_actor,
                "num_envs": config.num_envs,
            }:
                yield dataclasses.replace(config, **change)
    for actors in range(1, devices):
        yield dataclasses.replace(config, actors=actors, learners=devices - actors)


def _fits(
    agent: Any, env: HostEnvironments, config: SebulbaConfig, devices: list[Device]
) -> bench.Setup | None:
    try:
        return bench.make_setup(agent, env, config, devices)
    except ConfigError:
        return None
