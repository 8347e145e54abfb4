"""Making a plan: the run's own checks, then memory, and where they are known speed and price."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from typing import Any

import jax

from podracer.agent import Blueprint
from podracer.config.experiment import Experiment
from podracer.devices.mesh import check_divisible, find_devices, make_mesh
from podracer.drivers import anakin
from podracer.drivers.anakin import AnakinConfig
from podracer.drivers.sebulba import SebulbaConfig
from podracer.drivers.sebulba.config import check_peers, split_numbers
from podracer.environment import HostEnvironments
from podracer.errors import ConfigError
from podracer.plan.devices import Device, Machine
from podracer.plan.measured import Measurement, load, measure_anakin, measure_sebulba
from podracer.plan.memory import Memory, anakin_memory, largest_batch, sebulba_memory
from podracer.plan.plan import Plan, Speed
from podracer.run.setup import build, checked_spec, to_host_environments

_ALWAYS_UNKNOWN = (
    "Start, compilation, evaluations and checkpoints are not in the hours.",
    "How many frames the agent needs to learn, and whether it does with this batch.",
)
_BUSY_SHARE = 0.25  # of the cores, from which on others slow a measurement down


@dataclasses.dataclass(frozen=True)
class Target:
    """A checked run on its machine: what can be asked about it."""

    memory: Callable[[int], list[Memory]]  # of each kind of device, by the number of environments
    multiple: int  # that the number of environments must be of
    measure: Callable[[float], Measurement]  # on this machine, one host's share, in seconds


def make_plan(
    experiment: Experiment,
    machine: Machine,
    *,
    seconds: float = 0.0,
    steps_per_second: float | None = None,
    price: float | None = None,
) -> Plan:
    """Return the plan of a run on a machine.

    `seconds` is the time for measurements, where the machine is this one; `steps_per_second` is a
    recorded speed in their place, and `price` that of a host for an hour. Raises `ConfigError`
    where the run is impossible there, as training would.
    """
    agent, env = build(experiment)
    make_target = _anakin_target if experiment.arch == "anakin" else _sebulba_target
    target = make_target(experiment, agent, env, machine)
    config = experiment.run_driver
    memory = target.memory(config.num_envs)
    if steps_per_second:
        update_seconds = config.steps_per_update / steps_per_second
        speed = Speed([], update_seconds, "recorded: --steps-per-second", [])
    else:
        speed = _measured_speed(target, machine, config.steps_per_update, seconds)
    frames = experiment.num_updates * config.steps_per_update
    hours = (
        None
        if speed.update_seconds is None
        else (experiment.num_updates * speed.update_seconds / 3600)
    )
    return Plan(
        recipe=experiment.recipe,
        arch=experiment.arch,
        machine=machine.title,
        hosts=machine.hosts,
        devices=machine.devices,
        num_envs=config.num_envs,
        rollout_length=config.rollout_length,
        memory=memory,
        usable_bytes=machine.usable_bytes,
        largest_num_envs=_largest(target, machine, config.num_envs, memory),
        speed=speed,
        steps_per_second=None if hours is None else frames / hours / 3600,
        frames=frames,
        hours=hours,
        dollars=None if hours is None or price is None else machine.hosts * price * hours,
        unknown=[
            *speed.unknown,
            *_about_device(machine.device),
            *_about_host(memory),
            *_ALWAYS_UNKNOWN,
        ],
    )


def _anakin_target(experiment: Experiment, agent: Blueprint, env: Any, machine: Machine) -> Target:
    if isinstance(env, HostEnvironments):
        raise ConfigError(
            f"{env.spec.name} runs on the host: take `driver=podracer.SebulbaConfig()`."
        )
    config: Any = experiment.run_driver
    anakin.check(agent, env, config, machine.devices)

    def share(num_envs: int, parts: int) -> AnakinConfig:
        return dataclasses.replace(config, num_envs=num_envs // parts)

    def memory(num_envs: int) -> list[Memory]:
        config, devices = share(num_envs, machine.devices), machine.devices_per_host
        return [anakin_memory(agent, env, config, machine.platform, devices)]

    def measure(seconds: float) -> Measurement:
        mesh = make_mesh(find_devices(machine.devices_per_host))
        return measure_anakin(agent, env, share(config.num_envs, machine.hosts), mesh, seconds)

    return Target(memory, machine.devices, measure)


def _sebulba_target(experiment: Experiment, agent: Blueprint, env: Any, machine: Machine) -> Target:
    spec, host_env = checked_spec(env), to_host_environments(env)
    config: Any = experiment.run_driver
    check_divisible("num_envs", config.num_envs, machine.hosts, "hosts")
    check_peers(config, machine.hosts)
    per_host: SebulbaConfig = dataclasses.replace(config, num_envs=config.num_envs // machine.hosts)
    actors, learners = split_numbers(machine.devices_per_host, per_host.num_envs, config)

    def memory(num_envs: int) -> list[Memory]:
        return sebulba_memory(
            agent,
            spec,
            dataclasses.replace(config, num_envs=num_envs // machine.hosts),
            machine.platform,
            actors=actors,
            learners=learners,
            shares_device=machine.devices_per_host == 1,
        )

    def measure(seconds: float) -> Measurement:
        return measure_sebulba(agent, host_env, per_host, machine.devices_per_host, seconds)

    shares = math.lcm(actors * config.threads_per_actor, config.updates_per_batch) * learners
    return Target(memory, machine.hosts * shares, measure)


def _measured_speed(target: Target, machine: Machine, steps: int, seconds: float) -> Speed:
    """Return the seconds of an update and its parts, where the machine is this one."""
    if machine.device is not None:
        about = f"no recorded speed of the {machine.title} is given"
        return Speed([], None, about, ["The speed: --steps-per-second gives it."])
    if not seconds:
        return Speed([], None, "nothing was measured", ["The speed: --measure 5 measures it."])
    unknown, source = _about_load(), "measured here"
    measurement = target.measure(seconds)
    if machine.hosts > 1:
        source = f"measured here on one of {machine.hosts} hosts"
        unknown.append("The network between the hosts: no reduction over it is counted.")
    update = steps / machine.hosts / measurement.steps_per_second
    return Speed(measurement.parts, update, source, unknown, is_bound=machine.hosts > 1)


def _about_load() -> list[str]:
    if load() / (os.cpu_count() or 1) <= _BUSY_SHARE:  # both are of the whole machine
        return []
    return [
        f"Other programs were using this machine (load {load():.1f}): measured alone it is faster."
    ]


def _about_device(device: Device | None) -> list[str]:
    if device is None:
        return []
    sentences = [
        "Temporaries are those of the accelerator's program as XLA lays it out for this machine's "
        f"{jax.default_backend()}; the accelerator's own compiler may need more or less.",
    ]
    if device.source:
        sentences.append(f"The device's memory is that of its vendor: {device.source}.")
    if device.memory_share < 1:
        sentences.append(
            f"JAX takes {device.memory_share:.0%} of a GPU's memory, unless "
            "XLA_CLIENT_MEM_FRACTION says otherwise."
        )
    return sentences


def _about_host(memory: list[Memory]) -> list[str]:
    if not any(x.host_bytes for x in memory):
        return []
    return [
        "Whether a host has the memory that the replay takes there: the list of devices does not "
        "say. JAX pins up to 64 GiB for GPUs; XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB says otherwise.",
        "How long samples travel from there to the device: no part has that time.",
    ]


def _largest(target: Target, machine: Machine, num_envs: int, memory: list[Memory]) -> int | None:
    """Return the largest number of environments that fits, where `num_envs` do not."""
    usable = machine.usable_bytes
    if usable is None or all(x.total <= usable for x in memory):
        return None

    def most(num_envs: int) -> int:
        return max(x.total for x in target.memory(num_envs))

    return largest_batch(most, num_envs, target.multiple, usable)
