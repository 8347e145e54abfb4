"""Making a plan: the run's own checks, then memory, parts, speed and price."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable
from typing import Any

import jax

from podracer.agent import Agent
from podracer.drivers import anakin
from podracer.drivers.anakin import AnakinConfig
from podracer.drivers.sebulba import SebulbaConfig
from podracer.drivers.sebulba.config import check_peers, split_numbers
from podracer.environment import Environment, HostEnvironments
from podracer.experiments.experiment import Experiment
from podracer.experiments.run_setup import build, checked_spec, to_host_environments
from podracer.mesh import check_divisible, find_devices, make_mesh
from podracer.plan.check import COUNTED_ERRORS, fitted_speeds
from podracer.plan.devices import Catalog, Device
from podracer.plan.machine import Machine
from podracer.plan.measured import (
    Measurement,
    load,
    measure_anakin,
    measure_sebulba,
    measure_simulator,
)
from podracer.plan.memory import Memory, anakin_memory, largest_batch, sebulba_memory
from podracer.plan.modeled import Modeled, Split, model_anakin, model_sebulba
from podracer.plan.parts import Part
from podracer.plan.plan import Plan, Speed
from podracer.types import ConfigError

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
    model: Callable[[], Modeled]  # for the machine's device


def make_plan(experiment: Experiment, machine: Machine, catalog: Catalog, seconds: float) -> Plan:
    """Return the plan of a run on a machine; `seconds` is the time for measurements here, or 0.

    Raises `ConfigError` where the run is impossible there, as training would.
    """
    agent, env = build(experiment)
    if isinstance(experiment.driver, AnakinConfig):
        target = _anakin_target(experiment, agent, env, machine)
    else:
        target = _sebulba_target(experiment, agent, env, machine, catalog, seconds)
    config = experiment.run_driver
    memory = target.memory(config.num_envs)
    speed = _speed(target, machine, config.steps_per_update, seconds)
    frames = experiment.num_updates * config.steps_per_update
    hours = None if speed.update_seconds is None else (
        experiment.num_updates * speed.update_seconds / 3600
    )  # fmt: skip
    dollars, price_source = _price(machine, hours)
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
        dollars=dollars,
        price_source=price_source,
        unknown=[
            *speed.unknown,
            *_about_device(machine.device),
            *_about_host(memory),
            *_ALWAYS_UNKNOWN,
        ],
    )


def _anakin_target(experiment: Experiment, agent: Agent, env: Any, machine: Machine) -> Target:
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

    def model() -> Modeled:
        return model_anakin(agent, env, config, machine, fitted_speeds())

    return Target(memory, machine.devices, measure, model)


def _sebulba_target(
    experiment: Experiment,
    agent: Agent,
    env: Environment | HostEnvironments,
    machine: Machine,
    catalog: Catalog,
    seconds: float,
) -> Target:
    spec, host_env = checked_spec(env), to_host_environments(env)
    config: Any = experiment.run_driver
    check_divisible("num_envs", config.num_envs, machine.hosts, "hosts")
    check_peers(config, machine.hosts)
    per_host: SebulbaConfig = dataclasses.replace(config, num_envs=config.num_envs // machine.hosts)
    numbers = split_numbers(machine.devices_per_host, per_host.num_envs, config)
    split = Split(*numbers, config.threads_per_actor)

    def memory(num_envs: int) -> list[Memory]:
        return sebulba_memory(
            agent,
            spec,
            dataclasses.replace(config, num_envs=num_envs // machine.hosts),
            machine.platform,
            actors=split.actors,
            learners=split.learners,
            shares_device=machine.devices_per_host == 1,
        )

    def measure(seconds: float) -> Measurement:
        return measure_sebulba(agent, host_env, per_host, machine.devices_per_host, seconds)

    def model() -> Modeled:
        rate, source = _simulator_rate(experiment, agent, host_env, per_host, catalog, seconds)
        simulator, unknown = _simulator_part(rate, source, per_host, machine)
        unknown += _about_load() if seconds else []
        modeled = model_sebulba(agent, spec, config, split, machine, fitted_speeds(), simulator)
        return dataclasses.replace(modeled, unknown=[*unknown, *modeled.unknown])

    shares = math.lcm(split.threads, config.updates_per_batch) * split.learners
    return Target(memory, machine.hosts * shares, measure, model)


def _simulator_rate(
    experiment: Experiment,
    agent: Agent,
    env: HostEnvironments,
    config: SebulbaConfig,
    catalog: Catalog,
    seconds: float,
) -> tuple[float | None, str]:
    """Return the steps a second of a simulator on one core, measured here or recorded."""
    if seconds:
        rate = measure_simulator(agent, env, config, seconds)
        return rate, f"{rate:,.0f} steps a second of a core, measured here"
    name = experiment.environment
    record = catalog.simulator(name) if isinstance(name, str) else None
    if record is None:
        return None, "neither measured nor recorded: --measure 5 measures it here"
    rate = record.steps_per_core_second
    return rate, f"{rate:,.0f} steps a second of a core, recorded: {record.source}"


def _simulator_part(
    rate: float | None, source: str, config: SebulbaConfig, machine: Machine
) -> tuple[Part, list[str]]:
    """Return the part of the environments, on all cores of a host."""
    if rate is None:
        return Part("simulator", None, source), []
    cores = machine.cores
    unknown = [
        f"Whether a core there is as fast, and whether the host has {cores} of them for the "
        "simulators; Python, inference and transfers need some, too.",
    ]
    seconds = config.steps_per_update / (cores * rate)
    return Part("simulator", seconds, f"modeled for {cores} cores: {source}"), unknown


def _speed(target: Target, machine: Machine, steps: int, seconds: float) -> Speed:
    """Return the seconds of an update and its parts, modeled or measured."""
    if machine.device is not None:
        modeled = target.model()
        return Speed(modeled.parts, modeled.seconds, "modeled, not measured", modeled.unknown)
    if not seconds:
        return Speed([], None, "nothing was measured", ["The speed: --measure 5 measures it."])
    unknown = _about_load()
    measurement = target.measure(seconds)
    update = steps / machine.hosts / measurement.steps_per_second
    if machine.hosts == 1:
        return Speed(measurement.parts, update, "measured here", unknown)
    unknown.append("The network between the hosts: no reduction over it is counted.")
    source = "modeled: as on the one host that was measured here"
    return Speed(measurement.parts, update, source, unknown)


def _about_load() -> list[str]:
    if load() / (os.cpu_count() or 1) <= _BUSY_SHARE:  # both are of the whole machine
        return []
    return [
        f"Other programs were using this machine (load {load():.1f}): measured alone it is faster."
    ]


def _about_device(device: Device | None) -> list[str]:
    if device is None:
        return []
    speeds, (median, worst) = fitted_speeds(), COUNTED_ERRORS
    sentences = [
        f"How fast {device.title} is: nothing was measured there. Times are modeled from counted "
        f"work, with {1e6 * speeds.seconds_per_operation:.2f} microseconds an operation and "
        f"{speeds.efficiency:.1%} of the vendor's peak, each fitted to one published point of an "
        f"A100. Published points that it was not fitted to are {median:.0%} off in the median and "
        f"{worst:.0%} at worst (podracer plan --check).",
        "Temporaries are those of the accelerator's program as XLA lays it out for this machine's "
        f"{jax.default_backend()}; the accelerator's own compiler may need more or less.",
        f"The device's numbers are its vendor's: {device.source}.",
    ]
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


def _price(machine: Machine, hours: float | None) -> tuple[tuple[float, float] | None, str]:
    """Return the lowest and the highest price in dollars, and its source or why there is none."""
    device = machine.device
    if device is None:
        return None, "this machine is not in the list of prices"
    if device.price is None:
        return None, f"no price of {device.name} is known; --prices FILE adds one"
    source = f"{device.price.date}, {device.price.source}"
    return (None if hours is None else device.price.of(machine.devices, hours)), source


def _largest(target: Target, machine: Machine, num_envs: int, memory: list[Memory]) -> int | None:
    """Return the largest number of environments that fits, where `num_envs` do not."""
    usable = machine.usable_bytes
    if usable is None or all(x.total <= usable for x in memory):
        return None

    def most(num_envs: int) -> int:
        return max(x.total for x in target.memory(num_envs))

    return largest_batch(most, num_envs, target.multiple, usable)
