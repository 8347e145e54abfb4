"""Memory of the devices that a run can be planned for."""

from __future__ import annotations

import dataclasses

from podracer.io.names import nearest
from podracer.mesh import format_bytes
from podracer.types import ConfigError


@dataclasses.dataclass(frozen=True)
class Device:
    """Memory of a kind of device, and the number of them in a host."""

    title: str
    memory_bytes: float
    memory_share: float  # that a program may use
    devices_per_host: int
    source: str  # of the memory, empty where a user gave it

    @property
    def usable_bytes(self) -> int:
        """Memory that a program may use."""
        return int(self.memory_share * self.memory_bytes)


_NVIDIA = "NVIDIA's data sheet, quoted at glennklockwood.com/garden/processors"
_TPU = "cloud.google.com/tpu/docs"
_GPU_SHARE = 0.75  # of a GPU's memory, which JAX takes when it starts

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
            f"({choices}; --device-bytes plans for any other.)"
        )
    return DEVICES[name]


def device_of(usable_bytes: float) -> Device:
    """Return a device of which no more is known than the memory that a program may use."""
    title = f"device of {format_bytes(int(usable_bytes))}"
    return Device(title, usable_bytes, 1.0, 1, "")
