"""What the architectures have in common: an agent and an environment that a driver trains."""

from __future__ import annotations

import abc
import math
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import equinox as eqx
import jax
from jax.sharding import Mesh

from podracer.agent import Blueprint, Context, Settings, check_policy, policy_params
from podracer.checks import check_spec
from podracer.devices.machine import schedulable_cores
from podracer.devices.memory import format_bytes, free_bytes
from podracer.drivers.progress import Orders, Progress, to_progress
from podracer.drivers.state import RolloutConfig, TrainState
from podracer.environment import Environment, HostEnvironments
from podracer.errors import ConfigError
from podracer.evaluate import PolicyKind, ProgramEvaluator, make_evaluator
from podracer.io.exits import COMPILER

T = TypeVar("T")


class CompileInThread(Generic[T]):
    """Function that prepares a call here, makes it in a thread, and returns its future.

    That happens once. What JAX traces depends on settings of the thread, so it is traced here.
    """

    def __init__(self, prepare: Callable[..., Callable[[], T]]) -> None:
        self._prepare = prepare
        self._future: Future[T] | None = None
        self.seconds = 0.0  # from the start to the end, once it has ended

    def __call__(self, *args: Any) -> Future[T]:
        """Start the call, unless it has begun, and return its future."""
        if self._future is None:
            start, executor = time.perf_counter(), ThreadPoolExecutor(1, COMPILER)
            call = self._prepare(*args)

            def timed() -> T:
                result = call()
                self.seconds = time.perf_counter() - start
                return result

            self._future = executor.submit(timed)
            executor.shutdown(wait=False)  # after this one
        return self._future


class Driver(abc.ABC):
    """An architecture with the agent and the environment that it trains, checked, not compiled.

        driver = Anakin(PPO(), podracer.make("cartpole"), AnakinConfig())
        for progress in driver.run(driver.init(jax.random.key(0)), Orders(1_000)):
            print(progress.metrics["loss"])

    Its programs are compiled once: a state of another seed runs in them, and so do other numbers of
    the agent.
    """

    num_pods = 0
    """Number of learners of a population, 0 for other drivers."""

    def __init__(
        self,
        blueprint: Blueprint,
        env: Environment | HostEnvironments,
        config: Any,
        mesh: Mesh,
        abstract_state: TrainState,
        init: Callable[[jax.Array], TrainState],
        num_devices: int,
    ) -> None:
        self.blueprint, self.env, self.config = blueprint, env, config
        self.agent = blueprint.build()
        self.mesh = mesh
        """Mesh of the learners' devices."""
        self.num_devices = num_devices
        """Number of all devices, under Sebulba with the actors'."""
        self.abstract_state = abstract_state
        """Shape, dtype and sharding of every leaf of a state."""
        self.state_bytes = checked_size(abstract_state, mesh)
        """Size of a state on each device of the mesh."""
        self.init = init
        """`(key)`: Return the state before the first update, from a run's key; of a population from
        keys `[P]`."""
        self.compile_in_thread = CompileInThread(self.lower)
        """`()`: Begin to compile the program of training in a thread, once; return its future."""

    @abc.abstractmethod
    def lower(self) -> Callable[[], Any]:
        """Trace the program of training; return a function that compiles it.

        The returned function raises `ConfigError` if the program's memory exceeds the mesh's.
        """

    @abc.abstractmethod
    def run(self, state: TrainState, orders: Orders) -> Generator[Progress]:
        """Train from `state` (consumed) until the updates of `orders` are done."""

    def report(self, updates: int, values: Any) -> Progress:
        """Return the report on updates, from their number at the end and their metrics."""
        return to_progress(updates, values, self.blueprint.spec, self.abstract_state.learner.shared)

    def evaluator(
        self,
        episodes: int,
        *,
        policy: PolicyKind = "greedy",
        epsilon: float = 0.0,
        fixed: bool = False,
    ) -> ProgramEvaluator:
        """Return a function `(state) -> Evaluation`; with `fixed` all play the same episodes.

        Raises `ConfigError` for an agent without a policy, and as `make_evaluator` does.
        """
        check_policy(self.agent, "take `evaluations=0`")
        play = make_evaluator(self.agent, self.env, episodes, policy=policy, epsilon=epsilon)

        def inputs(state: TrainState) -> tuple[Any, ...]:
            params = policy_params(self.agent, state.learner)
            return params, state.key, 0 if fixed else state.update

        return play.after(inputs)

    def continues_episodes(self, state: TrainState) -> bool:
        """Return whether training from a state goes on within the episodes of its environments.

        It does where environments can be saved: in JAX, under Sebulba in lock-step.
        """
        return bool(jax.tree.leaves(state.actor))

    @property
    def saved_bytes(self) -> int:
        """Bytes of a state on all devices, the most that a checkpoint takes."""
        leaves = jax.tree.leaves(self.abstract_state)
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)

    @property
    def topology(self) -> str:
        """Number and kind of devices and number of processes, on which the bits depend.

        On a CPU also the number of cores on which the process may run, by which XLA divides large
        products whatever a container's share is.
        """
        device = self.mesh.devices.flat[0]
        devices = f"{self.num_devices} x {device.device_kind}"
        if device.platform == "cpu":
            devices += f" with {schedulable_cores()} cores"
        processes = jax.process_count()
        return devices if processes == 1 else f"{devices} in {processes} processes"


def blueprint_for(
    agent: Blueprint | Settings, env: Environment | HostEnvironments, config: RolloutConfig
) -> Blueprint:
    """Return the blueprint of an agent's settings for a driver's environments, or the given one."""
    if isinstance(agent, Blueprint):
        return agent
    return Blueprint(agent, check_spec(env), Context(config.rollout_length), arguments_of(env))


def arguments_of(env: Any) -> Any:
    """Return an environment with its numbers and arrays alone, which are arguments of programs.

    So recorded or historical data are not compiled into them.
    """
    return eqx.filter(env, lambda leaf: eqx.is_array(leaf) or eqx.is_inexact_array_like(leaf))


def checked_size(state: TrainState, mesh: Mesh) -> int:
    """Return a state's bytes on each device. Raises `ConfigError` where they do not fit.

    On a CPU a save reads the arrays themselves, so the next chunk has to write into others.
    """

    def size(part: Any) -> int:
        return sum(
            math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
            for x in jax.tree.leaves(part)
        )

    is_cpu = mesh.devices.flat[0].platform == "cpu"
    needed, local = size(state), size(state.learner.local)
    free = free_bytes(mesh)
    if free is not None and (1 + is_cpu) * needed > free:
        for_save = "and as much again during a save, " if is_cpu else ""
        raise ConfigError(
            f"the training state needs {format_bytes(needed)} on each device, of which "
            f"{format_bytes(local)} belong to environments (a replay, for most agents), "
            f"{for_save}but {format_bytes(free)} are free: take a smaller `agent.replay.capacity`, "
            "fewer environments or more devices."
        )
    return needed
