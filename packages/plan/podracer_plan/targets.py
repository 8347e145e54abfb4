"""Devices that programs are compiled for, whether or not they are here.

A TPU's compiler is in the package `libtpu`, a GPU's in `jax-cuda12-plugin`. Neither needs a device:
it compiles for a description of one.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from typing import Any

import jax
from jax.experimental import topologies  # no stable home yet

from podracer.devices.memory import free_bytes
from podracer.devices.mesh import Device, find_devices, make_mesh
from podracer.errors import ConfigError
from podracer.names import nearest
from podracer_plan.compilers import without_stderr


@dataclasses.dataclass(frozen=True)
class Kind:
    """Kind of accelerator."""

    title: str
    memory_bytes: float  # memory of a device, which is a core on TPU v3
    flops: float  # peak of float32 products a second, at JAX's default precision
    host: str  # shape of one host, `2x2` chips or `1x1x1` GPUs
    gpu: str = ""  # the compiler's description of a GPU

    @property
    def platform(self) -> str:
        """Name of the compiler's platform."""
        return "cuda" if self.gpu else "tpu"


# NVIDIA, "H100 Tensor Core GPU Architecture", "A100 Tensor Core GPU Architecture", and the CUDA
# programming guide's table of compute capabilities 9.0 and 8.0.
_HOPPER = (
    "cuda_compute_capability { major: 9 } core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98 "
    "l2_cache_size: 52428800 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448"
)
_AMPERE = (
    "cuda_compute_capability { major: 8 } core_count: 108 fpus_per_core: 64 clock_rate_ghz: 1.41 "
    "l2_cache_size: 41943040 shared_memory_per_core: 167936 shared_memory_per_block_optin: 166912"
)


def _gpu(
    title: str, memory: float, flops: float, name: str, size: float, bandwidth: float, chip: str
) -> Kind:
    """Return a GPU; XLA has its name, its bytes of memory and its bytes a second."""
    description = (
        "gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32 "
        "threads_per_core_limit: 2048 shared_memory_per_block: 49152 registers_per_core_limit: "
        "65536 registers_per_block_limit: 65536 block_dim_limit_x: 2147483647 block_dim_limit_y: "
        f"65535 block_dim_limit_z: 65535 {chip} device_memory_size: {size:.0f} memory_bandwidth: "
        f"{bandwidth:.0f} }} runtime_version {{ major: 12 minor: 9 }} dnn_version_info {{ major: 9 "
        f'minor: 12 }} platform_name: "CUDA" device_description_str: "NVIDIA {name}"'
    )
    return Kind(f"NVIDIA {title}", memory, flops, "1x1x1", description)


_GIB = 2**30
# Memory: data sheets of NVIDIA; of TPUs what libtpu 0.0.52 leaves to a program. FLOPs: the same
# sheets (TF32 without sparsity), and cloud.google.com/tpu/docs/{v3,v4,v5e,v5p,v6e} (bf16; half a
# chip for a core of v3).
KINDS = {
    "h100": _gpu("H100 SXM", 80e9, 494e12, "H100 80GB HBM3", 84929347584, 3.352e12, _HOPPER),
    "h200": _gpu("H200", 141e9, 494e12, "H200", 150e9, 4.8e12, _HOPPER),
    "a100": _gpu("A100 SXM, 80 GB", 80e9, 156e12, "A100-SXM4-80GB", 84.9e9, 2.039e12, _AMPERE),
    "a100-40": _gpu("A100 SXM, 40 GB", 40e9, 156e12, "A100-SXM4-40GB", 42.4e9, 1.555e12, _AMPERE),
    "tpu-v3": Kind("TPU v3 core", 15.48 * _GIB, 61.5e12, "2x2"),
    "tpu-v4": Kind("TPU v4 chip", 30.75 * _GIB, 275e12, "2x2x1"),
    "tpu-v5e": Kind("TPU v5e chip", 15.75 * _GIB, 197e12, "2x4"),
    "tpu-v5p": Kind("TPU v5p chip", 95.73 * _GIB, 459e12, "2x2x1"),
    "tpu-v6e": Kind("TPU v6e chip", 31.24 * _GIB, 918e12, "2x4"),
}
# Share of the memory that JAX takes when it starts; XLA_CLIENT_MEM_FRACTION changes it.
_PROGRAM_SHARE = {"cuda": 0.75, "tpu": 1.0}
LAUNCH_SECONDS = 1.3e-6  # shortest launch of a GPU's kernel that was measured
_PACKAGES = {
    "tpu": ("libtpu", "tpu"),
    "cuda": ("jax_plugins.xla_cuda12", "cuda"),
}
_FORMS = "`h100`, `h100:8` (8 GPUs of a host), `tpu-v3:2x2` (8 cores), `tpu-v5e:16x16`"


@dataclasses.dataclass(frozen=True)
class Target:
    """Devices to compile for."""

    name: str
    title: str  # name of a device
    devices: list[Device]
    usable_bytes: int | None  # bytes on a device that programs may use
    kind: Kind | None = None  # None for this machine

    @property
    def platform(self) -> str:
        """Name of the platform for `traced_for`."""
        return self.devices[0].platform

    @property
    def num_hosts(self) -> int:
        """Number of hosts, each with as many devices."""
        return len({device.process_index for device in self.devices})


def find_target(name: str, num_devices: int = 0) -> Target:
    """Return a target by its name; `here` is this machine, with `num_devices` devices or all.

    Raises `ConfigError` for an unknown name or shape, and with what to install where the target's
    compiler is missing.
    """
    if name == "here":
        devices = find_devices(num_devices)
        title = f"{devices[0].device_kind} device of this machine"
        return Target(name, title, devices, free_bytes(make_mesh(devices)))
    kind, shape = kind_named(name), name.partition(":")[2]
    usable = int(_PROGRAM_SHARE[kind.platform] * kind.memory_bytes)
    return Target(name, kind.title, _topology(name, kind, shape or kind.host), usable, kind)


def kind_named(name: str) -> Kind:
    """Return the kind of a target. Raises `ConfigError` as `find_target` does."""
    base = name.partition(":")[0]
    if base not in KINDS:
        raise ConfigError(
            f"There is no target {name!r}: {nearest(base, ['here', *KINDS])} "
            f"A shape may follow, as in {_FORMS}."
        )
    package, extra = _PACKAGES[KINDS[base].platform]
    if not _is_installed(package):
        raise ConfigError(
            f"the compiler for {name} is not installed: pip install -e "
            f'"packages/plan[{extra}]" in the clone of podracer.'
        )
    return KINDS[base]


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def _topology(name: str, kind: Kind, shape: str) -> list[Any]:
    if not re.fullmatch(r"\d+(x\d+)*", shape):
        raise ConfigError(f"{name} has no shape such as those of {_FORMS}.")
    chip = name.partition(":")[0].removeprefix("tpu-")
    arguments = (f"{chip}:{shape}", "tpu")
    # The two cores of a v4 chip are one device, as JAX has them there.
    options = {"chip_config_name": "megacore"} if chip == "v4" else {}
    if kind.platform == "cuda":
        shape = shape if "x" in shape else f"1x1x{shape}"
        arguments, options = ("", "cuda"), {"topology": shape, "target_config": kind.gpu}
    try:
        with without_stderr():  # warnings that there is no device
            return topologies.get_topology_desc(*arguments, **options).devices
    except (ValueError, jax.errors.JaxRuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"there is no target {name} ({reason}): take one such as {_FORMS}."
        ) from error
