"""Modeled parts of an update on devices that were not measured: counted work, turned into time."""

from __future__ import annotations

import dataclasses

from podracer.agent import Blueprint
from podracer.drivers.anakin import AnakinConfig
from podracer.drivers.sebulba import SebulbaConfig
from podracer.environment import Environment
from podracer.mesh import format_bytes
from podracer.plan.counted import anakin_work, sebulba_work
from podracer.plan.devices import Device, Speeds
from podracer.plan.machine import Machine
from podracer.plan.parts import Part, ring_seconds, update_seconds
from podracer.plan.work import Work
from podracer.types import EnvironmentSpec


@dataclasses.dataclass(frozen=True)
class Modeled:
    """Parts of an update, the seconds of the whole, and what they leave out, a sentence each."""

    parts: list[Part]
    seconds: float
    unknown: list[str]


@dataclasses.dataclass(frozen=True)
class Split:
    """Actor threads, actor devices and learner devices of each host."""

    actors: int
    learners: int
    threads_per_actor: int

    @property
    def threads(self) -> int:
        """Number of actor threads of a host."""
        return self.actors * self.threads_per_actor


def model_anakin(
    agent: Blueprint, env: Environment, config: AnakinConfig, machine: Machine, speeds: Speeds
) -> Modeled:
    """Model an update under Anakin: one program, whose parts add up."""
    device = _device(machine)
    work = anakin_work(agent, env, config, machine.devices)
    reduction, unknown = _reduction(device, machine.hosts, machine.devices_per_host, work.learning)
    parts = [
        _counted("simulator", work.simulator, device, speeds),
        _counted("acting", work.acting, device, speeds),
        _counted("learning", work.learning, device, speeds),
        reduction,
    ]
    if not (work.simulator + work.acting + work.learning).is_bounded:
        unknown.append("A loop without a known length is counted once: it may take longer.")
    return Modeled(parts, update_seconds(parts, "one after another"), unknown)


def model_sebulba(
    agent: Blueprint,
    spec: EnvironmentSpec,
    config: SebulbaConfig,
    split: Split,
    machine: Machine,
    speeds: Speeds,
    simulator: Part,
) -> Modeled:
    """Model an update under Sebulba, whose simulator is known already."""
    device, hosts = _device(machine), machine.hosts
    unknown = []
    if config.average_hosts and hosts > 1:  # each learns as if it were the only one
        unknown.append("What hosts send each other to average their parameters.")
        config, hosts = dataclasses.replace(config, num_envs=config.num_envs // hosts), 1
    work = sebulba_work(
        agent, spec, config, threads=split.threads, learners=split.learners,
        num_learners=hosts * split.learners,
    )  # fmt: skip
    calls = split.threads_per_actor * config.rollout_length  # of an actor's device
    reduction, unknown_network = _reduction(device, hosts, split.learners, work.learning)
    parts = [
        simulator,
        _counted("acting", work.acting * calls, device, speeds),
        _transfer(calls * work.step_bytes, device),
        _counted("learning", work.learning, device, speeds),
        reduction,
    ]
    seconds = update_seconds(
        parts,
        "one device" if machine.devices_per_host == 1 else "split devices",
        threads=split.threads_per_actor,
        lag=config.policy_lag,
    )
    return Modeled(parts, seconds, unknown + unknown_network)


def _device(machine: Machine) -> Device:
    assert machine.device is not None, "this machine is measured"
    return machine.device


def _counted(name: str, work: Work, device: Device, speeds: Speeds) -> Part:
    """Return a part of the device's own work, with the share of each term in its time."""
    terms, total = speeds.terms(work, device), speeds.seconds(work, device)
    shares = [f"{term / total:.0%}" if total else "0%" for term in terms]
    source = (
        f"modeled: {work.operations:,.0f} operations {shares[0]}, {work.flops / 1e9:,.1f} GFLOP "
        f"{shares[1]}, {format_bytes(int(work.bytes_written))} written {shares[2]}"
    )
    return Part(name, total, source)


def _transfer(size: int, device: Device) -> Part:
    """Return the part of the observations' way from the host to a device."""
    if device.host_bytes_per_second is None:
        return Part("transfer", None, "how fast the host reaches the device is not known")
    seconds = size / device.host_bytes_per_second
    return Part("transfer", seconds, f"modeled: {format_bytes(size)} at the vendor's peak")


def _reduction(
    device: Device, hosts: int, devices_per_host: int, work: Work
) -> tuple[Part, list[str]]:
    """Return the part of averaging gradients over all devices, and what it leaves out."""
    size, devices = work.bytes_reduced, hosts * devices_per_host
    seconds = ring_seconds(size, devices, device.link_bytes_per_second)
    if seconds is None:
        return Part("reduction", None, "the bandwidth between devices is not known"), []
    source = f"modeled: {format_bytes(int(size))} in a ring at the vendor's peak"
    unknown = []
    if hosts > 1:
        unknown.append("The network between hosts: gradients travel as fast as within one host.")
    return Part("reduction", seconds, source), unknown
