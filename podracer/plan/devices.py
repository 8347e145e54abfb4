"""Devices, prices and speeds of simulators, from one dated file that a user can replace."""

from __future__ import annotations

import dataclasses
import json
import math
import typing
from pathlib import Path
from typing import Any

from podracer.io.names import nearest
from podracer.io.reading import read_limited
from podracer.plan.work import Work
from podracer.types import CheckpointError, ConfigError

SHIPPED = Path(__file__).parent / "devices.json"


@dataclasses.dataclass(frozen=True)
class Price:
    """Price of `devices` devices for an hour, in dollars."""

    low: float
    high: float
    devices: int
    date: str
    source: str

    def of(self, num_devices: int, hours: float) -> tuple[float, float]:
        """Return the lowest and the highest price of devices for some hours."""
        units = num_devices / self.devices * hours
        return units * self.low, units * self.high


@dataclasses.dataclass(frozen=True)
class Device:
    """What a kind of device can do; None is what no source says."""

    name: str
    title: str
    memory_bytes: float
    memory_share: float
    """Share of the memory that a program may use."""
    peak_flops: float
    """Vendor's peak of matrix products in JAX's default precision, in FLOP/s."""
    bytes_per_second: float
    """Vendor's peak bandwidth of the memory."""
    devices_per_host: int
    cores_per_device: int
    """Processor cores of a host for each of its devices."""
    source: str
    link_bytes_per_second: float | None = None
    """Bandwidth to other devices, one way."""
    host_bytes_per_second: float | None = None
    """Bandwidth from the host, one way."""
    price: Price | None = None

    @property
    def usable_bytes(self) -> int:
        """Memory that a program may use."""
        return int(self.memory_share * self.memory_bytes)


@dataclasses.dataclass(frozen=True)
class Speeds:
    """What turns counted work into seconds on an accelerator, besides the vendor's peaks.

    Both numbers are fitted to one published point each, see `check.fitted_speeds`.
    """

    seconds_per_operation: float
    """Time of an operation, however small."""
    efficiency: float
    """Share of the peak that matrix products reach."""

    def terms(self, work: Work, device: Device) -> tuple[float, float, float]:
        """Return the modeled seconds of operations, of FLOPs and of bytes written."""
        return (
            work.operations * self.seconds_per_operation,
            work.flops / (device.peak_flops * self.efficiency),
            work.bytes_written / device.bytes_per_second,
        )

    def seconds(self, work: Work, device: Device) -> float:
        """Return the modeled time of work on a device."""
        return sum(self.terms(work, device))


@dataclasses.dataclass(frozen=True)
class Simulator:
    """Speed of a simulator on one core of a host."""

    steps_per_core_second: float
    source: str


@dataclasses.dataclass(frozen=True)
class Catalog:
    """Everything that the file says."""

    date: str
    devices: dict[str, Device]
    simulators: dict[str, Simulator]

    def device(self, name: str) -> Device:
        """Return a device by its name. Raises `ConfigError` with the nearest name."""
        if name not in self.devices:
            choices = f"the devices are here, {', '.join(self.devices)}"
            raise ConfigError(
                f"There is no device {name!r}: {nearest(name, ['here', *self.devices])} "
                f"({choices}; `prices=FILE` adds others.)"
            )
        return self.devices[name]

    def simulator(self, environment: str) -> Simulator | None:
        """Return the recorded speed of an environment, or of its family before the colon."""
        return self.simulators.get(environment) or self.simulators.get(environment.split(":")[0])


def read_catalog(own: Path | None = None) -> Catalog:
    """Return the shipped catalog, with the entries of a user's file over it, field by field.

    Raises `ConfigError` where the file cannot be read.
    """
    data = _read(SHIPPED)
    if own is not None:
        data = _merged(data, _read(own))
    try:
        return Catalog(
            str(data["date"]),
            {name: _device(name, entry) for name, entry in data["devices"].items()},
            {name: _simulator(name, entry) for name, entry in data["simulators"].items()},
        )
    except (TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{own}: {error}; podracer/plan/devices.json shows the form.") from error


def _device(name: str, entry: dict[str, Any]) -> Device:
    price = entry.get("price")
    _check_fields(name, Device, {**entry, "name": name})
    if price:
        _check_fields(f"the price of {name}", Price, price)
    device = Device(**{**entry, "name": name, "price": Price(**price) if price else None})
    _check_numbers(name, device)
    if device.price is not None:
        _check_numbers(f"the price of {name}", device.price)
    return device


def _simulator(name: str, entry: dict[str, Any]) -> Simulator:
    _check_fields(name, Simulator, entry)
    simulator = Simulator(**entry)
    _check_numbers(name, simulator)
    return simulator


def _check_fields(name: str, kind: type, entry: Any) -> None:
    """Raise `TypeError` where an entry is no object, or lacks fields or has others."""
    if not isinstance(entry, dict):
        raise TypeError(f"{name} must be an object")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    if others := sorted(entry.keys() - fields.keys()):
        raise TypeError(f"{name} has an unknown field {others[0]!r}")
    required = (n for n, field in fields.items() if field.default is dataclasses.MISSING)
    if missing := [n for n in required if n not in entry]:
        raise TypeError(f"{name} lacks {', '.join(missing)}")


def _check_numbers(name: str, part: Device | Price | Simulator) -> None:
    """Raise `TypeError` where a field of numbers holds none, or none above 0."""
    for field, hint in typing.get_type_hints(type(part)).items():
        value, kinds = getattr(part, field), typing.get_args(hint) or (hint,)
        if not {int, float} & set(kinds) or (value is None and type(None) in kinds):
            continue
        if not isinstance(value, int | float) or value is True or not 0 < value < math.inf:
            raise TypeError(f"{field} of {name} must be a finite number above 0")
        if float not in kinds and not isinstance(value, int):
            raise TypeError(f"{field} of {name} must be a whole number")
        if field.endswith("_share") and value > 1:
            raise TypeError(f"{field} of {name} must be at most 1")


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(read_limited(path))
    except (OSError, ValueError, CheckpointError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a JSON object, as podracer/plan/devices.json does.")
    return data


def _merged(base: Any, over: Any) -> Any:
    if isinstance(base, dict) and isinstance(over, dict):
        return {
            key: _merged(base[key], over[key]) if key in base and key in over
            else over.get(key, base.get(key))
            for key in {**base, **over}
        }  # fmt: skip
    return over
