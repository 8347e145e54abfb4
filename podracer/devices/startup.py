"""Setup of JAX for one process or for several that share one run."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.metadata
import importlib.util
import os
import re
import resource
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from podracer.errors import ConfigError

_CACHE_SETTINGS = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
MAX_LOCAL_DEVICES = 1024  # no host has more, and JAX takes minutes to make so many virtual ones
# Launchers whose processes find their number and that of all in variables: name, the two variables,
# the name of the launcher in JAX, and the variable in which JAX finds the address of process 0.
_LAUNCHERS = (
    ("Open MPI", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "ompi", "OMPI_MCA_orte_hnp_uri"),
    ("Slurm", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "slurm", "SLURM_STEP_NODELIST"),
    ("MPI", "PMI_SIZE", "PMI_RANK", None, ""),
)
GPU_FLAGS = {
    "--xla_gpu_deterministic_ops": "true",
    # The pass joins a softmax with its neighbors. In some programs it takes minutes, or takes a
    # kernel that cannot be built; without it there are as many kernels, or fewer.
    "--xla_disable_hlo_passes": "triton-softmax-rewriter",
}
MAX_JOIN_SECONDS = 7 * 24 * 3600  # a queue may start processes days apart; JAX takes no infinity


class Job(NamedTuple):
    """A launcher's job of several processes, as one of them finds it in its environment."""

    title: str  # this process, in a sentence
    remedy: str  # how it would join if JAX did not find process 0
    num_processes: int | None = None
    process_id: int | None = None
    is_found: bool = False  # JAX finds process 0 by itself
    method: str | None = None  # name of the launcher in JAX


@dataclasses.dataclass(frozen=True)
class Hosts:
    """Processes that share one run. Under srun, Open MPI 4 and on TPUs of GKE they need no flags.

    Elsewhere give all three flags, or set them as JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
    JAX_PROCESS_ID. MPI and indexed Kubernetes jobs number the processes themselves.
    """

    coordinator: str | None = None
    """Address of process 0, such as 10.0.0.1:1234."""
    num_processes: int | None = None
    """Number of processes that share the run; with 1 a process of a larger job trains alone."""
    process_id: int | None = None
    """Number of this process, from 0 to one less than the number of processes."""
    join_seconds: float = 300.0
    """Time in seconds, above 0 and at most a week, within which all processes must have started;
    one that waits longer ends with exit code 77."""

    def with_environment(self) -> Hosts:
        """Return these settings, completed by the variables of JAX and of the launcher."""
        coordinator = self.coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS")
        count, number = self.num_processes, self.process_id
        count = _variable("JAX_NUM_PROCESSES") if count is None else count
        if (self.coordinator, count, number) == (None, 1, None):
            return Hosts(join_seconds=self.join_seconds, num_processes=1)
        number = _variable("JAX_PROCESS_ID") if number is None else number
        if (job := visible_job()) and (job.is_found or coordinator is not None):
            count = job.num_processes if count is None else count
            number = job.process_id if number is None else number
        return Hosts(coordinator, count, number, self.join_seconds)


def visible_job() -> Job | None:
    """Return the job of several processes that this one belongs to, None if it is none."""
    coordinator = "give `coordinator`, HOST:PORT of process 0,"
    for launcher, size, rank, method, address in _LAUNCHERS:
        if (count := _variable(size) or 1) > 1:
            title = f"one of {count} that {launcher} started ({size})"
            return Job(title, coordinator, count, _variable(rank), address in os.environ, method)
    addresses = os.environ.get("TPU_PROCESS_ADDRESSES") or os.environ.get("TPU_WORKER_HOSTNAMES")
    if addresses:
        count = (addresses.count(",") + 1) * (_variable("MEGASCALE_NUM_SLICES") or 1)
        title = f"one of {count} of a TPU (TPU_WORKER_HOSTNAMES)"
        return Job(title, coordinator, count, None, True, "gketpu") if count > 1 else None
    if (index := _variable("JOB_COMPLETION_INDEX")) is not None:
        title = f"number {index} of an indexed job of Kubernetes (JOB_COMPLETION_INDEX)"
        remedy = "give `coordinator`, HOST:PORT of process 0, and `num_processes`"
        return Job(title, remedy, None, index, bool(importlib.util.find_spec("kubernetes")))
    tasks = _variable("SLURM_NTASKS") or 1
    if "SLURM_STEP_NUM_TASKS" not in os.environ and tasks > 1:
        return Job(f"the only one of a Slurm job of {tasks} tasks", "start it with srun")
    return None


def _variable(name: str) -> int | None:
    """Return the number in an environment variable, None if it holds none."""
    text = os.environ.get(name, "")
    return int(text) if text.isdigit() else None


def check_not_alone(hosts: Hosts) -> None:
    """Raise `ConfigError` if this process is one of a job, but would share its run with no other.

    Each would train a run of its own, or all but one be refused the directory.
    """
    settings = hosts.with_environment()
    if (job := visible_job()) and settings == Hosts(join_seconds=hosts.join_seconds):
        raise ConfigError(
            f"this process is {job.title}, and would train alone: {job.remedy} for one run of all, "
            "or `num_processes=1` for a run of its own."
        )


def initialize_devices(hosts: Hosts, devices: int, arch: str = "anakin") -> None:
    """Set JAX up for this process's share of the devices; `devices=0` takes all.

    Call it before anything touches a device. On a CPU, `devices` are virtual ones, and an actor of
    Sebulba (`arch`) waits for a single one. Raises `ConfigError` if `hosts` is incomplete or the
    processes cannot share the devices evenly. The process ends with exit code 77 if the others do
    not start in time.
    """
    from podracer.devices import peers

    if arch == "sebulba" and devices <= 1:
        disable_async_dispatch()
    check_machine()
    choose_gpu_kernels()
    hosts, job = hosts.with_environment(), visible_job()
    settings = (hosts.coordinator, hosts.num_processes, hosts.process_id)
    is_multi_process = settings not in ((None, None, None), (None, 1, None))
    method = job.method if job is not None and job.is_found else "deactivate"
    if None not in settings and method not in ("ompi", "slurm"):  # these give each process a GPU
        method = "deactivate"
    if is_multi_process and None in settings and method == "deactivate":
        raise ConfigError(
            "give `coordinator`, `num_processes` and `process_id` together, or "
            "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID."
        )
    if None not in settings[1:] and not 0 <= hosts.process_id < hosts.num_processes:  # type: ignore[operator]
        raise ConfigError(
            f"`process_id={hosts.process_id}` must lie below `num_processes={hosts.num_processes}`."
        )
    if hosts.coordinator is not None:
        address = re.fullmatch(r".+:([0-9]{1,5})", hosts.coordinator)
        if address is None or not 1 <= int(address[1]) <= 65_535:
            form = "HOST:PORT, with a port from 1 to 65,535"
            raise ConfigError(f"`coordinator={hosts.coordinator}` must be {form}.")
    if not 0 < hosts.join_seconds <= MAX_JOIN_SECONDS:
        limits = f"above 0 and at most {MAX_JOIN_SECONDS:,}"
        raise ConfigError(f"`join_seconds` must be {limits}, but it is {hosts.join_seconds:g}.")
    if devices:
        processes = hosts.num_processes or 1
        if devices % processes:
            multiple = f"a multiple of {processes}, the number of processes"
            raise ConfigError(f"`devices={devices}` must be {multiple}.")
        if devices // processes > MAX_LOCAL_DEVICES:
            limit = f"the {MAX_LOCAL_DEVICES:,} that a process may have"
            raise ConfigError(f"`devices={devices}` is more than {limit}.")
        use_cpu_devices(devices // processes)
    if is_multi_process:
        peers.join(*settings, hosts.join_seconds, method)


def use_cpu_devices(number: int) -> None:
    """Have a CPU show so many virtual devices; accelerators ignore this.

    Raises `ConfigError` if JAX has begun with others, which a module of the user's own can cause.
    """
    import jax

    try:
        jax.config.update("jax_num_cpu_devices", number)
    except RuntimeError as error:
        if jax.default_backend() == "cpu" and jax.local_device_count() != number:
            raise ConfigError(
                f"JAX has begun with {jax.local_device_count()} CPU device(s), not {number}, as a "
                "module computes while it is imported: make its constants with NumPy, or set "
                f"JAX_NUM_CPU_DEVICES={number}."
            ) from error


@functools.cache
def check_machine() -> None:
    """Raise `ConfigError` on a machine where JAX would abort, or fail without saying why.

    It starts threads for each core and some more.
    """
    if sys.platform == "linux" and not Path("/proc/cpuinfo").exists():
        raise ConfigError("JAX on a CPU needs /proc/cpuinfo, which is not there: mount /proc.")
    release, started = threading.Event(), list[threading.Thread]()
    try:
        for _ in range(32 + 2 * (os.cpu_count() or 1)):
            started.append(threading.Thread(target=release.wait))
            started[-1].start()
    except RuntimeError:
        is_memory = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
        limit = "memory (ulimit -v)" if is_memory else "processes of this user (ulimit -u)"
        raise ConfigError(
            f"only {len(started) - 1} threads can be started, and a run needs more: raise the "
            f"limit of {limit} or of the container."
        ) from None
    finally:
        release.set()
        for thread in started:
            if thread.ident is not None:
                thread.join()


def choose_gpu_kernels() -> None:
    """Have XLA use only GPU kernels that sum in a fixed order, and no fused softmax.

    Flags that XLA_FLAGS has are left as they are. Call it before anything touches a device. Without
    a GPU plugin of JAX it does nothing.
    """
    plugins = importlib.metadata.entry_points(group="jax_plugins")
    if any(re.search("cuda|rocm", plugin.name) for plugin in plugins):
        add_xla_flags(GPU_FLAGS)


def add_xla_flags(flags: dict[str, str]) -> None:
    """Add flags to XLA_FLAGS, but those that it has."""
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

    Only the user can read or write the folder. Without a writable home directory there is no cache.
    """
    import jax

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


def prepare_cache(folder: Path) -> bool:
    """Make a folder that its owner alone can use, as JAX runs the machine code that it finds there.

    Returns False where that is impossible, or where the folder belongs to somebody else.
    """
    try:
        for path in (folder.parent, folder):
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if path.stat().st_uid != os.geteuid():
                return False
            path.chmod(0o700)
    except OSError:
        return False
    return True
