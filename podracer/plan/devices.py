"""Devices and machines that a run can be planned for."""

from __future__ import annotations

import dataclasses

from podracer.devices.memory import format_bytes, free_bytes
from podracer.devices.mesh import find_devices, make_mesh
from podracer.errors import ConfigError
from podracer.io.names import nearest


@dataclasses.dataclass(frozen=True)
class Device:
    """Kind of device, by what its vendor says or a user gave."""

    title: str
    memory_bytes: float
    memory_share: float = 1.0
    """Share of the memory that a program may use."""
    devices_per_host: int = 1
    source: str = ""
    """Source of the number of bytes, empty where a user gave it."""


_NVIDIA = "NVIDIA's data sheet, quoted at glennklockwood.com/garden/processors"
_TPU = "cloud.google.com/tpu/docs"
_GPU_SHARE = 0.75  # JAX takes this share of a GPU's memory when it starts

DEVICES = {
    "h200": Device("NVIDIA H200", 141e9, _GPU_SHARE, 1, f"{_NVIDIA}/h100"),
    "h100": Device("NVIDIA H100 SXM", 80e9, _GPU_SHARE, 1, f"{_NVIDIA}/h100"),
    "a100": Device("NVIDIA A100 SXM, 80 GB", 80e9, _GPU_SHARE, 1, f"{_NVIDIA}/A100"),
    "a100-40": Device("NVIDIA A100 SXM, 40 GB", 40e9, _GPU_SHARE, 1, f"{_NVIDIA}/A100"),
    "v5e-8": Device("TPU v5e chip", 16e9, 1.0, 8, f"{_TPU}/v5e"),
    "v4-8": Device("TPU v4 chip", 34.36e9, 1.0, 4, f"{_TPU}/v4"),
    "v3-8": Device("TPU v3 core", 17.18e9, 1.0, 8, f"{_TPU}/v3, half a chip for each core"),
}
"""Devices by the names that `--device` takes."""


def find_device(name: str) -> Device:
    """Return a device by its name. Raises `ConfigError` with the nearest name."""
    if name not in DEVICES:
        choices = f"the devices are here, {', '.join(DEVICES)}"
        raise ConfigError(
            f"There is no device {name!r}: {nearest(name, ['here', *DEVICES])} "
            f"({choices}; give any other by its bytes.)"
        )
    return DEVICES[name]


def device_of(usable_bytes: float) -> Device:
    """Return a device of which no more is known than the memory that a program may use."""
    return Device(f"device of {format_bytes(int(usable_bytes))}", usable_bytes)


@dataclasses.dataclass(frozen=True)
class Machine:
    """Equal hosts with equal devices."""

    title: str
    """Name of its devices."""
    platform: str
    """`cpu`, or another for an accelerator."""
    hosts: int
    devices_per_host: int
    usable_bytes: int | None
    """Memory of each device that a program may use, None where it is unknown."""
    device: Device | None = None
    """Kind of device, None for this machine."""

    @property
    def devices(self) -> int:
        """Number of devices of all hosts."""
        return self.hosts * self.devices_per_host


def machine_here(hosts: int, devices: int) -> Machine:
    """Return `hosts` machines like this one, with `devices` devices in all; 0 for all of each."""
    local_devices = find_devices(_per_host(hosts, devices))
    first, free = local_devices[0], free_bytes(make_mesh(local_devices))
    title = f"{first.device_kind} device of this machine"
    return Machine(title, first.platform, hosts, len(local_devices), free)


def machine_of(device: Device, hosts: int, devices: int) -> Machine:
    """Return hosts of a device, with `devices` devices in all; 0 for its own."""
    per_host = _per_host(hosts, devices) or device.devices_per_host
    usable_bytes = int(device.memory_share * device.memory_bytes)
    return Machine(device.title, "accelerator", hosts, per_host, usable_bytes, device)


def _per_host(hosts: int, devices: int) -> int:
    if devices % hosts:
        raise ConfigError(f"{devices} devices cannot be split evenly over {hosts} hosts.")
    return devices // hosts
