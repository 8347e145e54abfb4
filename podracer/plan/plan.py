"""The plan of a run: memory as XLA lays its program out, speed as measured here or recorded."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

from podracer.agent import Blueprint
from podracer.bench import sebulba as bench
from podracer.bench.anakin import prepare, training
from podracer.config.experiment import Experiment
from podracer.devices.memory import format_bytes
from podracer.devices.mesh import check_divisible, find_devices, make_mesh
from podracer.drivers import anakin
from podracer.drivers.anakin import AnakinConfig
from podracer.drivers.sebulba import SebulbaConfig
from podracer.drivers.sebulba.config import check_peers, split_numbers
from podracer.environment import Environment, HostEnvironments
from podracer.errors import ConfigError
from podracer.plan.devices import Machine
from podracer.plan.memory import Memory, anakin_memory, largest_batch, sebulba_memory
from podracer.run.setup import build, checked_spec, to_host_environments

_LEAST_LAPS = 3


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run needs, as far as it is known; None stands for what is unknown."""

    recipe: str
    arch: str
    machine: str
    hosts: int
    devices: int
    """Number of devices of all hosts."""
    num_envs: int
    rollout_length: int
    memory: list[Memory]
    usable_bytes: int | None
    """Memory of each device that a program may use."""
    largest_num_envs: int | None
    """Number of environments that fit, where `num_envs` do not; 0 if none does."""
    steps_per_second: float | None
    speed_source: str
    """Where the speed comes from, or why there is none."""
    frames: int
    hours: float | None
    """Hours of training, without start, compilation, evaluations and checkpoints."""
    dollars: float | None

    @property
    def fits(self) -> bool | None:
        """Whether the memory of each device suffices."""
        if self.usable_bytes is None:
            return None
        return all(memory.total <= self.usable_bytes for memory in self.memory)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON."""
        data = dataclasses.asdict(self)
        for entry, memory in zip(data["memory"], self.memory, strict=True):
            entry["total"] = memory.total
        return {**data, "fits": self.fits}


@dataclasses.dataclass(frozen=True)
class Target:
    """A checked run on its machine."""

    memory: Callable[[int], list[Memory]]
    """Function of the number of environments; returns the memory of each kind of device."""
    multiple: int
    """Number that divides every possible number of environments."""
    measure: Callable[[float], float]
    """Function of seconds; returns steps per second of one host's share on this machine."""


def make_plan(
    experiment: Experiment,
    machine: Machine,
    *,
    seconds: float = 0.0,
    steps_per_second: float | None = None,
    price: float | None = None,
) -> Plan:
    """Return the plan of a run on a machine.

    `seconds` is the time for a measurement, where the machine is this one; `steps_per_second` is a
    recorded speed in its place, and `price` that of a host for an hour. Raises `ConfigError` where
    the run is impossible there, as training would.
    """
    agent, env = build(experiment)
    make_target = _anakin_target if experiment.arch == "anakin" else _sebulba_target
    target = make_target(experiment, agent, env, machine)
    config = experiment.run_driver
    memory = target.memory(config.num_envs)
    source = "recorded"
    if not steps_per_second:
        steps_per_second, source = _measured_speed(target, machine, seconds)
    frames = experiment.num_updates * config.steps_per_update
    hours = None if steps_per_second is None else frames / steps_per_second / 3600
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
        steps_per_second=steps_per_second,
        speed_source=source,
        frames=frames,
        hours=hours,
        dollars=None if hours is None or price is None else machine.hosts * price * hours,
    )


def _anakin_target(experiment: Experiment, agent: Blueprint, env: Any, machine: Machine) -> Target:
    if isinstance(env, HostEnvironments):
        raise ConfigError(
            f"{env.spec.name} runs on the host: take `driver=podracer.SebulbaConfig()`."
        )
    config: Any = experiment.run_driver
    anakin.check(agent, env, config, machine.devices)

    def memory(num_envs: int) -> list[Memory]:
        share = dataclasses.replace(config, num_envs=num_envs // machine.devices)
        return [anakin_memory(agent, env, share, machine.platform, machine.devices_per_host)]

    def measure(seconds: float) -> float:
        share = dataclasses.replace(config, num_envs=config.num_envs // machine.hosts)
        return measure_anakin(agent, env, share, machine.devices_per_host, seconds)

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

    def measure(seconds: float) -> float:
        devices = find_devices(machine.devices_per_host)
        setup = bench.make_setup(agent, host_env, per_host, devices)
        return bench.measure_training(setup, seconds)[0]

    shares = math.lcm(actors * config.threads_per_actor, config.updates_per_batch) * learners
    return Target(memory, machine.hosts * shares, measure)


def _largest(target: Target, machine: Machine, num_envs: int, memory: list[Memory]) -> int | None:
    """Return the largest number of environments that fits, where `num_envs` do not."""
    usable = machine.usable_bytes
    if usable is None or all(x.total <= usable for x in memory):
        return None

    def largest_total(num_envs: int) -> int:
        return max(x.total for x in target.memory(num_envs))

    return largest_batch(largest_total, num_envs, target.multiple, usable)


def _measured_speed(target: Target, machine: Machine, seconds: float) -> tuple[float | None, str]:
    """Return the steps per second of all hosts if this machine is one of them, and the source."""
    if machine.device is not None:
        return None, f"no recorded speed of the {machine.title} is given"
    if not seconds:
        return None, "nothing was measured"
    steps_per_second = machine.hosts * target.measure(seconds)
    if machine.hosts > 1:
        return steps_per_second, f"measured here on one of {machine.hosts} hosts, without a network"
    return steps_per_second, "measured here"


def measure_anakin(
    agent: Blueprint, env: Environment, config: AnakinConfig, devices: int, seconds: float
) -> float:
    """Return steps per second, the median over chunks for so many seconds after compilation."""
    prepared = prepare(*training(agent, env, config, make_mesh(find_devices(devices))))
    end, laps = time.perf_counter() + seconds, list[float]()
    while len(laps) < _LEAST_LAPS or time.perf_counter() < end:
        laps.append(prepared.lap().seconds)
    return config.steps_per_update * config.updates_per_chunk / statistics.median(laps)


# --- text --------------------------------------------------------------------------------------


def show(plan: Plan) -> str:
    """Return the plan as text."""
    per_host = plan.devices // plan.hosts
    hosts = f"{plan.hosts} host{'s' * (plan.hosts > 1)}"
    title = (
        f"{plan.recipe} under {plan.arch.capitalize()}: {plan.num_envs:,} environments, T "
        f"{plan.rollout_length}, on {hosts} with {per_host} x {plan.machine}"
    )
    return "\n".join([title, *memory_lines(plan), "", *_cost_lines(plan)])


def memory_lines(plan: Plan) -> list[str]:
    """Return the lines on memory: a table of devices and parts, and what does not fit."""
    lines = []
    for memory in plan.memory:
        role = "" if memory.role == "device" else f"{memory.role}'s "
        number = f", {memory.devices} on each host" if memory.devices > 1 or role else ""
        lines += ["", f"Memory of each {role}device{number}"]
        parts = {name: size for name, size in memory.parts.items() if size}
        parts["all"] = memory.total
        if memory.host_bytes:
            parts["and of the memory of each host"] = memory.devices * memory.host_bytes
        lines += [f"  {name:42}{format_bytes(size):>12}" for name, size in parts.items()]
    if plan.usable_bytes is None:
        return [*lines, "How much memory the device has is not known."]
    usable = f"the {format_bytes(plan.usable_bytes)} that a program may use there"
    if plan.fits:
        return [*lines, f"It fits into {usable}."]
    lines.append(f"It does not fit into {usable}.")
    if plan.largest_num_envs:
        lines.append(f"The largest batch that fits: --num-envs {plan.largest_num_envs}.")
    elif plan.largest_num_envs == 0:
        lines.append(
            "No number of environments makes it fit: take a smaller network or replay "
            "(--capacity), a shorter rollout or more devices."
        )
    return lines


def _cost_lines(plan: Plan) -> list[str]:
    if plan.steps_per_second is None or plan.hours is None:
        return [f"Speed, hours and price are not known: {plan.speed_source}."]
    fitted = ", if it fitted" if plan.fits is False else ""
    lines = [
        f"Speed: {plan.steps_per_second:,.0f} steps a second ({plan.speed_source})",
        f"Time: {format_seconds(3600 * plan.hours)} for {plan.frames:,} steps{fitted}",
    ]
    if plan.dollars is None:
        return [*lines, "Price: not known: --price gives that of a host for an hour"]
    price = f"${plan.dollars:,.2f}" if plan.dollars >= 0.01 else "less than $0.01"
    return [*lines, f"Price: {price}{fitted}"]


def format_seconds(seconds: float) -> str:
    """Return a time as text in the unit that suits it."""
    units = (("days", 172_800, 86_400), ("hours", 3600, 3600), ("min", 60, 60), ("s", 0, 1))
    rounded = float(f"{seconds:.3g}")
    unit, least, size = next(entry for entry in units if rounded >= entry[1])
    number = max(seconds, least) / size
    return f"{number:,.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"
