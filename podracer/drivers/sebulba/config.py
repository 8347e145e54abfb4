"""Sebulba's settings, and how devices are split into actors and learners."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import jax
import numpy as np
from jax.sharding import Mesh

from podracer.mesh import Device, make_mesh
from podracer.types import ConfigError


@dataclasses.dataclass(frozen=True)
class SebulbaConfig:
    """How Sebulba runs an agent."""

    num_envs: int = 64
    """Environments in all, shared evenly by the actor threads of all hosts."""
    rollout_length: int = 20
    """T: interactions of each environment before each update."""
    updates_per_chunk: int = 20
    """Updates between two reports."""
    actors: int = 0
    """Actor devices of each host; 0 finds a split: learners about three times the actors."""
    learners: int = 0
    """Learner devices of each host; 0 for the devices that are left."""
    threads: int = 2
    """Actor threads of each actor device: the device acts for one while the other's environments
    step."""
    env_threads: int = 0
    """Native threads or processes that step the environments of one actor thread; 0 shares the
    processor's cores evenly."""
    lag: int | None = 1
    """How many updates the parameters of a rollout are behind: 0 is lock-step, 1 and more overlap
    acting with learning and are reproducible, None takes the newest there are."""
    refresh: Literal["rollout", "step"] = "rollout"
    """When actors take newer parameters: before a rollout, or before every step as in the paper
    (then `lag` is a bound, and runs do not repeat to the bit)."""
    queue_depth: int = 1
    """Finished trajectories that may wait for the learner, for each actor thread."""
    updates_per_batch: int = 1
    """Split the environments of what is received into so many updates, one after the other."""
    step_seconds: float = 120.0
    """Give up (exit code 72) when environments take longer than this for a step."""

    @property
    def steps_per_update(self) -> int:
        return self.num_envs * self.rollout_length


@dataclasses.dataclass(frozen=True)
class Split:
    """Who does what."""

    actors: list[Device]  # of this host
    learners: list[Device]  # of this host
    mesh: Mesh  # the learners of all hosts
    threads: int  # actor threads of this host
    num_envs: int  # of each actor thread

    def describe(self) -> dict[str, int]:
        """For a run's `config.json`."""
        return {
            "actors": len(self.actors),
            "learners": len(self.learners),
            "actor_threads": self.threads,
            "environments_per_thread": self.num_envs,
        }


def split_devices(devices: Sequence[Device], config: SebulbaConfig) -> Split:
    """Actors and learners among these devices, alike on every host.

    A single device is both. Otherwise, unless the configuration says, all devices are used where
    the environments can be shared evenly, as near to three learners for an actor as possible.
    Raises `ConfigError` where they cannot.
    """
    hosts = sorted({device.process_index for device in devices})
    by_host = [[d for d in devices if d.process_index == host] for host in hosts]
    own = by_host[hosts.index(jax.process_index())]
    per_host, rest = divmod(config.num_envs, len(hosts))
    if rest:
        raise ConfigError(
            f"num_envs is {config.num_envs}, which {len(hosts)} hosts cannot share evenly."
        )
    actors, learners = _numbers(len(own), per_host, config)
    shared = len(own) == 1
    choose = (lambda of: of) if shared else (lambda of: of[actors : actors + learners])
    mesh = make_mesh([device for of in by_host for device in choose(of)])
    threads = actors * config.threads
    return Split(own[:actors], choose(own), mesh, threads, per_host // threads)


def _numbers(devices: int, num_envs: int, config: SebulbaConfig) -> tuple[int, int]:
    """How many actor and learner devices a host has."""
    wanted = (config.actors, config.learners)
    if devices == 1:
        if any(n > 1 for n in wanted):
            raise ConfigError(
                f"--actors {config.actors} --learners {config.learners} needs more than the one "
                "device of this host; on one device, actors and learner share it."
            )
        options = [(1, 1)]
    else:
        options = [(a, b) for a in range(1, devices) for b in range(1, devices - a + 1)]
        options = [(a, b) for a, b in options if config.actors in (0, a)]
        options = [(a, b) for a, b in options if config.learners in (0, b)]
        if not options:
            raise ConfigError(
                f"--actors {config.actors} --learners {config.learners} does not fit the "
                f"{devices} devices of this host: together they may be at most {devices}, "
                "each at least 1."
            )
    even = [(a, b) for a, b in options if num_envs % (a * config.threads * b) == 0]
    if not even:
        a, b = max(options, key=_preference)
        step = a * config.threads * b
        near = " or ".join(
            str(n) for n in (num_envs // step * step, -(-num_envs // step) * step) if n
        )
        raise ConfigError(
            f"{num_envs} environments on each host cannot be shared evenly by {a} x "
            f"{config.threads} actor threads and then by {b} learners: take {near}."
        )
    return max(even, key=_preference)


def _preference(numbers: tuple[int, int]) -> tuple[int, float]:
    """Use every device; then three learners for an actor, as the paper advises."""
    actors, learners = numbers
    return actors + learners, -abs(math.log(learners / actors / 3))


def environment_indices(split: Split, thread: int, host: int, hosts: int) -> np.ndarray:
    """The numbers u32 `[b]`, within the run, of an actor thread's environments.

    A thread's rows are split over the learners, and a learner lays the pieces of all threads side
    by side. The numbers are such that this gives the order 0, 1, 2, ... over all learners.
    """
    learners = len(split.learners)
    piece = split.num_envs // learners
    per_learner = piece * split.threads
    first = (host * learners + np.arange(learners)) * per_learner + thread * piece
    return (first[:, None] + np.arange(piece)).reshape(-1).astype(np.uint32)
