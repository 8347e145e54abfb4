"""Setup of an experiment on this machine: agent, environment, devices and driver, checked."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import math
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, TypeVar

import jax
from jax.sharding import Mesh

from podracer.agent import Blueprint, check_policy, policy_params
from podracer.checks import check_environment, check_spec
from podracer.config.experiment import Experiment
from podracer.config.serialization import to_json
from podracer.devices.machine import schedulable_cores
from podracer.devices.memory import format_bytes, free_bytes
from podracer.devices.mesh import Device, find_devices, make_mesh
from podracer.drivers import anakin, population, sebulba
from podracer.drivers.common import (
    Progress,
    TrainState,
    abstract_state,
    init_state,
)
from podracer.drivers.selection import Selection
from podracer.environment import (
    Environment,
    HostEnvironments,
    evaluation_environment,
    exists_once,
)
from podracer.envs.host.device import DeviceEnvironments
from podracer.envs.host.gymnasium import check_not_in_worker, check_script
from podracer.errors import ConfigError
from podracer.evaluate import ActingRule, Evaluation, make_evaluator
from podracer.io.signals import COMPILER
from podracer.run.blueprint import build
from podracer.run.budget import Budget
from podracer.run.history import installed_versions
from podracer.run.resume import experiment_digest
from podracer.types import EnvironmentSpec

T = TypeVar("T")


def checked_spec(environment: Any) -> EnvironmentSpec:
    """Return the checked specification of an environment of either kind."""
    if isinstance(environment, HostEnvironments):
        return check_spec(environment)
    return check_environment(environment, restarts=True)


def checkpointed_environment(
    experiment: Experiment, env: Environment | HostEnvironments
) -> Environment | None:
    """Return the environment if checkpoints hold its state, None if it cannot be saved exactly."""
    exact = isinstance(experiment.driver, anakin.AnakinConfig) or experiment.driver.policy_lag == 0
    return env if exact and not isinstance(env, HostEnvironments) else None


def to_host_environments(env: Environment | HostEnvironments) -> HostEnvironments:
    """Return host environments for actors; a device environment is wrapped."""
    return env if isinstance(env, HostEnvironments) else DeviceEnvironments(env)


@dataclasses.dataclass(frozen=True)
class RunSetup:
    """Everything that a run needs on this machine, checked: the experiment's place is taken."""

    blueprint: Blueprint
    env: Environment | HostEnvironments
    mesh: Mesh  # the learners' devices
    num_devices: int  # all devices, under Sebulba also those of the actors
    num_pods: int  # 0 if it is no population
    budget: Budget
    save_seconds: float
    stall_seconds: float
    abstract_state: TrainState  # shape, dtype and sharding of every leaf
    state_bytes: int  # size of the training state on each device of the mesh
    init: Callable[[], TrainState]
    start_compile: CompileInThread[Any]  # compiles the program that `drive` waits for
    drive: Callable[..., Iterator[Progress]]  # a driver with all arguments but the loop's
    start_evaluation: CompileInThread[object]  # compiles what `evaluate` waits for, for a state
    evaluate: Callable[[TrainState], Evaluation]
    split: sebulba.DeviceSplit | None = None  # under Sebulba
    continues_episodes: Callable[[TrainState], bool] = lambda state: True

    @property
    def saved_bytes(self) -> int:
        """Bytes of the training state on all devices, the most that a checkpoint takes."""
        leaves = jax.tree.leaves(self.abstract_state)
        return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)

    @property
    def topology(self) -> str:
        """Number and kind of devices and number of processes, on which the run's bits depend.

        On a CPU also the number of cores on which the process may run, by which XLA divides large
        products whatever a container's share is.
        """
        device = self.mesh.devices.flat[0]
        devices = f"{self.num_devices} x {device.device_kind}"
        if device.platform == "cpu":
            devices += f" with {schedulable_cores()} cores"
        processes = jax.process_count()
        return devices if processes == 1 else f"{devices} in {processes} processes"


def make_run_setup(experiment: Experiment, saved_devices: int = 0) -> RunSetup:
    """Choose devices and check everything, before any compile. Raises `ConfigError`.

    An experiment that names no number of devices gets the number that the run was saved with; if
    that is 0, or more than this machine has, all devices.
    """
    check_not_in_worker()
    blueprint, env = build(experiment)
    check_script(env)
    devices = _find_devices(experiment.devices, saved_devices)
    if experiment.pods:
        return _population(experiment, blueprint, env, devices)
    if isinstance(experiment.driver, anakin.AnakinConfig):
        return _anakin(experiment, blueprint, env, devices)
    return _sebulba(experiment, blueprint, env, devices)


def _setup(
    experiment: Experiment,
    blueprint: Blueprint,
    env: Environment | HostEnvironments,
    abstract: TrainState,
    mesh: Mesh,
    *,
    lower: Callable[[], Callable[[], Any]],
    drive: Callable[..., Iterator[Progress]],
    evaluate: Callable[[TrainState], Evaluation],
    lower_evaluation: Callable[[TrainState], Callable[[], object]],
    **parts: Any,
) -> RunSetup:
    """Return a setup whose programs compile in threads; `parts` are its other fields."""
    compiled, compiled_evaluation = CompileInThread(lower), CompileInThread(lower_evaluation)

    def evaluate_compiled(state: TrainState) -> Evaluation:
        compiled_evaluation(state).result()
        return evaluate(state)

    return RunSetup(
        blueprint=blueprint,
        env=env,
        mesh=mesh,
        num_pods=len(experiment.pods),
        budget=Budget(experiment),
        save_seconds=experiment.save_seconds,
        stall_seconds=experiment.stall_seconds,
        abstract_state=abstract,
        state_bytes=checked_size(abstract, mesh),
        start_compile=compiled,
        drive=partial(drive, compile=lambda: compiled().result()),
        start_evaluation=compiled_evaluation,
        evaluate=evaluate_compiled,
        **parts,
    )


def _anakin(experiment: Experiment, blueprint: Blueprint, env: Any, devices: Any) -> RunSetup:
    config = experiment.run_driver
    assert isinstance(config, anakin.AnakinConfig)
    if isinstance(env, HostEnvironments):
        raise ConfigError(
            f"{env.spec.name} runs on the host, and Anakin needs an environment on the "
            "device: take `driver=podracer.SebulbaConfig()`."
        )
    anakin.check(blueprint, env, config, len(devices))
    if experiment.evaluations:
        check_policy(blueprint.build(), "take `evaluations=0`")
    parts = (blueprint, env, make_mesh(devices), config)
    abstract = abstract_state(*parts)
    return _setup(
        experiment,
        blueprint,
        env,
        abstract,
        parts[2],
        num_devices=len(devices),
        init=lambda: init_state(*parts, jax.random.key(experiment.seed)),
        lower=partial(anakin.lower_chunk, *parts, abstract),
        drive=partial(anakin.anakin, *parts),
        **_evaluator(experiment, blueprint, env),
    )


def _sebulba(experiment: Experiment, blueprint: Blueprint, env: Any, devices: Any) -> RunSetup:
    config = experiment.run_driver
    assert isinstance(config, sebulba.SebulbaConfig)
    checked_spec(env)
    host = to_host_environments(env)
    config = sebulba.with_threads(config, host)
    split = sebulba.split_devices(devices, config)
    sebulba.check(blueprint, host, config, split)
    if exists_once(host) and experiment.evaluations:
        raise ConfigError(
            f"{host.spec.name} exists once, and training has it: take `evaluations=0`, and "
            "`podracer eval` afterwards."
        )
    saved_env = checkpointed_environment(experiment, env)
    parts = (blueprint, saved_env, split.mesh, config)
    abstract = abstract_state(*parts)
    return _setup(
        experiment,
        blueprint,
        env,
        abstract,
        split.mesh,
        num_devices=len(devices),
        split=split,
        init=lambda: init_state(*parts, jax.random.key(experiment.seed)),
        lower=partial(sebulba.lower_update, blueprint, host.spec, split, config, abstract),
        drive=partial(sebulba.sebulba, blueprint, host, split, config, seed=experiment.seed),
        **_evaluator(experiment, blueprint, env),
        continues_episodes=partial(sebulba.continues_episodes, config),
    )


def _population(experiment: Experiment, blueprint: Blueprint, env: Any, devices: Any) -> RunSetup:
    pods, config = experiment.pods, experiment.run_driver
    if isinstance(env, HostEnvironments):
        raise ConfigError(
            f"a population is one program on the device, and {env.spec.name} runs on the host, "
            f"where each seed is a run of its own: train {experiment.recipe} once for each `seed`."
        )
    if not isinstance(config, anakin.AnakinConfig):
        raise ConfigError(
            "a population is one program on the device: take `driver=podracer.AnakinConfig()`."
        )
    for pod in pods:
        experiment.of_pod(pod).check()
    anakin.check(blueprint, env, config, 1)
    check_policy(blueprint.build(), "train it alone, not in a population")
    if isinstance(experiment.exchange, Selection) and env.spec.takes_turns:
        raise ConfigError(
            "selection ranks pods by their training returns, which in self-play say nothing of "
            "strength: train without one, and rank the pods with `podracer match RUN:0 RUN:1`."
        )
    if experiment.evaluations and isinstance(evaluation_environment(env), HostEnvironments):
        raise ConfigError(
            f"pods are evaluated on the device, and {env.spec.name} runs on the host: take "
            f"`evaluations=0`, or train {experiment.recipe} once for each `seed`."
        )
    mesh = population.population_mesh(devices, len(pods))
    parts, exchange = (blueprint, pods, env, mesh, config), experiment.exchange
    abstract = population.abstract_states(*parts, exchange)
    evaluator = population.make_evaluator(
        blueprint,
        pods,
        env,
        mesh,
        experiment.evaluation_episodes,
        ActingRule(experiment.evaluation_policy, experiment.evaluation_epsilon),
        fixed=experiment.fixed_evaluation,
    )
    return _setup(
        experiment,
        blueprint,
        env,
        abstract,
        mesh,
        num_devices=mesh.size,
        init=lambda: population.init_states(*parts, exchange),
        lower=partial(population.lower_chunk, *parts, abstract, exchange),
        drive=partial(population.population, *parts, exchange=exchange),
        evaluate=evaluator,
        lower_evaluation=evaluator.lower,
    )


def _evaluator(
    experiment: Experiment, blueprint: Blueprint, env: Environment | HostEnvironments
) -> dict[str, Any]:
    """Return `evaluate` and `lower_evaluation` of a `_setup`."""
    agent = blueprint.build()
    try:
        play = make_evaluator(
            agent,
            env,
            experiment.evaluation_episodes,
            policy=experiment.evaluation_policy,
            epsilon=experiment.evaluation_epsilon,
        )
    except ConfigError:
        if experiment.evaluations:
            raise
        return {"evaluate": lambda state: None, "lower_evaluation": lambda state: lambda: None}

    def arguments(state: TrainState) -> tuple[Any, ...]:
        update = 0 if experiment.fixed_evaluation else state.update
        return policy_params(agent, state.learner), state.key, update

    return {
        "evaluate": lambda state: play(*arguments(state)),
        "lower_evaluation": lambda state: play.lower(*arguments(state)),
    }


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


def _find_devices(count: int, saved: int) -> list[Device]:
    if not count and saved:
        with contextlib.suppress(ConfigError):
            return find_devices(saved)
    return find_devices(count)


def checked_size(state: TrainState, mesh: Mesh) -> int:
    """Return a state's bytes on each device. Raises `ConfigError` where they do not fit.

    On a CPU a save reads the arrays themselves, so the next chunk, which may not write into them,
    makes a copy.
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


def run_metadata(experiment: Experiment, setup: RunSetup) -> dict[str, Any]:
    """Return the content of `config.json`: everything needed to repeat and compare the run."""
    device, env = setup.mesh.devices.flat[0], setup.env
    return {
        "recipe": experiment.recipe,
        "experiment": to_json(experiment),
        "run": {"id": uuid.uuid4().hex, "experiment": experiment_digest(experiment)},
        "versions": installed_versions(),
        "device": {
            "platform": device.platform,
            "kind": device.device_kind,
            "devices": setup.num_devices,
            "processes": jax.process_count(),
            **({} if setup.split is None else setup.split.describe()),
        },
        "environment": to_json(env),
        "spaces": setup.blueprint.spec.spaces,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
