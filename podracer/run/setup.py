"""Setup of an experiment on this machine: agent, environment, devices and driver, checked."""

from __future__ import annotations

import contextlib
import datetime
import uuid
from typing import Any

import jax

from podracer import checks, recipes
from podracer.agent import Blueprint, Context, ReadsFile
from podracer.arguments import typed
from podracer.config.experiment import Experiment, check_types
from podracer.config.serialization import to_json
from podracer.devices.mesh import find_devices
from podracer.drivers.anakin import Anakin, AnakinConfig
from podracer.drivers.driver import Driver, arguments_of
from podracer.drivers.population import Population
from podracer.drivers.sebulba import Sebulba
from podracer.environment import Environment, HostEnvironments, features
from podracer.envs.catalog import make
from podracer.envs.host import gymnasium_worker
from podracer.envs.host.gymnasium import check_script
from podracer.errors import CheckpointError, ConfigError
from podracer.evaluate import ProgramEvaluator
from podracer.io.code import installed_versions
from podracer.io.paths import user_path
from podracer.io.reading import LARGE_FILE, read_limited
from podracer.io.text import remember_secrets
from podracer.run.resume import experiment_digest
from podracer.schedules import over_run

# The values that programs need, of the settings under which they fail.
_JAX_SETTINGS = {
    "jax_enable_x64": False,
    "jax_numpy_dtype_promotion": "standard",
    "jax_disable_jit": False,  # docs/troubleshooting.md shows how to run a single update without it
}


def build(experiment: Experiment) -> tuple[Blueprint, Environment | HostEnvironments]:
    """Return the blueprint of the agent for its environment, and the environment."""
    for name, needed in _JAX_SETTINGS.items():
        if (value := getattr(jax.config, name)) != needed:
            raise ConfigError(
                f"podracer's programs need JAX's setting {name} to be {needed}, but it is {value}: "
                f"unset {name.upper()}, or call jax.config.update({name!r}, {needed!r})."
            )
    checks.check_fields(experiment.agent)
    env: Any = experiment.environment
    remember_secrets(to_json(experiment))
    if isinstance(env, str):
        env = make(env)
    settings = over_run(experiment.agent, experiment.num_steps)
    context = _context(settings, experiment.driver.rollout_length)
    blueprint = Blueprint(settings, checks.check_spec(env), context, arguments_of(env))
    if (check := features(env).check_agent) is not None:
        check(blueprint.build(), experiment)
    return blueprint, env


def _context(settings: Any, rollout_length: int) -> Context:
    if not isinstance(settings, ReadsFile) or (name := settings.data_file) is None:
        return Context(rollout_length)
    try:
        content = read_limited(user_path(name), LARGE_FILE)
    except (OSError, CheckpointError) as error:
        raise ConfigError(
            f"{type(settings).__name__} needs the file {name!r}, which cannot be "
            f"read: {getattr(error, 'strerror', None) or error}."
        ) from error
    return Context(rollout_length, settings.read(content))


def make_driver(experiment: Experiment, saved_devices: int = 0) -> Driver:
    """Choose devices and check everything, before any compile. Raises `ConfigError`.

    An experiment that names no number of devices gets the number that the run was saved with; if
    that is 0, or more than this machine has, all devices.
    """
    blueprint, env = build(experiment)
    if isinstance(env, HostEnvironments) or gymnasium_worker.inside_worker:
        check_script(env)
    devices, config = find_devices(experiment.devices), experiment.run_driver
    if not experiment.devices and saved_devices:
        with contextlib.suppress(ConfigError):
            devices = find_devices(saved_devices)
    any_env: Any = env  # each driver refuses what it cannot step
    if experiment.pods:
        if isinstance(env, HostEnvironments):
            raise ConfigError(
                f"{env.spec.name} runs on the host, in no population: train once for each `seed`."
            )
        if not isinstance(config, AnakinConfig):
            raise ConfigError("a population is one program: take `driver=podracer.AnakinConfig()`.")
        for pod in experiment.pods:
            experiment.of_pod(pod).check()
        return Population(blueprint, experiment.pods, env, config, devices, experiment.exchange)
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


@typed
def check_agent(
    experiment: Experiment | Blueprint | str, *, num_envs: int | None = None, num_devices: int = 2
) -> None:
    """Raise `ConfigError` that names the function if an agent breaks the contract of `Agent`.

    An experiment, or a recipe by its name, brings the environment, the data, the length of rollouts
    and the number of environments; a blueprint has 256 of them. The agent is traced with `num_envs`
    environments on each of `num_devices` devices. Their states must not drift apart. On a CPU their
    reductions must have an order. Nothing is computed but a batch of actions under masks.
    """
    if isinstance(experiment, str):
        experiment = recipes.find(experiment)
    if isinstance(experiment, Experiment):
        check_types(experiment)
        experiment.check()
        blueprint, default = build(experiment)[0], experiment.driver.num_envs
    else:
        check_types(experiment.settings)
        blueprint, default = experiment, 256
    counts = {"num_envs": default if num_envs is None else num_envs, "num_devices": num_devices}
    for name, count in counts.items():
        if count < 1:
            raise ConfigError(f"check_agent: {name} must be at least 1, but it is {count}.")
    checks.check_agent(blueprint, **counts)
