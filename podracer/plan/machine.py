"""Machines that a plan is for."""

from __future__ import annotations

import dataclasses

from podracer.mesh import find_devices, free_bytes, make_mesh
from podracer.plan.devices import Device
from podracer.types import ConfigError


@dataclasses.dataclass(frozen=True)
class Machine:
    """Equal hosts with equal devices."""

    title: str  # of a device
    platform: str  # `cpu`, or another for an accelerator
    hosts: int
    devices_per_host: int
    usable_bytes: int | None
    device: Device | None = None  # None for this machine, whose parts are measured

    @property
    def devices(self) -> int:
        """Number of devices of all hosts."""
        return self.hosts * self.devices_per_host

    @property
    def cores(self) -> int:
        """Number of processor cores of a host of the catalog."""
        assert self.device is not None
        return self.device.cores_per_device * self.devices_per_host


def machine_here(hosts: int, devices: int) -> Machine:
    """Return `hosts` machines like this one, with `devices` devices in all; 0 for all of each."""
    found = find_devices(_per_host(hosts, devices))
    title = f"{found[0].device_kind} device of this machine"
    return Machine(title, found[0].platform, hosts, len(found), free_bytes(make_mesh(found)))


def machine_of(device: Device, hosts: int, devices: int) -> Machine:
    """Return hosts of a device of the catalog, with `devices` devices in all; 0 for its own."""
    per_host = _per_host(hosts, devices) or device.devices_per_host
    return Machine(device.title, "accelerator", hosts, per_host, device.usable_bytes, device)


def _per_host(hosts: int, devices: int) -> int:
    if devices % hosts:
        raise ConfigError(f"`devices={devices}` cannot be split evenly over {hosts} hosts.")
    return devices // hosts
