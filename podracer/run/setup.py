"""Setup of an experiment on this machine: agent, environment, devices and driver, checked."""

from __future__ import annotations

import contextlib
import datetime
import uuid
from typing import Any

import jax

from podracer.config.experiment import Experiment
from podracer.config.serialization import to_json
from podracer.devices.mesh import Device, find_devices
from podracer.drivers.anakin import Anakin, AnakinConfig
from podracer.drivers.driver import Driver
from podracer.drivers.population import Population
from podracer.drivers.sebulba import Sebulba
from podracer.environment import HostEnvironments
from podracer.envs.host.gymnasium import check_script
from podracer.errors import ConfigError
from podracer.evaluate import ProgramEvaluator
from podracer.io.code import installed_versions
from podracer.run.blueprint import build
from podracer.run.resume import experiment_digest


def make_driver(experiment: Experiment, saved_devices: int = 0) -> Driver:
    """Choose devices and check everything, before any compile. Raises `ConfigError`.

    An experiment that names no number of devices gets the number that the run was saved with; if
    that is 0, or more than this machine has, all devices.
    """
    blueprint, env = build(experiment)
    check_script(env)
    devices, config = _find_devices(experiment.devices, saved_devices), experiment.run_driver
    any_env: Any = env  # each driver refuses what it cannot step
    if experiment.pods:
        if not isinstance(config, AnakinConfig) and not isinstance(env, HostEnvironments):
            raise ConfigError(
                "a population is one program on the device: take `driver=podracer.AnakinConfig()`."
            )
        for pod in experiment.pods:
            experiment.of_pod(pod).check()
        parts: tuple[Any, ...] = (any_env, config, devices, experiment.exchange)
        return Population(blueprint, experiment.pods, *parts)
    if isinstance(config, AnakinConfig):
        return Anakin(blueprint, any_env, config, devices)
    return Sebulba(blueprint, env, config, devices)


def make_evaluator(experiment: Experiment, driver: Driver) -> ProgramEvaluator:
    """Return the experiment's evaluation, a function of the state. Raises `ConfigError`."""
    return driver.evaluator(
        experiment.evaluation_episodes,
        policy=experiment.evaluation_policy,
        epsilon=experiment.evaluation_epsilon,
        fixed=experiment.fixed_evaluation,
    )


def _find_devices(count: int, saved: int) -> list[Device]:
    if not count and saved:
        with contextlib.suppress(ConfigError):
            return find_devices(saved)
    return find_devices(count)


def run_metadata(experiment: Experiment, driver: Driver) -> dict[str, Any]:
    """Return the content of `config.json`: everything needed to repeat and compare the run."""
    device = driver.mesh.devices.flat[0]
    return {
        "recipe": experiment.recipe,
        "experiment": to_json(experiment),
        "run": {"id": uuid.uuid4().hex, "experiment": experiment_digest(experiment)},
        "versions": installed_versions(),
        "device": {
            "platform": device.platform,
            "kind": device.device_kind,
            "devices": driver.num_devices,
            "processes": jax.process_count(),
            **(driver.split.describe() if isinstance(driver, Sebulba) else {}),
        },
        "environment": to_json(driver.env),
        "spaces": driver.blueprint.spec.spaces,
        "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
