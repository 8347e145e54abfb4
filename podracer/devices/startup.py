"""Setup of JAX for one process or for several that share one run."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import logging
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

_LOG = logging.getLogger("podracer")
_CACHE_SETTINGS = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
MAX_LOCAL_DEVICES = 1024  # no host has more, and JAX takes minutes to make so many virtual ones
_GPU_FLAGS = {
    "--xla_gpu_deterministic_ops": "true",
    # The pass joins a softmax with its neighbors. In some programs it takes minutes, or takes a
    # kernel that cannot be built; without it there are as many kernels, or fewer.
    "--xla_disable_hlo_passes": "triton-softmax-rewriter",
}
MAX_JOIN_SECONDS = 7 * 24 * 3600  # a queue may start processes days apart; JAX takes no infinity


@dataclasses.dataclass(frozen=True)
class Hosts:
    """Processes that share one run. Slurm's srun and TPU pods need no flags.

    Elsewhere give all three flags, or set them as JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
    JAX_PROCESS_ID (an indexed Kubernetes job numbers its processes itself).
    """

    coordinator: str | None = None
    """Address of process 0, such as 10.0.0.1:1234."""
    num_processes: int | None = None
    """Number of processes that share the run."""
    process_id: int | None = None
    """Number of this process, from 0 to one less than the number of processes."""
    join_seconds: float = 300.0
    """Time in seconds, above 0 and at most a week, within which all processes must have started;
    one that waits longer ends with exit code 77."""

    def with_environment(self) -> Hosts:
        """Return these settings, or with those of the environment variables if none is set."""

        def number(*names: str) -> int | None:
            texts = [os.environ[name] for name in names if name in os.environ]
            return int(texts[0]) if texts and texts[0].isdigit() else None

        is_set = (self.coordinator, self.num_processes, self.process_id) != (None, None, None)
        names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
        if is_set or not any(name in os.environ for name in names):
            return self
        return Hosts(
            os.environ.get("JAX_COORDINATOR_ADDRESS"),
            number("JAX_NUM_PROCESSES"),
            number("JAX_PROCESS_ID", "JOB_COMPLETION_INDEX"),
            self.join_seconds,
        )


def initialize_devices(hosts: Hosts, devices: int) -> None:
    """Set JAX up for this process's share of the devices; `devices=0` takes all.

    Call it before anything touches a device. On a CPU, `devices` are virtual ones. Raises
    `ConfigError` if `hosts` is incomplete or the processes cannot share the devices evenly. The
    process ends with exit code 77 if the others do not start in time.
    """
    import jax

    from podracer.devices import peers
    from podracer.devices.machine import check_machine
    from podracer.errors import ConfigError

    check_machine()
    choose_gpu_kernels()
    hosts = hosts.with_environment()
    settings = [hosts.coordinator, hosts.num_processes, hosts.process_id]
    is_multi_process = any(x is not None for x in settings)
    if is_multi_process and any(x is None for x in settings):
        raise ConfigError(
            "give `coordinator`, `num_processes` and `process_id` together, or "
            "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID."
        )
    if is_multi_process and not 0 <= hosts.process_id < hosts.num_processes:  # type: ignore[operator]
        raise ConfigError(
            f"`process_id={hosts.process_id}` must lie below `num_processes={hosts.num_processes}`."
        )
    if hosts.coordinator is not None:
        address = re.fullmatch(r".+:([0-9]{1,5})", hosts.coordinator)
        if address is None or not 1 <= int(address[1]) <= 65_535:
            raise ConfigError(
                f"`coordinator={hosts.coordinator}` must be HOST:PORT, with a port from 1 to "
                "65,535."
            )
    if not 0 < hosts.join_seconds <= MAX_JOIN_SECONDS:
        raise ConfigError(
            f"`join_seconds` must be above 0 and at most {MAX_JOIN_SECONDS:,}, but it is "
            f"{hosts.join_seconds:g}."
        )
    if devices:
        if is_multi_process and devices % hosts.num_processes:  # type: ignore[operator]
            raise ConfigError(
                f"`devices={devices}` cannot be split evenly over {hosts.num_processes} processes: "
                f"take a multiple of {hosts.num_processes}."
            )
        local_devices = devices // (hosts.num_processes or 1)
        if local_devices > MAX_LOCAL_DEVICES and not _launched_by_cluster():
            raise ConfigError(
                f"`devices={devices}` is more than the {MAX_LOCAL_DEVICES:,} that a process may "
                "have."
            )
        # Virtual devices, where the run is on a CPU; accelerators ignore this.
        jax.config.update("jax_num_cpu_devices", local_devices)
    if is_multi_process or _launched_by_cluster():
        peers.join(hosts.coordinator, hosts.num_processes, hosts.process_id, hosts.join_seconds)


def choose_gpu_kernels() -> None:
    """Have XLA use only GPU kernels that sum in a fixed order, and no fused softmax.

    Flags that XLA_FLAGS has are left as they are. Call it before anything touches a device. Without
    a GPU plugin of JAX it does nothing.
    """
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    if any(re.search("cuda|rocm", plugin.name) for plugin in plugins):
        _add_xla_flags(_GPU_FLAGS)


def _add_xla_flags(flags: dict[str, str]) -> None:
    present = os.environ.get("XLA_FLAGS", "")
    missing = [f"{name}={value}" for name, value in flags.items() if name not in present]
    os.environ["XLA_FLAGS"] = " ".join([present, *missing]).strip()


def disable_async_dispatch() -> None:
    """Disable JAX's asynchronous dispatch on a CPU.

    An actor waits for each inference anyway, and a dispatch to another thread costs half the time
    of a small one. With several CPU devices the collectives need those threads.
    """
    import jax

    jax.config.update("jax_cpu_enable_async_dispatch", False)


def _launched_by_cluster() -> bool:
    """Return whether a launcher whose variables JAX reads by itself started several processes."""
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    return (tasks.isdigit() and int(tasks) > 1) or "," in os.environ.get("TPU_WORKER_HOSTNAMES", "")


def warn_if_alone(hosts: Hosts) -> None:
    """Log a warning if this process seems to be one of a job, but shares its run with no other."""
    job = _visible_job()
    if job and hosts.with_environment().coordinator is None and not _launched_by_cluster():
        _LOG.warning("This process is %s, but it trains alone: for one run of all %s.", *job)


def _visible_job() -> tuple[str, str] | None:
    """Return of which job of several processes this one seems to be, and how they would join."""
    remedy = "give `coordinator`, `num_processes` and `process_id`"
    for launcher, name in (("Open MPI", "OMPI_COMM_WORLD_SIZE"), ("MPI", "PMI_SIZE")):
        if (size := os.environ.get(name, "1")) not in ("", "0", "1"):
            return f"one of {size} that {launcher} started ({name})", remedy
    if (index := os.environ.get("JOB_COMPLETION_INDEX")) is not None:
        return f"number {index} of an indexed job of Kubernetes (JOB_COMPLETION_INDEX)", remedy
    tasks = os.environ.get("SLURM_NTASKS", "1")
    if "SLURM_STEP_NUM_TASKS" not in os.environ and tasks.isdigit() and int(tasks) > 1:
        return f"the only one of a Slurm job with {tasks} tasks", "start it with srun"
    return None


@contextlib.contextmanager
def compilation_cache() -> Iterator[None]:
    """Keep compiled programs between processes within the context, as `use_compilation_cache` does.

    Then JAX is configured as before, so that programs of the caller's own are kept where the caller
    says, or nowhere.
    """
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    settings = {name: getattr(jax.config, name) for name in _CACHE_SETTINGS}
    if settings["jax_compilation_cache_dir"] is not None:
        yield
        return
    try:
        use_compilation_cache()
        yield
    finally:
        for name, value in settings.items():
            jax.config.update(name, value)
        compilation_cache.reset_cache()  # or JAX would go on with the folder that it has opened


def use_compilation_cache() -> Path | None:
    """Keep compiled programs between processes and return where, unless the user set a cache.

    Only the user can read or write the folder. Who has no home directory that allows it has none.
    """
    import jax

    from podracer.io.cache import prepare_cache

    configured = getattr(jax.config, "jax_compilation_cache_dir", None)
    if configured is not None:
        return Path(configured)
    try:
        cache = Path.home() / ".cache" / "podracer" / "xla"
    except RuntimeError:  # HOME is not set and nobody knows the user, as in some containers
        return None
    if not prepare_cache(cache):
        return None
    for name, value in zip(_CACHE_SETTINGS, (str(cache), 0.2), strict=True):
        jax.config.update(name, value)
    return cache


def prepare_compilers() -> None:
    """Let the compilers of accelerators start without a device, before JAX starts its own.

    They print warnings that there is no device, some of which no setting suppresses.
    """
    os.environ |= {
        "TPU_SKIP_MDS_QUERY": "1",  # asks a server of the cloud
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several processes may compile
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v3-8",
        "CUDA_VISIBLE_DEVICES": "-1",
        "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # checks driver and cuDNN
    }
    _add_xla_flags(_GPU_FLAGS | {"--xla_gpu_autotune_level": "0"})  # autotuning would run kernels
    for name in ("TF_CPP_MIN_LOG_LEVEL", "TPU_MIN_LOG_LEVEL", "TPU_STDERR_LOG_LEVEL"):
        os.environ.setdefault(name, "3")
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
    with without_stderr():
        jax.devices()


@contextlib.contextmanager
def without_stderr() -> Iterator[None]:
    """Discard what libraries write to the standard error stream, past Python."""
    sys.stderr.flush()
    saved, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        os.close(null)
