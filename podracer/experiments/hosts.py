"""Several processes as one run."""

from __future__ import annotations

import dataclasses
import os


@dataclasses.dataclass(frozen=True)
class Hosts:
    """Several processes as one run. Under Slurm's srun and on TPU pods they find each other;
    elsewhere give all three, or set them as JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
    JAX_PROCESS_ID (an indexed Kubernetes job numbers its processes itself)."""

    coordinator: str | None = None
    """Address of process 0, such as 10.0.0.1:1234."""
    num_processes: int | None = None
    """How many processes there are."""
    process_id: int | None = None
    """Which of them this is, from 0."""

    def filled(self) -> Hosts:
        """With what the launcher left in the environment."""

        def number(*names: str) -> int | None:
            found = [os.environ[name] for name in names if name in os.environ]
            return int(found[0]) if found and found[0].isdigit() else None

        if "JAX_COORDINATOR_ADDRESS" not in os.environ or self != Hosts():
            return self
        return Hosts(
            os.environ["JAX_COORDINATOR_ADDRESS"],
            number("JAX_NUM_PROCESSES"),
            number("JAX_PROCESS_ID", "JOB_COMPLETION_INDEX"),
        )


def join(hosts: Hosts, devices: int) -> None:
    """Set JAX up for this process's part; nothing may have touched a device before."""
    import jax

    from podracer.types import ConfigError

    hosts = hosts.filled()
    given = [hosts.coordinator, hosts.num_processes, hosts.process_id]
    several = any(x is not None for x in given)
    if several and any(x is None for x in given):
        raise ConfigError("give --coordinator, --num-processes and --process-id together.")
    if several and not 0 <= hosts.process_id < hosts.num_processes:  # type: ignore[operator]
        raise ConfigError(
            f"--process-id {hosts.process_id} must lie below --num-processes {hosts.num_processes}."
        )
    if devices:
        if several and devices % hosts.num_processes:  # type: ignore[operator]
            raise ConfigError(
                f"--devices {devices} cannot be split evenly over {hosts.num_processes} processes."
            )
        # Virtual devices, where the run is on a CPU; accelerators do not look at this.
        jax.config.update("jax_num_cpu_devices", devices // (hosts.num_processes or 1))
    if several:
        jax.distributed.initialize(hosts.coordinator, hosts.num_processes, hosts.process_id)
    elif _in_cluster():
        jax.distributed.initialize()


def act_at_once() -> None:
    """On a CPU, run what is dispatched in the thread that dispatches it.

    An actor waits for each inference anyway, and handing it to another thread costs half of a
    small one. With several CPU devices the collectives need those threads.
    """
    import jax

    jax.config.update("jax_cpu_enable_async_dispatch", False)


def _in_cluster() -> bool:
    """Whether a launcher whose variables JAX reads by itself started several processes."""
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    return (tasks.isdigit() and int(tasks) > 1) or "," in os.environ.get("TPU_WORKER_HOSTNAMES", "")
