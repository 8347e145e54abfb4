"""The command that examines this machine: `podracer doctor`."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
import tempfile
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from podracer import envs
from podracer.devices.mesh import DATA, SHARDED, make_mesh
from podracer.devices.reductions import global_mean
from podracer.devices.startup import use_compilation_cache
from podracer.io.checkpoint import Checkpointer
from podracer.io.code import installed_versions


@dataclasses.dataclass(frozen=True)
class DoctorOptions:
    """Print devices and versions, and check what a run needs."""


def doctor(options: DoctorOptions) -> int:
    """Run `podracer doctor`: return 0 if all that `podracer train` needs works, else 70."""
    versions = dict(installed_versions())
    versions |= {name: importlib.metadata.version(name) for name in ("mctx", "tensorboardX")}
    print(platform.platform(), *map(" ".join, versions.items()), sep=", ")
    devices = jax.devices()
    print(f"{len(devices)} device(s) on {jax.process_count()} process(es):")
    for device in devices[:16]:
        print(f"  {device.id}: {device.platform} {device.device_kind}")
    cache = use_compilation_cache()
    print(f"compiled programs are kept in {cache or 'no directory, as the user has no home'}")
    code = 0
    for check in (compile_and_run, average_over_all_devices, save_and_restore):
        name, start = check.__name__.replace("_", " "), time.perf_counter()
        try:
            check()
            print(f"  {name}: works ({time.perf_counter() - start:.2f} s)")
        except Exception as error:
            print(f"  {name}: FAILED, {type(error).__name__}: {error}")
            code = 70
    print("environments:")
    for name, _, status in envs.names():
        print(f"  {name:24} {status}")
    return code


def compile_and_run() -> None:
    """Compute a product, or raise `ArithmeticError`."""
    x = jax.jit(lambda x: x @ x)(jnp.eye(256))
    if not bool((x == jnp.eye(256)).all()):
        raise ArithmeticError("a product of identities is not the identity")


def average_over_all_devices() -> None:
    """Compute a mean over the mesh, or raise `ArithmeticError`."""
    mesh = make_mesh()
    mean = jax.shard_map(
        lambda x: global_mean(x, DATA), mesh=mesh, in_specs=SHARDED, out_specs=SHARDED
    )
    x = jax.jit(mean)(jnp.arange(mesh.size, dtype=jnp.float32))
    if not np.allclose(jax.device_get(x), (mesh.size - 1) / 2):
        raise ArithmeticError("devices disagree about a mean")


def save_and_restore() -> None:
    """Write and read a checkpoint, or raise `OSError`."""
    with tempfile.TemporaryDirectory() as directory:
        state = {"x": jnp.arange(8), "key": jax.random.key(0)}
        with Checkpointer(Path(directory)) as checkpointer:
            checkpointer.save(1, state, {})
            checkpointer.wait()
            restored = checkpointer.restore(state)
        if not bool((restored.state["x"] == state["x"]).all()):
            raise OSError("what was restored is not what was saved")
