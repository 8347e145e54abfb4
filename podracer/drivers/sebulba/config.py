"""Configuration of Sebulba, and the split of devices into actors and learners."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import UInt32

from podracer.arguments import named
from podracer.devices.mesh import Device, check_divisible, make_mesh, nearest_multiples
from podracer.drivers.state import RolloutConfig
from podracer.environment import HostEnvironments, features
from podracer.errors import ConfigError
from podracer.fields import bounded


@named
@dataclasses.dataclass(frozen=True)
class SebulbaConfig(RolloutConfig):
    """Configuration of the Sebulba driver."""

    num_envs: int = bounded(64, low=1)
    rollout_length: int = bounded(20, low=1)
    updates_per_chunk: int = bounded(20, low=1)
    actors: int = bounded(0, low=0)
    """Actor devices of each host; 0 chooses a split with about three learners for each actor."""
    learners: int = bounded(0, low=0)
    """Learner devices of each host; 0 takes the devices that are not actors."""
    threads_per_actor: int = bounded(0, low=0)
    """Actor threads of each actor device: while the environments of one thread step, the device
    acts for another. 0 takes two, or one for a simulator that exists once."""
    env_threads: int = bounded(0, low=0)
    """Native threads or processes that step the environments of one actor thread. 0 divides the
    cores of the host evenly, or twice as many beside an accelerator."""
    policy_lag: int | None = bounded(1, low=0, high=1000)
    """Number of updates by which the parameters of a rollout are behind. 0 is
    lock-step, which equals Anakin without its fused form; 1 or more overlaps acting with learning,
    reproducibly; None takes the newest."""
    refresh_params: Literal["rollout", "step"] = "rollout"
    """Whether an actor takes newer parameters before each rollout, or before each step as in the
    paper (the policy lag is then an upper bound, and runs are not reproducible to the bit)."""
    queue_depth: int = bounded(1, low=1)
    """Finished trajectories of each actor thread that may wait for the learner."""
    updates_per_batch: int = bounded(1, low=1)
    """Consecutive calls of the agent's `learn` for each batch of trajectories, each with an equal
    part of the environments; together they count as one update."""
    update_pieces: int = bounded(0, low=0)
    """Pieces, at most, in which a device gets the minibatches of an update, or its
    `updates_per_batch`: one that also acts does so between them. 0 gives it the update whole."""
    env_timeout_seconds: float = bounded(120.0, low=0.001)
    """Seconds that a step of the environments may take; the run ends at most five seconds later,
    with exit code 72."""

    @property
    def num_threads(self) -> int:
        """Actor threads of each actor device."""
        return self.threads_per_actor or 2


@dataclasses.dataclass(frozen=True)
class DeviceSplit:
    """Devices of actors and learners, and the share of each actor thread."""

    actors: list[Device]
    """Actor devices of this host."""
    learners: list[Device]
    """Learner devices of this host."""
    mesh: Mesh
    """Learners of all hosts."""
    threads: int
    """Number of actor threads of this host."""
    envs_per_thread: int
    """Number of environments of each actor thread."""

    def describe(self) -> dict[str, int]:
        """Return the numbers that a run's `config.json` keeps."""
        return {
            "actors": len(self.actors),
            "learners": len(self.learners),
            "actor_threads": self.threads,
            "environments_per_thread": self.envs_per_thread,
        }


def with_threads(config: SebulbaConfig, env: HostEnvironments) -> SebulbaConfig:
    """Return the configuration with its number of threads: one for a simulator that exists once.

    Raises `ConfigError` where more are asked for.
    """
    if not features(env).shared:
        return dataclasses.replace(config, threads_per_actor=config.num_threads)
    if config.threads_per_actor > 1 or config.actors > 1:
        raise ConfigError(
            f"{env.spec.name} exists once, so one thread steps all of its environments: take "
            "`driver.threads_per_actor=1` and `driver.actors=1`."
        )
    return dataclasses.replace(config, threads_per_actor=1, actors=1)


def split_devices(devices: Sequence[Device], config: SebulbaConfig) -> DeviceSplit:
    """Split devices into actors and learners, equally on every host.

    A single device is both. Otherwise all devices are used, unless the configuration sets the
    numbers, with about three learners for each actor, so that the environments divide evenly.
    Raises `ConfigError` if they do not.
    """
    hosts = sorted({device.process_index for device in devices})
    by_host = [[d for d in devices if d.process_index == host] for host in hosts]
    local_devices = by_host[hosts.index(jax.process_index())]
    check_divisible("num_envs", config.num_envs, len(hosts), "hosts")
    envs_per_host = config.num_envs // len(hosts)
    num_actors, num_learners = split_numbers(len(local_devices), envs_per_host, config)

    def learners(host_devices: list[Device]) -> list[Device]:
        if len(local_devices) == 1:
            return host_devices
        return host_devices[num_actors : num_actors + num_learners]

    threads = num_actors * config.num_threads
    return DeviceSplit(
        actors=local_devices[:num_actors],
        learners=learners(local_devices),
        mesh=make_mesh([device for host in by_host for device in learners(host)]),
        threads=threads,
        envs_per_thread=envs_per_host // threads,
    )


def split_numbers(devices: int, num_envs: int, config: SebulbaConfig) -> tuple[int, int]:
    """Return the numbers of actor and learner devices of a host.

    Raises `ConfigError` where they cannot share the environments.
    """
    asked = f"`driver.actors={config.actors}` and `driver.learners={config.learners}`"
    if devices == 1:
        if config.actors > 1 or config.learners > 1:
            raise ConfigError(
                f"{asked} need more than the one device of this host; on one device, actors and "
                "learner share it."
            )
        options = [(1, 1)]
    else:
        options = [
            (actors, learners)
            for actors in range(1, devices)
            for learners in range(1, devices - actors + 1)
            if config.actors in (0, actors) and config.learners in (0, learners)
        ]
        if not options:
            raise ConfigError(
                f"{asked} do not fit the {devices} devices of this host: together they may be at "
                f"most {devices}, each at least 1."
            )
    even = [
        (actors, learners)
        for actors, learners in options
        if num_envs % (actors * config.num_threads * learners) == 0
    ]
    if not even:
        actors, learners = max(options, key=_preference)
        nearest = nearest_multiples(num_envs, actors * config.num_threads * learners)
        raise ConfigError(
            f"{num_envs} environments on each host cannot be shared evenly by "
            f"{actors} x {config.num_threads} actor threads and then by {learners} learners: "
            f"take {nearest}."
        )
    return max(even, key=_preference)


def _preference(numbers: tuple[int, int]) -> tuple[int, float]:
    """Order splits: the more devices the better, then the nearer to 3 learners for each actor."""
    actors, learners = numbers
    return actors + learners, -abs(math.log(learners / actors / 3))


def environment_indices(split: DeviceSplit, thread: int, host: int) -> UInt32[np.ndarray, " b"]:
    """Return the indices, within the run, of the environments of an actor thread.

    A thread's rows are split over the learners, and a learner concatenates its rows of all threads.
    The indices are such that this gives the order 0, 1, 2, ... over all learners.
    """
    num_learners = len(split.learners)
    rows_per_shard = split.envs_per_thread // num_learners
    rows_per_learner = rows_per_shard * split.threads
    learners = host * num_learners + np.arange(num_learners)
    first = learners * rows_per_learner + thread * rows_per_shard
    return (first[:, None] + np.arange(rows_per_shard)).reshape(-1).astype(np.uint32)
